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
    """Several 1-D arrays of one type as one, without a copy; indexed by a number, a slice or an array of numbers."""

    ndim = 1

    def __init__(self, arrays: list[np.ndarray]):
        self._arrays, self.dtype = arrays, arrays[0].dtype
        self._starts = np.cumsum([0, *map(len, arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        index = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        index = np.where(index < 0, index + len(self), index)
        if index.size and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"index out of range for {len(self)} ids")
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
            raise ValueError(
                f"data.path: {path} has a vocabulary of its own, in the meta.pkl beside it (nanoGPT's data of single "
                "characters), and no tokenizer here has it; use data=files with the text it was made from"
            )
        named = set(re.findall(r"(?<![a-z])(train|val)(?:ing|idation)?(?![a-z])", path.stem.lower()))
        if len(named) != 1:
            raise ValueError(f"data.path: {path} must have either train or val in its name, to say its split")
        splits[named.pop()].append(_map_file(path))
    for split, arrays in splits.items():
        if not arrays:
            raise ValueError(f"data.path={config.path}: has no file of the {split} split, such as {split}.bin")
    return {split: arrays[0] if len(arrays) == 1 else Shards(arrays) for split, arrays in splits.items()}


def _map_file(path: Path) -> np.ndarray:
    """ValueError also for ids of 32 or 64 bits: read as uint16, every second is 0, which no text gives."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", count=3)
    skip = HEADER if len(header) == 3 and header[0] == MAGIC else 0
    if skip and (header[1] != VERSION or size != HEADER + header[2] * IDS.itemsize or header[2] < 1):
        raise ValueError(
            f"data.path: {path} has llm.c's header, of version {header[1]} for {header[2]} ids, and {size} bytes; must "
            f"be version {VERSION} and {HEADER} + 2 x ids bytes: get or make the file again"
        )
    if size == 0 or size % IDS.itemsize:
        raise ValueError(f"data.path: {path} has {size} bytes; must be uint16 ids, so an even number above 0")
    ids = np.memmap(path, IDS, mode="r", offset=skip)
    if len(ids) >= 4 and not ids[1 : 1 << 16 : 2].any():
        raise ValueError(f"data.path: {path} has a 0 at every second place, so its ids are no uint16; write it anew")
    return ids


def find_documents(config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None]) -> tuple[dict, dict]:
    """Read all ids once: where the documents of each split begin, int64 (documents + 1,), and a fingerprint of the ids.

    A document is what ends with the tokenizer's end-of-document id; in files that have that id first, it begins there.
    Raises ValueError, naming the split and the way out, where an id is outside the vocabulary.
    """
    if tokenizer.vocab_size > 1 << 16:
        raise ValueError(
            f"data={config.name}: its uint16 ids cannot be of tokenizer {tokenizer.name}, which has "
            f"{tokenizer.vocab_size} ids; give the tokenizer that they were made with, such as tokenizer=gpt2"
        )
    content, offsets = hashlib.sha256(), {}
    for split, ids in map_bins(config).items():
        ends = []
        content.update(split.encode())
        for begin in range(0, len(ids), READ):
            block = ids[begin : begin + READ]
            if (largest := block.max()) >= tokenizer.vocab_size:
                raise ValueError(
                    f"data.path={config.path}: the {split} split has id {largest} at {begin + block.argmax()}, outside "
                    f"the {tokenizer.vocab_size} ids of tokenizer {tokenizer.name}: give the tokenizer that it was "
                    "made with, such as tokenizer=gpt2"
                )
            content.update(block)
            ends.append(np.flatnonzero(block == tokenizer.end_of_document) + begin + 1)
        ends = np.concatenate(ends)
        if not len(ends):
            say(f"data={config.name}: no {END_OF_DOCUMENT} in the {split} split, so it is one document")
        ends = ends[(ends != 1) & (ends != len(ids))]  # an end that stands first ends nothing
        offsets[split] = np.concatenate(([0], ends, [len(ids)]), dtype=np.int64)
    return offsets, {"fingerprint": content.hexdigest()[:16]}
