"""Token ids made by other programs: nanoGPT's files, and those of llm.c and modded-nanogpt.

Both hold uint16 ids, little-endian. llm.c's begin with a header of 256 int32: a magic number, a version, the number of
ids, and zeros. The split of a file is in its name: `train.bin`, `val.bin`, `fineweb_train_000001.bin`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.corpora import DataConfig, files_of
from data.tokenizers import Tokenizer

IDS = np.dtype("<u2")
MAGIC, VERSION, HEADER = 20240520, 1, 1024  # HEADER: bytes
READ = 1 << 24  # ids read at once


def read_ids(config: DataConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray]]:
    """Blocks of ids with their split. ValueError, naming the file, where its name, size, header or ids do not fit."""
    splits: dict[str, list[Path]] = {"train": [], "val": []}
    for path in files_of(config):
        if path.with_name("meta.pkl").exists():
            raise ValueError(f"data.path: {path} has its own vocabulary, in meta.pkl; use data=files with its text")
        named = set(re.findall(r"(?<![a-z])(train|val)(?:ing|idation)?(?![a-z])", path.stem.lower()))
        if len(named) != 1:
            raise ValueError(f"data.path: {path} must have either train or val in its name, for its split")
        splits[named.pop()].append(path)
    for split, paths in splits.items():
        if not paths:
            raise ValueError(f"data.path={config.path}: has no file of the {split} split, such as {split}.bin")
    for split, paths in splits.items():
        for path in paths:
            ids = _map_file(path)
            for block in (ids[begin : begin + READ] for begin in range(0, len(ids), READ)):
                if not block.max() < tokenizer.vocab_size <= 1 << 16:
                    raise ValueError(
                        f"data.path: {path} has uint16 ids as large as {block.max()}, which are not of the "
                        f"{tokenizer.vocab_size} of tokenizer {tokenizer.name}; give theirs, such as tokenizer=gpt2"
                    )
                yield split, block


def _map_file(path: Path) -> np.ndarray:
    size, header = path.stat().st_size, np.fromfile(path, "<i4", count=3)
    skip = HEADER if len(header) == 3 and header[0] == MAGIC else 0
    count, rest = divmod(size - skip, IDS.itemsize)
    if count < 1 or rest or (skip and (header[1], header[2]) != (VERSION, count)):
        raise ValueError(f"data.path: {path} has {size} bytes; must be uint16 ids, as many as a header of llm.c says")
    ids = np.memmap(path, IDS, mode="r", offset=skip)
    if len(ids) >= 4 and not ids[1 : 1 << 16 : 2].any():  # 32 or 64 bits, read as 16
        raise ValueError(f"data.path: {path} has a 0 at every second place, so its ids are no uint16; write it anew")
    return ids
