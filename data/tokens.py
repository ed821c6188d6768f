"""Token files: a corpus as numbers on the disk, memory-mapped.

A folder holds `train.bin` and `val.bin` (the ids, in the smallest unsigned type the vocabulary fits), `train.offsets`
and `val.offsets` (int64: where each document begins, and the end) and `tokens.json`, which says what they are. It is
filled under a temporary name and renamed.
"""

import hashlib
import json
import os
import platform
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.bins import read_ids
from data.corpora import DataConfig, files_of
from data.overlap import measure_overlap
from data.split import SPLITS, Piece, split_corpus
from data.tokenizers import Tokenizer

FORMAT = 3
BATCH = 256  # documents tokenised at once


@dataclass(frozen=True)
class TokenFiles:
    """An opened folder. `train` and `val` are 1-D memory maps of ids. Documents of text end with their end token."""

    folder: Path
    meta: dict
    train: np.ndarray
    train_offsets: np.ndarray
    val: np.ndarray
    val_offsets: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Hash of the text and of its split, the same whatever the tokenizer; of ids made elsewhere, of the ids."""
        return self.meta["fingerprint"]

    @property
    def summary(self) -> str:
        tokens = f"{len(self.train):,} training and {len(self.val):,} validation tokens"
        documents = f"{len(self.train_offsets) - 1} and {len(self.val_offsets) - 1} documents"
        return f"{self.meta['corpus']}: {tokens} in {documents}, fingerprint {self.fingerprint}"


def prepare(config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None] = print) -> TokenFiles:
    """The corpus' token files, made anew where a setting or the size or time of a file of the corpus has changed.

    ValueError where the corpus cannot be read or split or its files are damaged, OSError where they cannot be written.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in ("name", "cache", "streaming")}
    stats = [(path, path.stat()) for path in files_of(config)] if config.kind != "hub" else []
    source = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    key = json.dumps([FORMAT, tokenizer.name, settings, source], sort_keys=True, default=str)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    cache, name = Path(os.path.expanduser(config.cache)), re.sub(r"\W", "_", config.name)
    folder = cache / f"{name}-{tokenizer.name}-{digest}"
    if not folder.exists():
        version = f"{platform.python_implementation()} {platform.python_version()}"
        corpus = f"{config.name} ({version if config.kind == 'stdlib' else config.path})"
        say(f"preparing {corpus} with {tokenizer.name} in {folder}")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=cache, ignore_cleanup_errors=True) as temporary:
                meta = {"format": FORMAT, "corpus": corpus, "data": settings, "tokenizer": tokenizer.name}
                _fill(Path(temporary, "new"), meta, config, tokenizer, say)
                Path(temporary, "new").rename(folder)
        except OSError as error:
            if not folder.exists():  # else another process was faster
                message = f"data.cache={config.cache}: could not write {folder} ({error})"
                raise OSError(f"{message}; make room, or give data.cache=<folder> (eval.py: cache=)") from error
    arrays = []
    try:
        meta = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        for split in SPLITS:
            ids = np.memmap(folder / f"{split}.bin", np.min_scalar_type(tokenizer.vocab_size - 1), mode="r")
            offsets = np.memmap(folder / f"{split}.offsets", np.int64, mode="r")
            if (offsets[-1], len(offsets)) != (len(ids), meta["documents"][split] + 1):
                raise ValueError(f"{split}: offsets and ids do not fit")
            arrays += [ids, offsets]
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: cannot be read ({error}); delete it and it will be made again") from error
    return TokenFiles(folder, meta, *arrays)


def _fill(folder: Path, meta: dict, config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
    """Make a folder of token files. `meta`: what is known of them so far."""
    folder.mkdir()
    if config.kind == "bin":
        meta |= _write_ids(folder, read_ids(config, tokenizer), tokenizer)
        content = hashlib.sha256()
        for split in SPLITS:
            content.update(split.encode())
            content.update(np.memmap(folder / f"{split}.bin", mode="r"))
    else:
        spool = folder.with_name("spool.txt")  # the split depends on all documents, so the text waits here
        pieces = split_corpus(spool, config, say)
        content = hashlib.sha256("".join(map(repr, pieces)).encode())
        meta |= _write_ids(folder, _encode(spool, pieces, tokenizer), tokenizer)
        meta |= measure_overlap(spool, [piece[1] for piece in pieces], [piece[0] for piece in pieces])
        say(f"{meta['val_covered']:.1%} of the validation text lies in 32-byte pieces of the training text")
    meta["fingerprint"] = content.hexdigest()[:16]
    (folder / "tokens.json").write_text(json.dumps(meta, indent=1, default=str), encoding="utf-8")


def _write_ids(folder: Path, blocks: Iterable[tuple[str, np.ndarray]], tokenizer: Tokenizer) -> dict:
    """Write blocks of ids, each with its split, and where documents begin: after the end of another."""
    begins, tokens, documents = {split: array("q") for split in SPLITS}, dict.fromkeys(SPLITS, 0), {}
    with ExitStack() as stack, tqdm(blocks, unit=" blocks", unit_scale=True, leave=False, disable=None) as progress:
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS}
        for split, ids in progress:
            files[split].write(ids.astype(np.min_scalar_type(tokenizer.vocab_size - 1)))
            begins[split].extend((np.flatnonzero(ids == tokenizer.end_of_document) + tokens[split] + 1).tolist())
            tokens[split] += len(ids)
    for split in SPLITS:
        inner = np.array(begins[split])
        inner = inner[(inner > 1) & (inner < tokens[split])]  # an end that stands first, as in llm.c's, ends nothing
        np.concatenate(([0], inner, [tokens[split]]), dtype=np.int64).tofile(folder / f"{split}.offsets")
        documents[split] = len(inner) + 1
    return {"vocab_size": tokenizer.vocab_size, "tokens": tokens, "documents": documents}


def _encode(spool: Path, pieces: list[Piece], tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray]]:
    """The ids of the pieces, in order, an end after each; of many pieces at a time, on all cores."""
    with open(spool, "rb") as file:
        texts = ((split, file.read(size)) for split, size, _ in pieces)
        kept = ((split, text.decode()) for split, text in texts if split)
        while batch := list(islice(kept, BATCH)):
            for (split, _), ids in zip(batch, tokenizer.encode_to_arrays([text for _, text in batch]), strict=True):
                yield split, np.append(ids, tokenizer.end_of_document)
