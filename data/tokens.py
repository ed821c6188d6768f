"""Token files: a corpus as numbers on the disk, memory-mapped.

A folder holds `train.bin` and `val.bin` (the ids, in the smallest unsigned type the vocabulary fits), `train.offsets`
and `val.offsets` (int64: where each document begins, and the end) and `tokens.json`, which says what they are. Of ids
that lie elsewhere (data.kind=bin) it holds all but the ids. The folder is filled under a temporary name and renamed.
"""

import codecs
import hashlib
import json
import os
import platform
import re
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from data.bins import Shards, find_documents, map_bins
from data.corpora import DataConfig, files_of
from data.overlap import measure_overlap
from data.split import SPLITS, Piece, split_corpus
from data.tokenizers import Tokenizer, parts

FORMAT = 2
BLOCK = 1 << 20  # bytes of text read at once


@dataclass(frozen=True)
class TokenFiles:
    """An opened folder. `train` and `val` are 1-D memory maps of ids; each document ends with its end token.

    The last document of ids made elsewhere may lack its end.
    """

    folder: Path
    meta: dict
    train: np.ndarray | Shards
    train_offsets: np.ndarray
    val: np.ndarray | Shards
    val_offsets: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Hash of the text and of its split, the same whatever the tokenizer; of ids made elsewhere, of the ids."""
        return self.meta["fingerprint"]

    @property
    def summary(self) -> str:
        tokens, documents = self.meta["tokens"], self.meta["documents"]
        return (
            f"{self.meta['corpus']}: {tokens['train']:,} training and {tokens['val']:,} validation tokens in "
            f"{documents['train']} and {documents['val']} documents, fingerprint {self.fingerprint}"
        )


def prepare(config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None] = print) -> TokenFiles:
    """The corpus' token files, made anew where a setting or the size or time of a file of the corpus has changed.

    ValueError where the corpus cannot be read or split, OSError where the files cannot be written. Run twice at once,
    both do the work and the first to finish is kept.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in ("name", "cache", "streaming")}
    stats = [(path, path.stat()) for path in files_of(config)] if config.kind != "hub" else []
    source = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    key = json.dumps([FORMAT, tokenizer.name, settings, source], sort_keys=True, default=str)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    cache, name = Path(os.path.expanduser(config.cache)), re.sub(r"\W", "_", config.name)
    folder = cache / f"{name}-{tokenizer.name}-{digest}"
    if folder.exists():
        return open_tokens(folder, config, tokenizer)
    version = f"{platform.python_implementation()} {platform.python_version()}"
    corpus = f"{config.name} ({version if config.kind == 'stdlib' else config.path})"
    say(f"preparing {corpus} with {tokenizer.name} in {folder}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=cache, ignore_cleanup_errors=True) as temporary:
            new = Path(temporary) / "tokens"
            new.mkdir()
            if config.kind == "bin":
                offsets, about = find_documents(config, tokenizer, say)
            else:
                offsets, about = _tokenise(new, config, tokenizer, say)
            for split in SPLITS:
                offsets[split].tofile(new / f"{split}.offsets")
            meta = {
                "format": FORMAT,
                "corpus": corpus,
                "data": settings,
                "tokenizer": tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "tokens": {split: int(offsets[split][-1]) for split in SPLITS},
                "documents": {split: len(offsets[split]) - 1 for split in SPLITS},
                **about,
            }
            (new / "tokens.json").write_text(json.dumps(meta, indent=1, default=str), encoding="utf-8")
            try:
                new.rename(folder)
            except OSError:  # another process was faster: a folder that is not empty cannot be replaced
                if not folder.exists():
                    raise
    except OSError as error:
        raise OSError(
            f"data.cache={config.cache}: could not write {folder} ({error}); make room, or give data.cache=<folder>"
        ) from error
    return open_tokens(folder, config, tokenizer)


def open_tokens(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> TokenFiles:
    """Map a folder's files. ValueError, naming the folder, if one is damaged."""
    elsewhere = map_bins(config) if config.kind == "bin" else {}
    try:
        meta = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        arrays = []
        for split in SPLITS:
            ids = elsewhere.get(split)
            if ids is None:
                ids = np.memmap(folder / f"{split}.bin", np.min_scalar_type(tokenizer.vocab_size - 1), mode="r")
            offsets = np.memmap(folder / f"{split}.offsets", np.int64, mode="r")
            if (offsets[-1], len(offsets)) != (len(ids), meta["documents"][split] + 1):
                raise ValueError(f"{split}: offsets and ids do not fit")
            arrays += [ids, offsets]
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: cannot be read ({error}); delete it and it will be made again") from error
    return TokenFiles(folder, meta, *arrays)


def _tokenise(
    folder: Path, config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[dict[str, np.ndarray], dict]:
    """Write a corpus' ids into a folder: the offsets of each split's documents, and what tokens.json says of them."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    spool = folder.with_name("spool.txt")  # the split depends on all documents, so the text waits here
    pieces = split_corpus(spool, config, say)
    splits, sizes, _ = zip(*pieces, strict=True)
    overlap = measure_overlap(spool, sizes, splits)
    lengths = {split: array("q", [0]) for split in SPLITS}
    with ExitStack() as stack:
        text = stack.enter_context(open(spool, "rb"))
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS}
        bar = stack.enter_context(tqdm(unit=" tokens", unit_scale=True, leave=False, disable=None))
        found, length = _parts(text, pieces), 0
        while batch := list(islice(found, 512)):
            encoded = tokenizer.encode_to_arrays([part for _, part, _ in batch])
            for (split, _, ends), ids in zip(batch, encoded, strict=True):
                ids = np.append(ids, tokenizer.end_of_document) if ends else ids
                files[split].write(ids.astype(dtype))
                bar.update(len(ids))
                length += len(ids)
                if ends:
                    lengths[split].append(length)
                    length = 0
    offsets = {split: np.cumsum(lengths[split], dtype=np.int64) for split in SPLITS}
    train, val = (int(offsets[split][-1]) for split in SPLITS)
    say(f"{overlap['val_covered']:.1%} of the validation text lies in 32-byte pieces of the training text")
    if train < val:
        say(f"warning: less than half of the text is left to train on, {train:,} of {train + val:,} tokens")
    content = hashlib.sha256()
    for piece in pieces:
        content.update(repr(piece).encode())
    return offsets, {"fingerprint": content.hexdigest()[:16], **overlap}


def _parts(file: BinaryIO, pieces: list[Piece]) -> Iterator[tuple[str, str, bool]]:
    """The pieces' text in parts small enough to be tokenised with others: (split, text, whether the piece ends)."""
    for split, size, _ in pieces:
        if split is None:
            file.seek(size, os.SEEK_CUR)
            continue
        decode = codecs.getincrementaldecoder("utf-8")().decode
        blocks = (decode(file.read(min(BLOCK, left))) for left in range(size, 0, -BLOCK))
        yield from ((split, text, False) for text in parts(blocks))
        yield split, "", True
