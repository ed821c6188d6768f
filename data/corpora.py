"""Corpora: where documents come from. Data sets of the hub are read by the `datasets` library.

A corpus yields documents, as (split, blocks): split is "train" or "val" where the publisher has split it, else None;
blocks are the document's text, in order. A row is one block. A text file comes in many, since it may be longer than
the memory.
"""

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import fsspec

KINDS = ("stdlib", "files", "hub", "bin")
BLOCK = 1 << 20  # characters of a text file read at once


@dataclass
class DataConfig:
    """What to read, and how to split it. `name` is for people; `kind` decides how it is read.

    kind `stdlib`: the Python standard library's source. `files`: `path` is a .txt, .py, .jsonl or .parquet file (the
    first three also compressed, .gz or .zst), a glob, or a list of them; a file of text is one document, a row of the
    others is one, its text in `column`. `hub`: `path` is a data set on the Hugging Face hub (`subset`: which of its
    configs; `revision`), its documents are rows, or articles (`articles`: WikiText, whose rows are lines); `streaming`
    reads it without keeping it on the disk. `bin`: token ids of nanoGPT, llm.c or modded-nanogpt, used where they lie:
    `path` is their folder, a glob, or a list of files.

    `max_documents`: so many are read in all, or of each of the publisher's splits. `val_split` names the publisher's
    validation split; null holds out `val_fraction` of the documents, drawn with `split_seed`. `cache`: the folder for
    token files.
    """

    name: str
    kind: str
    path: Any = None
    subset: str | None = None
    revision: str | None = None
    column: str = "text"
    articles: bool = False
    streaming: bool = False
    max_documents: int | None = None
    train_split: str = "train"
    val_split: str | None = None
    val_fraction: float = 0.05
    split_seed: int = 0
    cache: str = "~/.cache/ropewalk"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"data.kind={self.kind!r}: known kinds are {', '.join(KINDS)}")
        if self.kind != "stdlib" and not self.path:
            example = {"files": "'texts/*.txt'", "hub": "owner/name", "bin": "<folder of .bin files>"}[self.kind]
            raise ValueError(f"data.path is missing: data={self.name} needs it, e.g. data.path={example}")
        self._check_paths()
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction}: must be above 0 and below 1")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"data.max_documents={self.max_documents}: must be at least 1, or null for all")
        if self.max_documents is not None and self.kind == "bin":
            raise ValueError(f"data.max_documents={self.max_documents}: data={self.name} is read whole; leave it out")
        if self.streaming and self.kind != "hub":
            raise ValueError(f"data.streaming=true: only for data.kind=hub, and data={self.name} is {self.kind}")
        if self.streaming and self.max_documents is None:
            raise ValueError(
                "data.streaming=true: say with data.max_documents how many documents to take; a data set that is worth "
                "streaming has more text than fits on the disk"
            )

    def _check_paths(self) -> None:
        if self.kind == "stdlib":
            paths = []
        elif self.kind == "hub" or isinstance(self.path, str | Path) or not isinstance(self.path, Sequence):
            paths = [self.path]
        else:
            paths = list(self.path)
        for key, path in [*(("path", path) for path in paths), ("cache", self.cache)]:
            if not isinstance(path, str | Path) or not str(path):
                several = "" if key == "cache" or self.kind == "hub" else ", or a list of such"
                raise ValueError(f"data.{key}: must be a text that is not empty{several}; found {type(path).__name__}")
            refuse_url(f"data.{key}", str(path))


def refuse_url(key: str, path: str) -> None:
    """Raise ValueError for a URL, and repeat nothing of it but its scheme: it may hold a password, or be signed."""
    if url := re.search(r"([A-Za-z][\w+.-]*)://", path):
        raise ValueError(
            f"{key} is a URL ({url[1]}://…), and these are not read, so that no password or signature in one ends in a "
            "run's files: get the file first (curl, aws s3 cp and the like find credentials in ~/.netrc or the "
            "environment) and give its local path, or for a data set of the hub data=hub data.path=owner/name (with "
            "HF_TOKEN in the environment, where it needs one)"
        )


