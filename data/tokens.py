"""Token files: a corpus as numbers on the disk, memory-mapped.

A folder holds `train.bin` and `val.bin` (the ids, in the smallest unsigned type the vocabulary fits), `train.offsets`
and `val.offsets` (int64: where each document begins, and the end) and `tokens.json`, which says what they are. Of ids
that lie elsewhere (data.kind=bin) it holds all but the ids. The folder is filled under a temporary name and renamed.
"""

import codecs
import hashlib
import json
import os
import re
import tempfile
import time
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
from data.corpora import DataConfig, describe, files_of
from data.overlap import measure_overlap
from data.split import SPLITS, Piece, split_corpus
from data.tokenizers import Tokenizer, parts

FORMAT = 2
BLOCK = 1 << 20  # bytes of text read at once


@dataclass(frozen=True)
class TokenFiles:
    """An opened folder. `train` and `val` are 1-D memory maps of ids; each document ends with its end token.

    (Ids made elsewhere may be a `data.bins.Shards` of such maps, and their last document may lack its end.)
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
    """The corpus' token files, made if they are not there yet.

    They are made again where the settings, or the sizes or times of change of the corpus' files, are others. Raises
    ValueError where the corpus cannot be read or split, and OSError where the files cannot be written. Interrupted, it
    leaves nothing that is read later; run twice at once, both do the work and the first to finish is kept.
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
    say(f"preparing {describe(config)} with {tokenizer.name} in {folder}")
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
                "corpus": describe(config),
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
            f"data.cache={config.cache}: could not write token files into {folder} ({error}); make room there, or "
            "choose another folder with data.cache=<folder>"
        ) from error
    return open_tokens(folder, config, tokenizer)


def open_tokens(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> TokenFiles:
    """Map a folder's files. ValueError, naming the folder, if one is damaged or the tokenizer is another."""
    elsewhere = map_bins(config) if config.kind == "bin" else {}
    try:
        meta = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        made_by = (meta["tokenizer"], meta["vocab_size"])
        if made_by != (tokenizer.name, tokenizer.vocab_size):
            raise ValueError(f"holds tokens of {made_by}, not of {(tokenizer.name, tokenizer.vocab_size)}")
        arrays = []
        for split in SPLITS:
            ids = elsewhere.get(split)
            if ids is None:
                ids = np.memmap(folder / f"{split}.bin", smallest_dtype(tokenizer.vocab_size), mode="r")
            offsets = np.memmap(folder / f"{split}.offsets", np.int64, mode="r")
            sizes, expected = (len(ids), len(offsets)), (meta["tokens"][split], meta["documents"][split] + 1)
            if sizes != expected or (offsets[0], offsets[-1]) != (0, len(ids)):
                raise ValueError(f"{split}: has {sizes} ids and offsets, not {expected}")
            arrays += [ids, offsets]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder}: cannot be read ({error!r}); delete it and it will be made again") from error
    return TokenFiles(folder, meta, *arrays)


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer type that holds ids 0 to vocab_size - 1."""
    return np.min_scalar_type(vocab_size - 1)


def _tokenise(
    folder: Path, config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[dict[str, np.ndarray], dict]:
    """Write a corpus' ids into a folder: the offsets of each split's documents, and what tokens.json says of the text.

    The text goes through a file beside the folder, since the split depends on all documents.
    """
    dtype = smallest_dtype(tokenizer.vocab_size)
    spool = folder.with_name("spool.txt")
    pieces = split_corpus(spool, config, say)
    splits, sizes, _ = zip(*pieces, strict=True)
    overlap = measure_overlap(spool, sizes, splits)
    lengths = {split: array("q", [0]) for split in SPLITS}
    with ExitStack() as stack:
        text = stack.enter_context(open(spool, "rb"))
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS}
        bar = stack.enter_context(tqdm(unit=" tokens", unit_scale=True, leave=False, disable=None))
        found, length, started = _parts(text, pieces), 0, time.perf_counter()
        while batch := list(islice(found, 256)):
            encoded = tokenizer.encode_to_arrays([part for _, part, _ in batch])
            for (split, _, ends), ids in zip(batch, encoded, strict=True):
                ids = np.append(ids, tokenizer.end_of_document) if ends else ids
                files[split].write(ids.astype(dtype))
                bar.update(len(ids))
                length += len(ids)
                if ends:
                    lengths[split].append(length)
                    length = 0
    seconds = time.perf_counter() - started
    offsets = {split: np.cumsum(lengths[split], dtype=np.int64) for split in SPLITS}
    total = sum(int(offsets[split][-1]) for split in SPLITS)
    say(f"tokenised {total:,} tokens in {seconds:.1f} s, {total / seconds:,.0f} tokens/s")
    say(f"{overlap['val_covered']:.1%} of the validation text lies in 32-byte pieces of the training text")
    if 2 * offsets["train"][-1] < total:
        say(f"warning: less than half of the text is left to train on, {offsets['train'][-1]:,} of {total:,} tokens")
    content = hashlib.sha256()
    for piece in pieces:
        content.update(repr(piece).encode())
    return offsets, {"fingerprint": content.hexdigest()[:16], **overlap}


def _parts(file: BinaryIO, pieces: list[Piece]) -> Iterator[tuple[str, str, bool]]:
    """The pieces' text in parts small enough to be tokenised with others: (split, text, whether the piece ends)."""
    for split, size, _ in pieces:
        previous = None
        for text in parts(_read(file, size)):
            if previous is not None:
                yield split, previous, False
            previous = text
        yield split, previous, True


def _read(file: BinaryIO, size: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, size, BLOCK):
        yield decoder.decode(file.read(min(BLOCK, size - begin)))
