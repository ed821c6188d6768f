"""Token files: a corpus as numbers on the disk, one memory-mapped file a split.

A folder holds `train.bin` and `val.bin` (the ids, in the smallest unsigned type the vocabulary fits), `train.offsets`
and `val.offsets` (int64: where each document begins, and the end) and `tokens.json`, which says what they are. It is
filled under a temporary name and renamed when complete: a folder of the right name is always whole.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from data.corpora import DataConfig, describe, documents, identity
from data.tokenizers import Tokenizer

FORMAT = 1
SPLITS = ("train", "val")


@dataclass(frozen=True)
class TokenFiles:
    """An opened folder. `train` and `val` are 1-D memory maps of ids; each document ends with its end token."""

    folder: Path
    meta: dict
    train: np.ndarray
    train_offsets: np.ndarray
    val: np.ndarray
    val_offsets: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Hash of the text and of its split, the same whatever the tokenizer."""
        return self.meta["fingerprint"]


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer type that holds ids 0 to vocab_size - 1."""
    return np.min_scalar_type(vocab_size - 1)


def prepare(config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None] = print) -> TokenFiles:
    """The corpus' token files, made if they are not there yet.

    Raises ValueError where the corpus cannot be read or split. Interrupted, it leaves nothing that is read later; run
    twice at once, both do the work and the first to finish is kept.
    """
    split = {"val_fraction": config.val_fraction, "split_seed": config.split_seed}
    key = {"format": FORMAT, "tokenizer": tokenizer.name, "corpus": identity(config), **split}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=list).encode()).hexdigest()[:16]
    cache = Path(config.cache).expanduser()
    name = re.sub(r"\W", "_", config.name)
    folder = cache / f"{name}-{tokenizer.name}-{digest}"
    if not folder.exists():
        say(f"tokenising {describe(config)} with {tokenizer.name} into {folder}")
        cache.mkdir(parents=True, exist_ok=True)
        temporary = cache / f".{folder.name}-{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            _write(temporary, config, tokenizer)
            try:
                temporary.rename(folder)
            except OSError:  # another preparation was faster: a folder that is not empty cannot be renamed onto
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return open_tokens(folder, tokenizer)


def open_tokens(folder: Path, tokenizer: Tokenizer) -> TokenFiles:
    """Map a folder's files. ValueError, naming the file, if one is damaged or the tokenizer is another."""
    again = f"delete {folder} and it will be made anew"
    try:
        meta = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        dtype = np.dtype(meta["dtype"])
        found = (meta["tokenizer"], meta["vocab_size"])
        counts = {split: (int(meta["tokens"][split]), int(meta["documents"][split])) for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'tokens.json'}: cannot be read ({error!r}); {again}") from error
    if found != (tokenizer.name, tokenizer.vocab_size):
        raise ValueError(
            f"{folder}: holds tokens of {found[0]} ({found[1]} ids), not {tokenizer.name} ({tokenizer.vocab_size})"
        )
    arrays = {}
    for split, (tokens, docs) in counts.items():
        for name, kind, count in ((f"{split}.bin", dtype, tokens), (f"{split}.offsets", np.dtype(np.int64), docs + 1)):
            path = folder / name
            size = path.stat().st_size if path.exists() else 0
            if size != count * kind.itemsize or count == 0:
                raise ValueError(f"{path}: has {size} bytes instead of {count * kind.itemsize}; {again}")
            arrays[name] = np.memmap(path, dtype=kind, mode="r")
        offsets = arrays[f"{split}.offsets"]
        if offsets[0] != 0 or offsets[-1] != tokens:
            raise ValueError(f"{folder / f'{split}.offsets'}: does not fit {split}.bin; {again}")
    return TokenFiles(folder, meta, *arrays.values())  # train.bin, train.offsets, val.bin, val.offsets


def _write(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> None:
    where = f"data={config.name} ({config.path})" if config.path else f"data={config.name}"
    dtype = smallest_dtype(tokenizer.vocab_size)
    spool = folder / "spool.bin"
    lengths, digests, labels = [], [], []
    with open(spool, "wb") as file:
        for batch in _batched(_nonempty_documents(config, where), 256):
            for (label, text), ids in zip(batch, tokenizer.encode([text for _, text in batch]), strict=True):
                np.asarray([*ids, tokenizer.end_of_document], dtype=dtype).tofile(file)
                lengths.append(len(ids) + 1)
                digests.append(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest())
                labels.append(label)
    if labels[0] is None:
        labels = _hold_out(digests, config, where)

    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    tokens = np.memmap(spool, dtype=dtype, mode="r")
    counts = {"tokens": {}, "documents": {}}
    for split in SPLITS:
        chosen = [i for i, label in enumerate(labels) if label == split]
        if not chosen:
            raise ValueError(f"{where}: the {split} split holds no text")
        with open(folder / f"{split}.bin", "wb") as file:
            for i in chosen:
                tokens[offsets[i] : offsets[i + 1]].tofile(file)
        borders = np.cumsum([0, *(lengths[i] for i in chosen)], dtype=np.int64)
        borders.tofile(folder / f"{split}.offsets")
        counts["tokens"][split], counts["documents"][split] = int(borders[-1]), len(chosen)
    del tokens
    spool.unlink()

    content = b"".join(label.encode() + digest for label, digest in zip(labels, digests, strict=True))
    meta = {
        "format": FORMAT,
        "corpus": describe(config),
        "data": {key: value for key, value in asdict(config).items() if key != "cache"},
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        **counts,
        "fingerprint": hashlib.sha256(content).hexdigest()[:16],
    }
    (folder / "tokens.json").write_text(json.dumps(meta, indent=1, default=list), encoding="utf-8")
    for path in folder.iterdir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def _nonempty_documents(config: DataConfig, where: str) -> Iterator[tuple[str | None, str]]:
    """The corpus without its blank documents; a corpus of a single document as two, so that its end can be held out."""
    found = ((label, text) for label, text in documents(config) if text.strip())
    first = list(islice(found, 2))
    if not first:
        raise ValueError(f"{where}: holds no text at all")
    if len(first) == 1 and first[0][0] is None:
        text = first[0][1]
        cut = round(len(text) * (1 - config.val_fraction))
        if not 0 < cut < len(text):
            raise ValueError(f"{where}: one document of {len(text)} characters is too short to hold out a part of it")
        return iter((("train", text[:cut]), ("val", text[cut:])))
    return chain(first, found)


def _hold_out(digests: list[bytes], config: DataConfig, where: str) -> list[str]:
    """A split for every document: val_fraction of the distinct texts, drawn by a hash with the seed, are held out.

    By content, so that two documents of the same text never end up in different splits.
    """
    seed = str(config.split_seed).encode()
    ranked = sorted(set(digests), key=lambda digest: hashlib.blake2b(seed + digest).digest())
    if len(ranked) < 2:
        raise ValueError(f"{where}: all {len(digests)} documents are the same text, so none can be held out")
    count = min(max(1, round(config.val_fraction * len(ranked))), len(ranked) - 1)
    held_out = set(ranked[:count])
    return ["val" if digest in held_out else "train" for digest in digests]


def _batched(items: Iterable, size: int) -> Iterator[list]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
