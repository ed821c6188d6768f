"""Token files: a corpus as numbers on the disk, memory-mapped.

A folder holds `train.bin` and `val.bin` (the ids, in the smallest unsigned type the vocabulary fits), `train.offsets`
and `val.offsets` (int64: where each document begins, and the end) and `tokens.json`, which says what they are. It is
filled under a temporary name and renamed when complete: a folder of the right name is always whole. Of ids that lie
elsewhere (data.kind=bin) it holds all but the ids.
"""

import contextlib
import hashlib
import json
import os
import platform
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

from data.bins import IDS, Shard, find_borders, mapped, shards_of
from data.corpora import DataConfig, describe, documents, identity, sampled
from data.tokenizers import Tokenizer, parts

try:
    import fcntl
except ImportError:  # not a Unix: what a killed preparation leaves stays there
    fcntl = None

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

    Raises ValueError where the corpus cannot be read or split, or changes meanwhile, and OSError where the files cannot
    be written. Interrupted, it leaves nothing that is read later; run twice at once, both do the work and the first to
    finish is kept. What a killed one has left is removed by the next one of the same corpus and tokenizer.
    """
    found = identity(config)
    split = {"val_fraction": config.val_fraction, "split_seed": config.split_seed}
    key = {"format": FORMAT, "tokenizer": tokenizer.name, "corpus": found, **split}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=list).encode()).hexdigest()[:16]
    cache = Path(os.path.expanduser(config.cache))
    if str(cache).startswith("~"):
        raise ValueError(f"data.cache={config.cache}: there is no such home; choose another folder with data.cache=")
    name = re.sub(r"\W", "_", config.name)
    folder = cache / f"{name}-{tokenizer.name}-{digest}"
    try:
        if not folder.exists():
            doing = "finding the documents in" if config.kind == "bin" else "tokenising"
            say(f"{doing} {describe(config)} with {tokenizer.name} into {folder}")
            cache.mkdir(parents=True, exist_ok=True)
            with _filling(folder) as temporary:
                if config.kind == "bin":
                    meta = find_borders(temporary, config, tokenizer, say)
                else:
                    meta = _write(temporary, config, tokenizer, say)
                if not _still(config, found):
                    raise ValueError(f"{describe(config)} changed while it was read; start again")
                about = {"format": FORMAT, "corpus": describe(config), "tokenizer": tokenizer.name}
                about |= {"data": {key: value for key, value in asdict(config).items() if key != "cache"}}
                about |= {"vocab_size": tokenizer.vocab_size, **meta}
                made = [path for path in temporary.iterdir() if path.name.startswith(SPLITS)]
                about |= {"sampled": {path.name: sampled(path) for path in made}}
                about["digest"] = _digest(about)
                (temporary / "tokens.json").write_text(json.dumps(about, indent=1, default=list), encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"data.cache={config.cache}: could not write token files into {folder} ({error}); make room there, or "
            "choose another folder with data.cache=<folder>"
        ) from error
    return open_tokens(folder, config, tokenizer)


def _digest(about: dict) -> str:
    rest = {key: value for key, value in about.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=list).encode()).hexdigest()[:16]


def _still(config: DataConfig, found: dict) -> bool:
    try:
        return identity(config) == found
    except (OSError, ValueError):  # a file has gone
        return False


@contextlib.contextmanager
def _filling(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `folder` at the end, or removed where that is not reached.

    It is locked meanwhile: one that is not was left by a process that was killed, and is removed first. (Only those of
    this machine are, since not every shared file system tells other machines of its locks.)
    """
    machine = re.sub(r"\W", "_", platform.node())
    leftover = re.compile(rf"\.{re.escape(folder.name[:-16])}[0-9a-f]{{16}}-{machine}-[0-9a-f]{{32}}")
    for path in list(folder.parent.iterdir()):
        if leftover.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _remove(path, _lock(path))
    for _ in range(100):
        temporary = folder.with_name(f".{folder.name}-{machine}-{uuid.uuid4().hex}")
        temporary.mkdir()
        try:
            lock = _lock(temporary)
            break
        except (BlockingIOError, FileNotFoundError):  # taken for a leftover in this very moment
            continue
        except OSError:  # a file system without locks, where nothing is ever taken for a leftover
            lock = None
            break
    try:
        yield temporary
        for path in temporary.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        try:
            temporary.rename(folder)
            (folder / "lock").unlink(missing_ok=True)
        except OSError:  # another preparation was faster: a folder that is not empty cannot be renamed onto
            if not folder.exists():
                raise
    finally:
        _remove(temporary, lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds a temporary folder until it is closed. OSError where another does, or it is gone."""
    if fcntl is None:
        raise OSError("no locks")
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(folder / "lock")):  # removed, and made again, by others
            raise BlockingIOError
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)  # NFS keeps a file, and so its folder, for as long as it is open


def used_before(config: DataConfig) -> bool:
    """Whether data.cache has token files of the source that a configuration names, whatever was taken of it."""
    source = [json.dumps(getattr(config, key), default=list) for key in ("kind", "path", "subset", "revision")]
    for path in Path(os.path.expanduser(config.cache)).glob("[!.]*/tokens.json"):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["data"]
            if [json.dumps(found[key]) for key in ("kind", "path", "subset", "revision")] == source:
                return True
        except (OSError, ValueError, KeyError, TypeError):  # damaged: open_tokens says so, where it is needed
            continue
    return False


def open_tokens(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> TokenFiles:
    """Map a folder's files. ValueError, naming the file, if one is damaged or the tokenizer is another.

    Where ids lie that were made elsewhere is what the configuration says, never the folder.
    """
    again = f"delete {folder} and it will be made anew"
    elsewhere = config.kind == "bin"
    try:
        meta = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        found = (meta["tokenizer"], meta["vocab_size"])
        dtype, samples = meta["dtype"], meta.get("sampled", {})  # older files have neither samples nor a digest
        if meta.get("digest") not in (None, _digest(meta)):
            raise ValueError("it is not what was written there")
        counts = {split: (meta["tokens"][split], meta["documents"][split]) for split in SPLITS}
        texts = {type(meta[key]) for key in ("tokenizer", "dtype", "corpus", "fingerprint")}
        numbers = [meta["vocab_size"], *(number for pair in counts.values() for number in pair)]
        if texts != {str} or {*map(type, numbers)} != {int} or min(numbers) < 1 or not isinstance(samples, dict):
            raise ValueError("a value of the wrong kind")
        if set(meta["tokens"]) | set(meta["documents"]) != {*SPLITS}:
            raise ValueError("other splits than train and val")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / 'tokens.json'}: cannot be read ({error!r}); {again}") from error
    if found != (tokenizer.name, tokenizer.vocab_size):
        raise ValueError(
            f"{folder}: holds tokens of {found[0]} ({found[1]} ids), not {tokenizer.name} ({tokenizer.vocab_size})"
        )
    expected = IDS if elsewhere else smallest_dtype(tokenizer.vocab_size)
    if dtype != expected.name:
        raise ValueError(f"{folder / 'tokens.json'}: says dtype {dtype}, not {expected.name}; {again}")
    shards, arrays = shards_of(config) if elsewhere else {}, []
    for split, (tokens, docs) in counts.items():
        ids = shards.get(split, [Shard(str(folder / f"{split}.bin"), 0, tokens)])
        borders = Shard(str(folder / f"{split}.offsets"), 0, docs + 1)
        offsets = mapped([borders], np.dtype(np.int64), again)
        if offsets[0] != 0 or offsets[-1] != tokens or not (offsets[1:] > offsets[:-1]).all():
            raise ValueError(f"{borders.path}: does not fit {split}.bin; {again}")
        arrays += [mapped(ids, expected, again), offsets]
        if len(arrays[-2]) != tokens:
            raise ValueError(f"{borders.path}: is of {tokens} ids, and data.path has {len(arrays[-2])}; {again}")
        for shard in [borders] if elsewhere else [borders, *ids]:
            path = Path(shard.path)
            if sampled(path) != samples.get(path.name, sampled(path)):
                raise ValueError(f"{path}: is not what was written there; {again}")
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
        (folder / f"{split}.offsets").write_bytes(borders)
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
