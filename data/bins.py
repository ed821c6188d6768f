"""Token ids made by other programs, used where they lie: nanoGPT's files, and those of llm.c and modded-nanogpt.

Both hold uint16 ids, little-endian. llm.c's begin with a header of 256 int32: a magic number, a version, the number of
ids, and zeros. The split of a file is in its name: `train.bin`, `val.bin`, `fineweb_train_000001.bin`.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data.corpora import DataConfig, files_of
from data.tokenizers import END_OF_DOCUMENT, Tokenizer

IDS = np.dtype("<u2")
MAGIC, VERSION, HEADER = 20240520, 1, 1024  # HEADER: bytes
READ = 1 << 24  # ids read at once


class Shards:
    """Several 1-D arrays of one type as one, without a copy; indexed by a slice, or whole numbers from 0 on."""

    ndim = 1

    def __init__(self, arrays: list[np.ndarray]):
        self._arrays, self.dtype = arrays, arrays[0].dtype
        self._starts = np.cumsum([0, *map(len, arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        index = np.arange(*index.indices(len(self))) if isinstance(index, slice) else np.asarray(index)
        shards = np.searchsorted(self._starts, index, side="right") - 1
        ids = np.empty(index.shape, dtype=self.dtype)
        for shard in np.unique(shards):
            inside = shards == shard
            ids[inside] = self._arrays[shard][index[inside] - self._starts[shard]]
        return ids[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self._arrays, dtype=dtype)


def map_bins(config: DataConfig) -> dict[str, np.ndarray | Shards]:
    """The ids of each split, memory-mapped. ValueError, naming the file, where its name, size or header is wrong."""
    splits: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for path in files_of(config):
        if path.with_name("meta.pkl").exists():
            raise ValueError(f"data.path: {path} has its own vocabulary, in meta.pkl; use data=files with its text")
        named = set(re.findall(r"(?<![a-z])(train|val)(?:ing|idation)?(?![a-z])", path.stem.lower()))
        if len(named) != 1:
            raise ValueError(f"data.path: {path} must have either train or val in its name, for its split")
        splits[named.pop()].append(_map_file(path))
    for split, arrays in splits.items():
        if not arrays:
            raise ValueError(f"data.path={config.path}: has no file of the {split} split, such as {split}.bin")
    return {split: arrays[0] if len(arrays) == 1 else Shards(arrays) for split, arrays in splits.items()}


def _map_file(path: Path) -> np.ndarray:
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", count=3)
    skip = HEADER if len(header) == 3 and header[0] == MAGIC else 0
    count, rest = divmod(size - skip, IDS.itemsize)
    if count < 1 or rest or (skip and (header[1], header[2]) != (VERSION, count)):
        raise ValueError(f"data.path: {path} has {size} bytes; must be uint16 ids, as many as a header of llm.c says")
    ids = np.memmap(path, IDS, mode="r", offset=skip)
    if len(ids) >= 4 and not ids[1 : 1 << 16 : 2].any():  # 32 or 64 bits, read as 16
        raise ValueError(f"data.path: {path} has a 0 at every second place, so its ids are no uint16; write it anew")
    return ids


def find_documents(config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None]) -> tuple[dict, dict]:
    """Read all ids once: where the documents of each split begin, int64 (documents + 1,), and a fingerprint of the ids.

    A document is what ends with the tokenizer's end-of-document id; in files that have that id first, it begins there.
    ValueError where the ids cannot be those of the tokenizer.
    """
    content, offsets = hashlib.sha256(), {}
    for split, ids in map_bins(config).items():
        ends = []
        content.update(split.encode())
        for begin in range(0, len(ids), READ):
            block = ids[begin : begin + READ]
            if not block.max() < tokenizer.vocab_size <= 1 << 16:
                raise ValueError(
                    f"data.path={config.path}: uint16 ids as large as {block.max()}, in the {split} split, are not of "
                    f"the {tokenizer.vocab_size} of tokenizer {tokenizer.name}; give theirs, such as tokenizer=gpt2"
                )
            content.update(block)
            ends.append(np.flatnonzero(block == tokenizer.end_of_document) + begin + 1)
        ends = np.concatenate(ends)
        if not len(ends):
            say(f"data={config.name}: no {END_OF_DOCUMENT} in the {split} split, so it is one document")
        ends = ends[(ends != 1) & (ends != len(ids))]  # an end that stands first ends nothing
        offsets[split] = np.concatenate(([0], ends, [len(ids)]), dtype=np.int64)
    return offsets, {"fingerprint": content.hexdigest()[:16]}