def absolute(config: DataConfig) -> DataConfig:
    """With local paths that hold in any working directory: a run is read again from elsewhere."""
    place = lambda path: str(Path(os.path.expanduser(path)).absolute())  # noqa: E731
    path = config.path
    if config.kind in ("files", "bin"):
        path = place(path) if isinstance(path, str | Path) else [place(one) for one in path]
    return replace(config, path=path, cache=config.cache if config.cache.startswith("~") else place(config.cache))


def identity(config: DataConfig) -> dict:
    """A description that changes when what `documents` reads may have changed; made without reading any text.

    Of files: path, size and time of change. Of token ids, which may come out of an unpacked archive with the times they
    had, also a hash of 64 samples of 4 KiB, spread evenly from the first byte to the last.
    """
    shared = {"kind": config.kind, "column": config.column, "articles": config.articles}
    if config.max_documents is not None:
        shared["max_documents"] = config.max_documents
    if config.kind == "hub":  # streamed or not, the documents are the same
        source = [config.path, config.subset, config.revision, config.train_split, config.val_split]
        return {**shared, "source": source}
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files_of(config)]
    if config.kind == "bin":
        stats = [(*stat, sampled(Path(stat[0]))) for stat in stats]
    return {**shared, "source": stats}


def sampled(path: Path, samples: int = 64, width: int = 4096) -> str:
    """Hash of so many pieces of a file, in bytes `width` each; of all of it, where it is not longer than they are."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    with open(path, "rb") as file:
        for i in range(samples):
            file.seek(max(0, size - width) * i // (samples - 1))
            digest.update(file.read(width))
    return digest.hexdigest()


def documents(config: DataConfig) -> Iterator[tuple[str | None, Iterable[str]]]:
    """All documents in a fixed order, each as a split and blocks of text.

    ValueError, naming the corpus or file, where one cannot be read; of a text file when its blocks are.
    """
    if config.kind == "hub":
        return _hub(config)
    return ((None, blocks) for blocks in islice(_read_files(files_of(config), config.column), config.max_documents))


def describe(config: DataConfig) -> str:
    """The corpus in a few words, for people: `stdlib (CPython 3.11.7)`."""
    if config.kind == "stdlib":
        return f"stdlib ({platform.python_implementation()} {platform.python_version()})"
    return f"{config.name} ({config.path})"


def files_of(config: DataConfig) -> list[Path]:
    """The files that a corpus of files is read from, in order. ValueError where there is none, or one of no use."""
    if config.kind == "stdlib":
        return _stdlib_files()
    return _user_files(config.path, BIN if config.kind == "bin" else tuple(READERS), folders=config.kind == "bin")


def _stdlib_files() -> list[Path]:
    """The standard library's own modules, in the order of their names; not its tests, nor what is installed into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    if not found:
        raise ValueError(f"data=stdlib: no Python source under {root}; use data=files data.path=<your text>")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _user_files(path: Any, endings: tuple[str, ...], folders: bool) -> list[Path]:
    files: dict[Path, None] = {}  # each once, and in order
    for pattern in [path] if isinstance(path, str | Path) else list(path):
        pattern = os.path.expanduser(pattern)
        if Path(pattern).is_dir():
            if not folders:
                raise ValueError(f"data.path={pattern!r}: is a folder; say which files, e.g. '{pattern}/*.txt'")
            pattern = f"{glob.escape(pattern)}/*{endings[0]}"
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        found = [Path(name).absolute() for name in found if Path(name).is_file()]
        if not found:
            raise ValueError(f"data.path={pattern!r}: no such file, and no file matches it")
        files |= dict.fromkeys(found)
    for file in files:
        if not file.name.endswith(endings):
            raise ValueError(f"data.path: {file} is none of {', '.join(endings)}")
    return list(files)


BIN = (".bin",)


def _read_files(files: list[Path], column: str) -> Iterator[Iterable[str]]:
    """In the order given. Text files are whole documents; of the others each may have columns of its own."""
    for file in files:
        rows = next(rows for ending, rows in READERS.items() if file.name.endswith(ending))
        if rows is None:
            yield _blocks(file)
        else:
            yield from ([_text(row, column, where)] for where, row in rows(file, column))


def _open(file: Path) -> TextIO:
    return fsspec.filesystem("file").open(file, "rt", encoding="utf-8-sig", compression="infer")


