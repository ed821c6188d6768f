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
    if not labels:
        raise ValueError(f"{where}: holds no text at all")
    held_out = np.where([label == "val" for label in labels], sizes, 0)
    left_out = np.zeros(len(sizes), dtype=bool)
    if labels[0] is None or config.tuning:
        groups = group_duplicates(path, sizes)
        if len(sizes) > 1 and len(set(groups)) == 1:
            say(f"warning: the documents of {where} are near-duplicates of each other; only equal texts stay together")
            groups = np.unique(digests, return_inverse=True)[1]
        if labels[0] is None:
            held_out = hold_out(sizes, digests, groups, config.val_fraction, config.split_seed)
        if config.tuning:
            left_out = held_out > 0
            rest = ~left_out
            held_out[rest] = hold_out(sizes[rest], digests[rest], groups[rest], config.val_fraction, config.split_seed)
    pieces, end, text = [], 0, np.memmap(path, np.uint8, mode="r")
    for size, digest, val, unused in zip(sizes.tolist(), digests, held_out.tolist(), left_out, strict=True):
        end += size
        while val and text[end - val] & 0xC0 == 0x80:  # inside a character
            val += 1
        parts = [(None, size)] if unused else [("train", size - val), ("val", val)]
        pieces += [(split, part, digest) for split, part in parts if part]
    for split in SPLITS:
        if split not in (piece[0] for piece in pieces):
            raise ValueError(f"{where}: the {split} split holds no text; give more text, or other splits")
    return pieces


def _write_text(path: Path, config: DataConfig) -> tuple[list[str | None], np.ndarray, np.ndarray]:
    """Of each document: the publisher's split, its size, int64 (documents,), and its hash, as an array of bytes."""
    labels, sizes, digests = [], [], []
    with open(path, "wb") as file:
        for label, text in documents(config):
            if text.strip():
                labels.append(label)
                sizes.append(file.write(raw := text.encode()))
                digests.append(hashlib.blake2b(raw, digest_size=16).digest())
    return labels, np.array(sizes), np.array(digests, dtype=object)


def hold_out(sizes: np.ndarray, digests: Sequence[bytes], groups: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """How many bytes of each document's end are held out, int64 (documents,): all, none, or of at most one a part.

    Groups of documents are drawn by a hash of their text with the seed, and held out whole until about `fraction` of
    all bytes are (0.9 to 1.1 of that, if possible); a group that is too large is passed over. Groups of more than a
    twentieth of what is to be held out are not drawn where the others have at least half of the text and twice what is
    needed: a mean over documents should not hang on a few. Where too little is held out, a document that is too large
    and has no near-duplicates gives its end.
    """
    total, target = np.sum(sizes), fraction * np.sum(sizes)
    most = min(1.1 * target, (target + total) / 2)
    documents_in, bytes_in = np.bincount(groups), np.bincount(groups, weights=sizes)
    hashes = [hashlib.blake2b(str(seed).encode() + digest, digest_size=8).digest() for digest in digests]
    order = dict.fromkeys(groups[sorted(range(len(hashes)), key=hashes.__getitem__)].tolist())  # each group once
    small = bytes_in <= target / 20
    if bytes_in[small].sum() >= max(total / 2, 2 * target):
        order = [group for group in order if small[group]]
    chosen, large, done = [], None, 0
    for group in order:
        if done >= target:
            break
        if done + bytes_in[group] <= most:
            chosen.append(group)
            done += bytes_in[group]
        elif large is None and documents_in[group] == 1:
            large = group
    held_out = np.where(np.isin(groups, chosen), sizes, 0)
    if done < 0.9 * target and large is not None:
        held_out[groups == large] = max(1, round(target - done))
    return held_out
