"""Token files: a corpus as numbers on the disk, memory-mapped.

A folder holds `train.bin` and `val.bin` (the ids, in the smallest unsigned type the vocabulary fits), `train.offsets`
and `val.offsets` (int64: where each document begins, and the end) and `tokens.json`, which says what they are. It is
filled under a temporary name and renamed when complete: a folder of the right name is always whole. Of ids that lie
elsewhere (data.kind=bin) it holds all but the ids.
"""

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.bins import Shard, find_borders, mapped
from data.corpora import DataConfig, describe, documents, identity
from data.tokenizers import Tokenizer, parts

FORMAT = 1
SPLITS = ("train", "val")
COPIED = 1 << 24  # bytes of ids held in memory while they are sorted into their splits


@dataclass(frozen=True)
class TokenFiles:
    """An opened folder. `train` and `val` are 1-D memory maps of ids; each document ends with its end token.

    (Ids made elsewhere may be a `data.bins.Shards` of such maps, and their last document may lack its end.)
    """

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
        doing = "finding the documents in" if config.kind == "bin" else "tokenising"
        say(f"{doing} {describe(config)} with {tokenizer.name} into {folder}")
        cache.mkdir(parents=True, exist_ok=True)
        temporary = cache / f".{folder.name}-{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            if config.kind == "bin":
                meta = find_borders(temporary, config, tokenizer, say)
            else:
                meta = _write(temporary, config, tokenizer, say)
            about = {"format": FORMAT, "corpus": describe(config), "tokenizer": tokenizer.name}
            about |= {"data": {key: value for key, value in asdict(config).items() if key != "cache"}}
            about |= {"vocab_size": tokenizer.vocab_size, **meta}
            (temporary / "tokens.json").write_text(json.dumps(about, indent=1, default=list), encoding="utf-8")
            for path in temporary.iterdir():
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
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
        own = {split: [(str(folder / f"{split}.bin"), 0, count)] for split, (count, _) in counts.items()}
        shards = {split: [Shard(*shard) for shard in meta.get("shards", own)[split]] for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'tokens.json'}: cannot be read ({error!r}); {again}") from error
    if found != (tokenizer.name, tokenizer.vocab_size):
        raise ValueError(
            f"{folder}: holds tokens of {found[0]} ({found[1]} ids), not {tokenizer.name} ({tokenizer.vocab_size})"
        )
    arrays = []
    for split, (tokens, docs) in counts.items():
        offsets = mapped([Shard(str(folder / f"{split}.offsets"), 0, docs + 1)], np.dtype(np.int64), again)
        if offsets[0] != 0 or offsets[-1] != tokens:
            raise ValueError(f"{folder / f'{split}.offsets'}: does not fit {split}.bin; {again}")
        arrays += [mapped(shards[split], dtype, again), offsets]
    return TokenFiles(folder, meta, *arrays)  # train, its offsets, val, its offsets


