"""Token ids that other programs have made, used where they lie: nanoGPT's files, and llm.c's or modded-nanogpt's.

Both hold uint16 ids and nothing else, little-endian; the second kind after a header of 256 int32, which are a magic
number, a version, the number of ids, and zeros. Which split a file belongs to is in its name: `train.bin`, `val.bin`,
`fineweb_train_000001.bin`.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.corpora import DataConfig, files_of, readable
from data.tokenizers import END_OF_DOCUMENT, Tokenizer

IDS = np.dtype("<u2")
MAGIC, VERSION, HEADER = 20240520, 1, 1024  # of the header, its bytes
OTHER_MAGICS = {20240801: "Llama 3 ids of llm.c", 20240522: "an evaluation set of llm.c"}
READ = 1 << 24  # ids read at once


@dataclass(frozen=True)
class Shard:
    """A file of ids: how many bytes of it to leave out, and how many ids follow."""

    path: str
    skipped: int
    count: int


class Shards:
    """Several 1-D arrays of one type as one, read-only and without a copy; indexed by a number, a slice or an array."""

    ndim = 1

    def __init__(self, arrays: list[np.ndarray]):
        self._arrays, self.dtype = arrays, arrays[0].dtype
        self._starts = np.cumsum([0, *map(len, arrays)])
        self.shape = (len(self),)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        index = np.asarray(index)
        if index.size and not -len(self) <= index.min() <= index.max() < len(self):
            raise IndexError(f"index out of range for {len(self)} ids")
        index = np.where(index < 0, index + len(self), index)
        which = np.searchsorted(self._starts, index, side="right") - 1
        found = np.empty(index.shape, dtype=self.dtype)
        for shard in np.unique(which):
            here = which == shard
            found[here] = self._arrays[shard][index[here] - self._starts[shard]]
        return found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self._arrays, dtype=dtype)

    def tolist(self) -> list[int]:
        return np.asarray(self).tolist()


def mapped(shards: list[Shard], dtype: np.dtype, way_out: str) -> np.ndarray | Shards:
    """A memory map of a file's numbers, or of several files' as one. ValueError where one is not as long as it was."""
    arrays = []
    for shard in shards:
        path, expected = Path(shard.path), shard.skipped + shard.count * dtype.itemsize
        size = path.stat().st_size if path.exists() else 0
        if size != expected or shard.count == 0:
            raise ValueError(f"{path}: has {size} bytes instead of {expected}; {way_out}")
        arrays.append(np.memmap(path, dtype=dtype, mode="r", offset=shard.skipped, shape=(shard.count,)))
    return arrays[0] if len(arrays) == 1 else Shards(arrays)


def find_borders(folder: Path, config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None]) -> dict:
    """Read all ids once and write where documents begin; returns what tokens.json says of them.

    A document is what ends with the tokenizer's end-of-document id, which is also where one begins in files that have
    that id first. Raises ValueError, naming the file, where it is damaged or an id is outside the vocabulary.
    """
    shards = shards_of(config)
    about: dict[str, Any] = {"dtype": IDS.name, "tokens": {}, "documents": {}}
    content = hashlib.sha256()
    total = sum(shard.count for found in shards.values() for shard in found)
    with tqdm(total=total, unit=" tokens", unit_scale=True, leave=False, disable=None) as bar:
        for split, found in shards.items():
            ends, count = [], 0
            content.update(split.encode())
            for ids in _read(found, tokenizer):
                content.update(ids)
                ends.append(np.flatnonzero(ids == tokenizer.end_of_document) + count + 1)
                count += len(ids)
                bar.update(len(ids))
            ends = np.concatenate(ends)
            if not len(ends):
                end = f"{END_OF_DOCUMENT} (id {tokenizer.end_of_document})"
                say(f"data={config.name}: no {end} in the {split} split, so it is one document")
            ends = ends[(ends != 1) & (ends != count)]  # one that stands first ends nothing
            (folder / f"{split}.offsets").write_bytes(np.concatenate(([0], ends, [count]), dtype=np.int64))
            about["tokens"][split], about["documents"][split] = count, len(ends) + 1
    return {**about, "fingerprint": content.hexdigest()[:16]}


def _read(shards: list[Shard], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for shard in shards:
        for at in range(0, shard.count, READ):
            count = min(READ, shard.count - at)
            with readable(Path(shard.path)):
                ids = np.fromfile(shard.path, IDS, count, offset=shard.skipped + at * IDS.itemsize)
            if len(ids) != count:
                raise ValueError(f"data.path: {shard.path} became shorter while it was read; start again")
            if (largest := ids.max()) >= tokenizer.vocab_size:
                raise ValueError(
                    f"data.path: {shard.path} has id {largest} at place {at + ids.argmax()}, outside the "
                    f"{tokenizer.vocab_size} ids of tokenizer {tokenizer.name}: give the tokenizer that it was made "
                    "with, such as tokenizer=gpt2"
                )
            yield ids


def shards_of(config: DataConfig) -> dict[str, list[Shard]]:
    """The files of each split, by their names and headers. ValueError, naming the file, for one of no use."""
    shards: dict[str, list[Shard]] = {"train": [], "val": []}
    for path in files_of(config):
        if path.with_name("meta.pkl").exists():
            raise ValueError(
                f"data.path: {path} has a vocabulary of its own, in the meta.pkl beside it (nanoGPT's data of single "
                "characters), and no tokenizer here has it; use data=files with the text it was made from"
            )
        named = set(re.findall(r"(?<![a-z])(train|val)(?:ing|idation)?(?![a-z])", path.stem.lower()))
        if len(named) != 1:
            raise ValueError(f"data.path: {path} has to have either train or val in its name, to say its split")
        shards[named.pop()].append(_shard(path))
    for split, found in shards.items():
        if not found:
            raise ValueError(f"data.path={config.path}: has no file of the {split} split, such as {split}.bin")
    return shards


def _shard(path: Path) -> Shard:
    with readable(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = np.frombuffer(file.read(HEADER)[: size // 4 * 4], "<i4")
    magic = int(header[0]) if len(header) else None
    if magic in OTHER_MAGICS:
        raise ValueError(f"data.path: {path} holds {OTHER_MAGICS[magic]} (magic {magic}), which are not read here")
    if magic != MAGIC:  # nanoGPT: ids from the first byte on
        if size == 0 or size % IDS.itemsize:
            raise ValueError(f"data.path: {path} has {size} bytes, which is no whole number of uint16 ids, or none")
        return Shard(str(path), 0, size // IDS.itemsize)
    if size <= HEADER or header[1] != VERSION:
        version = f"version {header[1]}, not {VERSION}" if len(header) > 1 and size > HEADER else f"only {size} bytes"
        raise ValueError(f"data.path: {path} begins like llm.c's files (magic {MAGIC}), but has {version}")
    count = int(header[2])
    if size != HEADER + count * IDS.itemsize:
        raise ValueError(
            f"data.path: {path} has {size} bytes, but its header says {count} ids, which are "
            f"{HEADER + count * IDS.itemsize} bytes; it may have been cut short: get or make it again"
        )
    return Shard(str(path), HEADER, count)
