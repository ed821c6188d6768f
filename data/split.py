"""A corpus as one file of text, and which of its documents are held out."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data.corpora import DataConfig, documents
from data.overlap import group_duplicates

SPLITS = ("train", "val")

# A document, or a part of one: its split (None: of neither), bytes of UTF-8, hash of the whole document.
Piece = tuple[str | None, int, bytes]


def split_corpus(path: Path, config: DataConfig, say: Callable[[str], None] = print) -> list[Piece]:
    """Write a corpus into a file, as UTF-8 without blank documents; its pieces, in the order of the file.

    ValueError where there is no text, or none that can be held out.
    """
    where = f"data={config.name} ({config.path})" if config.path else f"data={config.name}"
    labels, sizes, digests = _write_text(path, config)
    if not sizes:
        raise ValueError(f"{where}: holds no text at all")
    held_out = np.array([size if label == "val" else 0 for label, size in zip(labels, sizes, strict=True)])
    left_out = np.zeros(len(sizes), dtype=bool)
    if labels[0] is None or config.tuning:
        groups = group_duplicates(path, sizes)
        if len(sizes) > 1 and len(set(groups)) == 1:
            say(f"warning: the documents of {where} are near-duplicates of each other; only equal texts stay together")
            groups = np.unique(digests, return_inverse=True)[1]
        draw = lambda of: hold_out(  # noqa: E731
            np.array(sizes)[of], [digests[i] for i in of], groups[of], config.val_fraction, config.split_seed
        )
        if labels[0] is None:
            held_out = draw(np.arange(len(sizes)))
        if config.tuning:
            left_out, rest = held_out > 0, np.flatnonzero(held_out == 0)
            held_out[rest] = draw(rest)
    pieces, begin = [], 0
    for size, digest, val, unused in zip(sizes, digests, held_out.tolist(), left_out.tolist(), strict=True):
        train = size - val if val in (0, size) else _character(path, begin + size - val) - begin
        parts = [(None, size)] if unused else [("train", train), ("val", size - train)]
        pieces += [(split, part, digest) for split, part in parts if part]
        begin += size
    for split in SPLITS:
        if split not in (piece[0] for piece in pieces):
            raise ValueError(f"{where}: the {split} split holds no text; give more text, or other splits")
    return pieces


def _write_text(path: Path, config: DataConfig) -> tuple[list[str | None], list[int], list[bytes]]:
    labels, sizes, digests = [], [], []
    with open(path, "wb") as file:
        for label, blocks in documents(config):
            begin, digest, blank = file.tell(), hashlib.blake2b(digest_size=16), True
            for block in blocks:
                raw = block.encode("utf-8", "replace")
                file.write(raw)
                digest.update(raw)
                blank = blank and not block.strip()
            if blank:
                file.seek(begin)
                file.truncate()
            else:
                labels.append(label)
                sizes.append(file.tell() - begin)
                digests.append(digest.digest())
    return labels, sizes, digests


def _character(path: Path, at: int) -> int:
    """Where the character begins that a byte of a file belongs to."""
    with open(path, "rb") as file:
        file.seek(max(0, at - 3))
        before = file.read(min(at, 3) + 1)
    return at - next(i for i, byte in enumerate(reversed(before)) if byte & 0xC0 != 0x80)


def hold_out(
    sizes: Sequence[int], digests: Sequence[bytes], groups: np.ndarray, fraction: float, seed: int
) -> np.ndarray:
    """How many bytes of each document's end are held out, int64 (documents,): all, none, or of at most one a part.

    Groups of documents are drawn by a hash of their text with the seed, and held out whole until about `fraction` of
    all bytes are (0.9 to 1.1 of that, if possible); a group that is too large is passed over. Groups of more than a
    twentieth of what is to be held out are not drawn where the others have at least half of the text and twice what is
    needed: a mean over documents should not hang on a few. Where too little is held out, a document that is too large
    and has no near-duplicates gives its end; where nothing is, the smallest group is held out.
    """
    sizes = np.array(sizes)
    total, target = int(sizes.sum()), fraction * int(sizes.sum())
    most = min(1.1 * target, (target + total) / 2)
    documents_in, bytes_in = np.bincount(groups), np.bincount(groups, weights=sizes)
    hashes = b"".join(hashlib.blake2b(str(seed).encode() + digest, digest_size=8).digest() for digest in digests)
    drawn = groups[np.argsort(np.frombuffer(hashes, ">u8"), kind="stable")]
    order = drawn[np.sort(np.unique(drawn, return_index=True)[1])]  # each group once
    small = bytes_in <= target / 20
    if bytes_in[small].sum() >= max(total / 2, 2 * target):
        order = order[small[order]]
    chosen, large, done = [], None, 0
    for group in order.tolist():
        if done >= target:
            break
        if done + bytes_in[group] <= most:
            chosen.append(group)
            done += bytes_in[group]
        elif large is None and documents_in[group] == 1:
            large = group
    if not chosen and large is None and len(order) > 1:
        chosen = [order[np.argmin(bytes_in[order])]]
    held_out = np.where(np.isin(groups, chosen), sizes, 0)
    if done < 0.9 * target and large is not None:
        held_out[groups == large] = max(1, round(target - done))
    return held_out
