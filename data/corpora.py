"""Corpora: where documents come from.

A document is (split, text): "train" or "val" where the publisher has split the corpus, else None; and its text.
"""

import contextlib
import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec

from model.checks import check_whole

# an example of its path, if it needs one
KINDS = {"stdlib": None, "task": None, "files": "'texts/*.txt'", "hub": "owner/name", "bin": "<folder of .bin files>"}
TEXT = (".txt", ".py")  # a file is a document; of other files a row is
ENDINGS = (*(ending + packed for ending in (*TEXT, ".jsonl") for packed in ("", ".gz", ".zst")), ".parquet")
NO_STDLIB = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class DataConfig:
    """What to read, and how to split it. `name` is for people; `kind` decides how it is read.

    `stdlib`: the source of Python's standard library. `files`: `path` is a file, a glob or a list; a text file is one
    document, a row of other files is one, its text in `column`. `hub`: `path` is a data set of the Hugging Face hub,
    `subset` one of its configs; `articles` joins WikiText's lines; `streaming` keeps no copy on the disk. `bin`: token
    ids in a folder, a glob, or a list. `task`: strings of `data.tasks`, no text.

    `max_documents`: how many are read, in all or of each of the publisher's splits. `val_split` is the publisher's
    validation split; null holds out about `val_fraction` of the text, drawn with `split_seed`. `tuning` leaves the
    validation documents out and holds out others: to choose settings by. `cache`: the folder for token files.
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
    tuning: bool = False
    cache: str = "~/.cache/ropewalk"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"data.kind={self.kind!r}: known kinds are {', '.join(KINDS)}")
        if KINDS[self.kind] and not self.path:
            raise ValueError(f"data.path is missing: data={self.name} needs it, e.g. data.path={KINDS[self.kind]}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction}: must be above 0 and below 1")
        check_whole("data.max_documents", self.max_documents, optional=True)
        if self.tuning and self.kind in ("bin", "task"):
            raise ValueError(f"data.tuning=true: has no documents to hold out with data={self.name}; leave it out")
        if self.streaming and self.max_documents is None:
            raise ValueError("data.streaming=true: give data.max_documents, the number of documents to take")

    @property
    def paths(self) -> list[str]:
        """`path` as a list, the home directory spelt out."""
        several = [self.path] if isinstance(self.path, str | os.PathLike) else self.path
        return [os.path.expanduser(path) for path in several]


def absolute(config: DataConfig) -> DataConfig:
    """With local paths that hold in any working directory: a run is read again from elsewhere."""
    path = config.path
    if config.kind in ("files", "bin"):
        found = [str(Path(one).absolute()) for one in config.paths]
        path = found[0] if isinstance(path, str | os.PathLike) else found
    cache = config.cache if config.cache.startswith("~") else str(Path(config.cache).absolute())
    return replace(config, path=path, cache=cache)


def documents(config: DataConfig) -> Iterator[tuple[str | None, str]]:
    """All documents in a fixed order, each as a split and a text. ValueError, naming what cannot be read."""
    if config.kind == "hub":
        splits = {"train": config.train_split, "val": config.val_split}
        for label, split in splits.items() if config.val_split else [(None, config.train_split)]:
            texts = _read_hub(config, split)
            found = _articles(texts) if config.articles else texts
            yield from ((label, text) for text in islice(found, config.max_documents))
    else:
        found = (text for file in files_of(config) for text in _read_file(file, config.column))
        yield from ((None, text) for text in islice(found, config.max_documents))


def files_of(config: DataConfig) -> list[Path]:
    """The files of a corpus that is not on the hub, each once and in order. ValueError where there is none."""
    found: list[Path] = []
    if config.kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = set(subfolders) - NO_STDLIB
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(found, key=lambda path: path.relative_to(root).as_posix())
    endings = (".bin",) if config.kind == "bin" else ENDINGS
    for pattern in config.paths:
        if config.kind == "bin" and os.path.isdir(pattern):
            pattern = f"{glob.escape(pattern)}/*.bin"
        names = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name).absolute() for name in names if os.path.isfile(name)]
        if not files:
            raise ValueError(f"data.path={pattern!r}: no file matches it; for a folder give a glob, '<folder>/*.txt'")
        for file in files:
            if not file.name.endswith(endings):
                raise ValueError(f"data.path: {file} is none of {', '.join(endings)}")
        found += files
    return list(dict.fromkeys(found))


def _read_file(file: Path, column: str) -> Iterator[str]:
    name = f"data.path: could not read {file}"
    if file.name.removesuffix(".gz").removesuffix(".zst").endswith(TEXT):
        local = fsspec.filesystem("file")
        with _named(name), local.open(file, "rt", encoding="utf-8-sig", compression="infer") as text:
            yield text.read()
    else:
        from datasets import IterableDataset  # here, since it takes seconds and stdlib and text files need none of it

        path = glob.escape(str(file))
        load = partial(IterableDataset.from_json, path, on_mixed_types=None)  # else one number puts all texts in quotes
        load = partial(IterableDataset.from_parquet, path) if file.suffix == ".parquet" else load
        yield from _read_rows(load, column, name)


def _read_hub(config: DataConfig, split: str) -> Iterator[str]:
    from datasets import load_dataset

    options = {"revision": config.revision, "split": split, "streaming": config.streaming}
    name = f"data={config.name}: could not read {config.path} from the Hugging Face hub"
    advice = "; check data.path, data.subset, data.column and data.train_split. data=stdlib needs no network"
    return _read_rows(lambda: load_dataset(config.path, config.subset, **options), config.column, name, advice)


def _read_rows(load: Callable[[], Iterable[dict]], column: str, name: str, advice: str = "") -> Iterator[str]:
    with _named(name, advice):
        for row in load():
            if not isinstance(row.get(column), str):
                raise ValueError(f"data.column={column!r}: a row has no text there; its columns are {', '.join(row)}")
            yield row[column]


@contextlib.contextmanager
def _named(name: str, advice: str = "") -> Iterator[None]:
    """Any error becomes a ValueError: `datasets` and the decompressors raise whatever the damage happens to trigger."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} ({error}){advice}") from error


_TITLE = re.compile(r" = [^=](.*[^=])? = \n?")


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's rows, which are lines, joined to articles. A title has one `=` a side, its sections have more."""
    article = ""
    for line in lines:
        if article and _TITLE.fullmatch(line):
            yield article
            article = ""
        article += line
    yield article
