"""Corpora: where documents come from.

A document is (split, text): "train" or "val" where the publisher has split the corpus, else None; and its text.
"""

import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    """What to read, and how to split it. ValueError, naming the setting, for what cannot be."""

    name: str  # for people
    kind: str  # one of KINDS, decides how it is read
    path: Any = None  # files, bin: a file, a glob or a list (bin: a folder, too); hub: a data set's owner/name
    subset: str | None = None  # hub: one of the data set's configs
    revision: str | None = None  # hub
    column: str = "text"  # where a row has its text
    articles: bool = False  # hub, files: join WikiText's lines, which are rows, to articles
    streaming: bool = False  # hub: keep no copy on the disk
    max_documents: int | None = None  # how many are read, in all or of each of the publisher's splits
    train_split: str = "train"
    val_split: str | None = None  # the publisher's; None: about val_fraction is held out, drawn with split_seed
    val_fraction: float = 0.05
    split_seed: int = 0
    tuning: bool = False  # leave the validation documents out and hold out others, to choose settings by
    cache: str = "~/.cache/ropewalk"  # the folder for token files

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"data.kind={self.kind!r}: known kinds are {', '.join(KINDS)}")
        if KINDS[self.kind] and not self.path:
            raise ValueError(f"data.path is missing: data={self.name} needs it, e.g. data.path={KINDS[self.kind]}")
        if self.path and not KINDS[self.kind]:
            raise ValueError(f"data.path={self.path}: data={self.name} reads no path; for your own text use data=files")
        if self.val_split and self.kind != "hub":
            raise ValueError(f"data.val_split={self.val_split}: only data=hub has splits to choose from")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction}: must be above 0 and below 1")
        check_whole("data.max_documents", self.max_documents, optional=True)
        if self.tuning and self.kind in ("bin", "task"):
            raise ValueError(f"data.tuning=true: has no documents to hold out with data={self.name}; leave it out")
        if self.streaming and self.max_documents is None:
            raise ValueError("data.streaming=true: give data.max_documents, the number of documents to take")
        # Local paths hold in any working directory: a run is read again from elsewhere.
        if self.kind in ("files", "bin"):
            single = isinstance(self.path, str | os.PathLike)
            found = [str(Path(os.path.expanduser(path)).absolute()) for path in ([self.path] if single else self.path)]
            self.path = found[0] if single else found
        if not self.cache.startswith("~"):
            self.cache = str(Path(self.cache).absolute())


def documents(config: DataConfig) -> Iterator[tuple[str | None, str]]:
    """All documents in a fixed order, each as a split and a text. ValueError, naming what cannot be read."""
    splits = {"train": config.train_split, "val": config.val_split} if config.val_split else {None: config.train_split}
    for label, split in splits.items():
        sources = [split] if config.kind == "hub" else files_of(config)
        texts = (text for source in sources for text in _read(config, source))
        found = _articles(texts) if config.articles else texts
        yield from ((label, text) for text in islice(found, config.max_documents))


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
    for pattern in [config.path] if isinstance(config.path, str) else config.path:
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


def _read(config: DataConfig, source: Path | str) -> Iterator[str]:
    """The texts of a file, or of a split on the hub.

    Any error becomes a ValueError: `datasets` and the decompressors raise whatever the damage happens to trigger.
    """
    try:
        for row in _rows(config, source):
            if not isinstance(row.get(config.column), str):
                found = f"a row has no text there; its columns are {', '.join(row)}"
                raise ValueError(f"data.column={config.column!r}: {found}")
            yield row[config.column]
    except Exception as error:
        if config.kind != "hub":
            raise ValueError(f"data.path: could not read {source} ({error})") from error
        what = f"data={config.name}: could not read {config.path} from the Hugging Face hub ({error})"
        advice = "check data.path, data.subset, data.column and data.train_split. data=stdlib needs no network"
        raise ValueError(f"{what}; {advice}") from error


def _rows(config: DataConfig, source: Path | str) -> Iterable[dict]:
    """Rows with a text in config.column; a text file is one row."""
    if config.kind != "hub" and source.name.removesuffix(".gz").removesuffix(".zst").endswith(TEXT):
        with fsspec.filesystem("file").open(source, "rt", encoding="utf-8-sig", compression="infer") as text:
            return [{config.column: text.read()}]
    import datasets  # here, since it takes seconds and stdlib and text files need none of it

    if config.kind == "hub":
        options = {"revision": config.revision, "split": source, "streaming": config.streaming}
        return datasets.load_dataset(config.path, config.subset, **options)
    path = glob.escape(str(source))
    if source.suffix == ".parquet":
        return datasets.IterableDataset.from_parquet(path)
    return datasets.IterableDataset.from_json(path, on_mixed_types=None)  # else one number puts all texts in quotes


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