def _blocks(file: Path) -> Iterator[str]:
    """A text file, packed or not, block by block, its ends of lines as line feeds."""
    with readable(file), _open(file) as text:
        while block := text.read(BLOCK):
            yield block


def _json_rows(file: Path, column: str) -> Iterator[tuple[str, dict]]:
    """Not by `datasets`: where a column holds a number, too, that gives the texts around it as JSON, with quotes."""
    with readable(file), _open(file) as text:
        for number, line in enumerate(text, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number}: no JSON object")
                yield f"{file}, line {number},", row


def _parquet_rows(file: Path, column: str) -> Iterator[tuple[str, dict]]:
    import pyarrow.parquet

    with readable(file), open(file, "rb") as raw:
        table = pyarrow.parquet.ParquetFile(raw)
        names = table.schema_arrow.names
        if column not in names:
            yield str(file), dict.fromkeys(names)  # which says what there is
        if names.count(column) > 1:
            raise ValueError(f"it has several columns of the name {column!r}")
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            yield from ((str(file), row) for row in batch.to_pylist())


# how the rows of a file are read, by its ending; text has none, and parquet compresses for itself
READERS = {
    name + packed: rows
    for name, rows in ((".txt", None), (".py", None), (".jsonl", _json_rows))
    for packed in ("", ".gz", ".zst")
} | {".parquet": _parquet_rows}


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """Around reading a file: whatever fails becomes a ValueError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: {file} is not UTF-8 text ({error.reason}); convert it") from error
    except Exception as error:  # pyarrow and the decompressors raise whatever the damage happens to trigger
        hint = "; pip install backports.zstd" if "zstd not supported" in str(error) else ""
        raise ValueError(f"data.path: could not read {file} ({error}){hint}") from error


def _text(row: dict, column: str, where: str) -> str:
    if column not in row:
        raise ValueError(f"data.column={column!r}: {where} has the columns {', '.join(row)}")
    if not isinstance(row[column], str):
        found = "null" if row[column] is None else type(row[column]).__name__
        raise ValueError(f"data.column={column!r}: {where} holds {found} there, not text")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:  # JSON can hold one
        raise ValueError(f"data.column={column!r}: {where} holds half a surrogate pair, which is no text") from error
    return row[column]


def _hub(config: DataConfig) -> Iterator[tuple[str | None, list[str]]]:
    splits = {"train": config.train_split}
    if config.val_split is not None:
        splits["val"] = config.val_split
    for split, hub_split in splits.items():
        texts = (_text(row, config.column, config.path) for row in _hub_rows(config, hub_split))
        label = split if config.val_split is not None else None
        found = _articles(texts) if config.articles else texts
        yield from ((label, [text]) for text in islice(found, config.max_documents))


def _hub_rows(config: DataConfig, split: str) -> Iterator[dict]:
    import datasets

    load = partial(datasets.load_dataset_builder, config.path, config.subset, revision=config.revision)
    try:
        builder = load()
        if hasattr(builder.config, "on_mixed_types"):  # JSON: see _json_rows; what is not "use_json" is an error
            builder = load(on_mixed_types="refuse")
        if config.streaming:
            yield from builder.as_streaming_dataset(split)
        else:
            builder.download_and_prepare()
            yield from builder.as_dataset(split)
    except Exception as error:  # what a connection that breaks, or a set that is not there, happens to trigger
        told = "".join(traceback.format_exception(error))
        raise ValueError(
            f"data={config.name}: could not read {config.path} from the Hugging Face hub "
            f"({_SECRETS.sub('…', str(error))}). Its settings are data.path, data.subset, data.revision, "
            "data.train_split and data.val_split; the corpora stdlib and files need no network"
        ) from (None if _SECRETS.search(told) else error)  # a run's log has the traceback, with all messages


# of a URL in a message: user and password, and what signs it
_SECRETS = re.compile(r"(?<=://)[^\s/@'\"]+@|(?<=\?)[\w.-]+=[^\s'\"<>)]*")

_TITLE = re.compile(r" = [^=].*[^=] = \n?| = [^=] = \n?")


def _articles(lines: Iterator[str]) -> Iterator[str]:
    """WikiText's rows, which are lines, joined to articles. A title has one `=` a side, its sections have more."""
    article: list[str] = []
    for line in lines:
        if _TITLE.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