def _write(folder: Path, config: DataConfig, tokenizer: Tokenizer, say: Callable[[str], None]) -> dict:
    """Tokenise the corpus into a folder; returns what tokens.json says of it. Of a document only numbers are kept."""
    where = f"data={config.name} ({config.path})" if config.path else f"data={config.name}"
    dtype = smallest_dtype(tokenizer.vocab_size)
    spool = folder / "spool.bin"
    lengths, digests, labels = array("q"), bytearray(), bytearray()  # labels: 0 train, 1 val, 2 not split yet
    length, digest = 0, hashlib.blake2b(digest_size=16)
    end_of_document = dtype.type(tokenizer.end_of_document).tobytes()
    started = time.perf_counter()

    def encoded(batch: list[Part]) -> Iterator[tuple[Part, np.ndarray]]:
        return zip(batch, tokenizer.encode_to_arrays([part.text for part in batch]), strict=True)

    with open(spool, "wb") as file, tqdm(unit=" tokens", unit_scale=True, leave=False, disable=None) as bar:
        for part, ids in chain.from_iterable(_ahead(encoded, _batches(_parts(config, where)))):
            file.write(ids.astype(dtype).tobytes())
            bar.update(len(ids))
            length += len(ids)
            digest.update(part.text.encode("utf-8", "replace"))
            if part.ends:
                file.write(end_of_document)
                length += 1
                lengths.append(length)
                digests += digest.digest()
                labels.append(2 if part.label is None else SPLITS.index(part.label))
                length, digest = 0, hashlib.blake2b(digest_size=16)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    seconds = time.perf_counter() - started
    say(f"tokenised {offsets[-1]:,} tokens in {seconds:.1f} s, {offsets[-1] / seconds:,.0f} tokens/s")
    labels = np.frombuffer(labels, dtype=np.uint8)
    if labels[0] == 2:
        labels = _hold_out(digests, config, where)

    counts: dict[str, dict] = {"tokens": {}, "documents": {}}
    for label, split in enumerate(SPLITS):
        chosen = np.flatnonzero(labels == label)
        if not len(chosen):
            raise ValueError(f"{where}: the {split} split holds no text")
        gaps = np.flatnonzero(np.diff(chosen) != 1)  # between them, documents lie side by side in the spool
        begins = offsets[chosen[np.append(0, gaps + 1)]] * dtype.itemsize
        ends = offsets[chosen[np.append(gaps, -1)] + 1] * dtype.itemsize
        with open(spool, "rb") as source, open(folder / f"{split}.bin", "wb") as file:
            for begin, end in zip(begins, ends, strict=True):
                source.seek(begin)
                for at in range(begin, end, COPIED):
                    file.write(source.read(min(COPIED, end - at)))
        borders = np.concatenate(([0], np.cumsum(np.diff(offsets)[chosen])))
        borders.tofile(folder / f"{split}.offsets")
        counts["tokens"][split], counts["documents"][split] = int(borders[-1]), len(chosen)
    spool.unlink()

    content = hashlib.sha256()
    for i, label in enumerate(labels):
        content.update(SPLITS[label].encode() + digests[16 * i : 16 * i + 16])
    return {"dtype": dtype.name, **counts, "fingerprint": content.hexdigest()[:16]}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a document, small enough to be tokenised with others at once; `ends`: the document ends with it."""

    label: str | None
    text: str
    ends: bool


def _parts(config: DataConfig, where: str) -> Iterator[Part]:
    for label, blocks in _split_documents(config, where):
        previous = None
        for text in parts(blocks):
            if previous is not None:
                yield Part(label, previous, ends=False)
            previous = text
        yield Part(label, previous, ends=True)


def _split_documents(config: DataConfig, where: str) -> Iterator[tuple[str | None, Iterable[str]]]:
    """The corpus without its blank documents; a corpus of a single document as two, so that its end can be held out."""
    found = _nonblank(documents(config))
    first = list(islice(found, 2))
    if not first:
        raise ValueError(f"{where}: holds no text at all")
    if len(first) == 2 or first[0][0] is not None:
        return chain(first, found)
    length = sum(map(len, first[0][1]))
    cut = round(length * (1 - config.val_fraction))
    if not 0 < cut < length:
        raise ValueError(f"{where}: one document of {length} characters is too short to hold out a part of it")

    def between(begin: int, end: int) -> Iterator[str]:  # read again: it may be longer than the memory
        ((_, blocks),) = _nonblank(documents(config))
        at = 0
        for block in blocks:
            yield block[max(0, begin - at) : max(0, end - at)]
            at += len(block)

    return iter((("train", between(0, cut)), ("val", between(cut, length))))


def _nonblank(found: Iterable[tuple[str | None, Iterable[str]]]) -> Iterator[tuple[str | None, Iterable[str]]]:
    for label, blocks in found:
        blocks, read = iter(blocks), []
        for block in blocks:
            read.append(block)
            if block.strip():
                yield label, chain(read, blocks)
                break


def _hold_out(digests: bytes, config: DataConfig, where: str) -> np.ndarray:
    """A label for every document: val_fraction of the distinct texts, drawn by a hash with the seed, are held out.

    By content, so that two documents of the same text never end up in different splits.
    """
    seed = str(config.split_seed).encode()
    distinct, which = np.unique(np.frombuffer(digests, dtype="S16"), return_inverse=True)
    if len(distinct) < 2:
        raise ValueError(f"{where}: all {len(which)} documents are the same text, so none can be held out")
    raw, drawn = distinct.tobytes(), bytearray()
    for i in range(0, len(raw), 16):
        drawn += hashlib.blake2b(seed + raw[i : i + 16]).digest()[:16]
    count = min(max(1, round(config.val_fraction * len(distinct))), len(distinct) - 1)
    held_out = np.zeros(len(distinct), dtype=np.uint8)
    held_out[np.argsort(np.frombuffer(drawn, dtype="S16"))[:count]] = 1
    return held_out[which]


def _batches(found: Iterable[Part], most: int = 256, characters: int = 1 << 22) -> Iterator[list[Part]]:
    batch, size = [], 0
    for part in found:
        batch.append(part)
        size += len(part.text)
        if len(batch) == most or size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ahead(function: Callable[[Any], Any], items: Iterable) -> Iterator:
    """Like `map`, but one item ahead, in a thread: reading and writing go on while tokens are made."""
    with ThreadPoolExecutor(1) as thread:
        coming = None
        for item in items:
            following = thread.submit(function, item)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()
