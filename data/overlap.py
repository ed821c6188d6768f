"""Text that documents share: near-duplicates among them, and how much of one text also occurs in another.

Both compare hashes of pieces: all runs of 32 bytes of a document, at any offset; a shorter document is one piece. Long
documents are read in blocks of 64 KiB, and pieces that reach from one block into the next are left out.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

PIECE = 32  # bytes
BLOCK = 1 << 16  # bytes hashed at once: few enough to stay in a processor's cache
SAMPLES, LEAST, MOST = 1 << 21, 16, 1024  # hashes kept of a whole corpus, if possible; of each document
OWNERS = 256  # documents compared for a piece that many of them have
VAL_MOST, TRAIN_MOST = 1 << 23, 1 << 30  # bytes of each split that `measure_overlap` reads

_rng = np.random.default_rng(0)
_BYTES = _rng.integers(2**64, size=256, dtype=np.uint64)
_FACTORS = _rng.integers(2**63, size=6, dtype=np.uint64) * 2 + 1


def hash_pieces(text: np.ndarray) -> np.ndarray:
    """A hash of each piece of a text, uint64 (n - 31,) of uint8 (n,); texts below 32 bytes are filled up with zeros."""
    if len(text) < PIECE:
        text = np.pad(text, (0, PIECE - len(text)))
    hashes = _BYTES[text]
    for factor, width in zip(_FACTORS, (1, 2, 4, 8, 16), strict=False):  # of 2, 4, 8, 16, 32 bytes
        longer = hashes[:-width] * factor
        longer += hashes[width:]
        hashes = longer
    hashes ^= hashes >> np.uint64(32)
    return hashes * _FACTORS[5]


class Pieces:
    """A set of hashes, sorted, each as often as it is given; `find` gives where those of a text begin in it."""

    def __init__(self, hashes: np.ndarray):
        self.hashes = np.append(hashes, np.uint64(2**64 - 1))
        self._maybe = np.zeros(1 << 24, dtype=bool)  # by the first 24 bits: most hashes need no search
        self._maybe[hashes >> np.uint64(40)] = True

    def find(self, hashes: np.ndarray) -> np.ndarray:
        hashes = np.sort(hashes[self._maybe[hashes >> np.uint64(40)]])  # in order, searches are faster
        places = np.searchsorted(self.hashes, hashes)
        return places[self.hashes[places] == hashes]


def read_blocks(path: Path, sizes: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """The blocks of documents of these sizes in bytes, which follow each other in a file: (document, uint8 (n,))."""
    with open(path, "rb") as file:
        for document, size in enumerate(sizes):
            for begin in range(0, size, BLOCK):
                yield document, np.frombuffer(file.read(min(BLOCK, size - begin)), np.uint8)


def group_duplicates(path: Path, sizes: Sequence[int]) -> np.ndarray:
    """The group of each document, int64 (documents,): near-duplicates are in one group, and so are theirs.

    Two documents are near-duplicates where more than half of the distinct pieces of one occur in the other (Broder
    1997: containment). The share is measured on the up to 1,024 pieces of the one with the lowest hashes: exact below
    1 KB, a standard error of 1.6 % above. More than 2,000 documents have fewer pieces each, but at least 16.
    """
    most = min(max(LEAST, SAMPLES // len(sizes)), MOST)
    sketches = [np.empty(0, dtype=np.uint64)] * len(sizes)
    for document, block in read_blocks(path, sizes):
        hashes = np.concatenate((sketches[document], hash_pieces(block)))
        if len(hashes) > most:
            hashes = np.partition(hashes, most)[:most]
        sketches[document] = np.unique(hashes)
    counts = np.array([len(sketch) for sketch in sketches])
    hashes, owners = np.concatenate(sketches), np.repeat(np.arange(len(sizes)), counts)
    del sketches
    order = np.lexsort((np.array(sizes)[owners], hashes))  # of a piece that many have, the smallest documents first
    owners, pieces = owners[order], Pieces(hashes[order])
    group = np.arange(len(sizes))

    def root(document: int) -> int:
        while group[document] != document:
            group[document] = document = group[group[document]]
        return document

    def join(document: int, places: np.ndarray) -> None:
        shared = []
        places = np.unique(places)
        while len(places) and len(shared) < OWNERS:
            shared.append(owners[places])
            places = places[pieces.hashes[places + 1] == pieces.hashes[places]] + 1
        found, times = np.unique(np.concatenate(shared), return_counts=True)
        for other in found[2 * times > counts[found]].tolist():
            group[root(other)] = root(document)

    last, places = 0, []
    for document, block in read_blocks(path, sizes):
        if document != last:
            join(last, np.concatenate(places))
            last, places = document, []
        places.append(pieces.find(hash_pieces(block)))
    join(last, np.concatenate(places))
    return np.array([root(document) for document in range(len(sizes))])


def measure_overlap(path: Path, sizes: Sequence[int], splits: Sequence[str]) -> dict[str, float]:
    """`val_covered`: the share of the validation text's bytes that lie in pieces which the training text has, too.

    Of a split larger than 8 MB (val) or 1 GB (train), evenly spaced blocks are read. `val_covered_of_train` is the
    share of the training text that was read; below 1, `val_covered` is a lower bound.
    """
    total = {split: sum(size for size, one in zip(sizes, splits, strict=True) if one == split) for split in set(splits)}

    def blocks(split: str, most: int) -> Iterator[np.ndarray]:
        found = (block for document, block in read_blocks(path, sizes) if splits[document] == split)
        return islice(found, 0, None, -(-total[split] // most))

    val = list(blocks("val", VAL_MOST))
    hashes = [hash_pieces(block) for block in val]
    distinct, place = np.unique(np.concatenate(hashes), return_inverse=True)
    pieces = Pieces(distinct)
    shared = np.zeros(len(pieces.hashes), dtype=bool)
    read = 0
    for block in blocks("train", TRAIN_MOST):
        shared[pieces.find(hash_pieces(block))] = True
        read += len(block)
    covered = 0
    for block, begins in zip(val, np.split(shared[place], np.cumsum([len(one) for one in hashes])[:-1]), strict=True):
        covered += np.count_nonzero(np.convolve(begins, np.ones(PIECE))[: len(block)])
    return {"val_covered": float(covered / sum(map(len, val))), "val_covered_of_train": read / total["train"]}
