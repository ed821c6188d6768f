"""Corpora: where documents come from.

A document is (split, blocks): split is "train" or "val" where the publisher has split the corpus, else None; blocks are
its text, in order. A row is one block. A text file is read in blocks, since it may be larger than the memory.
"""

import contextlib
import glob
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec

from model.checks import check_whole

# with a path; task: strings of data/tasks.py, no text
KINDS = {"stdlib": None, "task": None, "files": "'texts/*.txt'", "hub": "owner/name", "bin": "<folder of .bin files>"}
TEXT, ROWS = (".txt", ".py"), (".jsonl",)  # read as they are, or packed
ENDINGS = (*(ending + packed for ending in TEXT + ROWS for packed in ("", ".gz", ".zst")), ".parquet")
BLOCK = 1 << 20  # characters of a text file read at once


@dataclass
class DataConfig:
    """What to read, and how to split it. `name` is for people; `kind` decides how it is read.

    kind `stdlib`: the source of Python's standard library. `files`: `path` is a file (see ENDINGS), a glob or a list of
    them; a text file is one document, a row of other files is one, its text in `column`. `hub`: `path` is a data set of
    the Hugging Face hub (`subset`: which of its configs); a row is a document, or part of one (`articles`: WikiText,
    whose rows are lines); `streaming` keeps no copy on the disk. `bin`: token ids in a folder, a glob, or a list.

    `max_documents`: how many are read in all, or of each of the publisher's splits. `val_split` names the publisher's
    validation split; null holds out about `val_fraction` of the text, drawn with `split_seed` (see
    `data.split.hold_out`). `tuning` leaves the validation documents out and holds out others of the training text: to
    choose settings by. `cache`: the folder for token files.
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
        found = [str(Path(path).absolute()) for path in config.paths]
        path = found[0] if isinstance(path, str | os.PathLike) else found
    cache = config.cache if config.cache.startswith("~") else str(Path(config.cache).absolute())
    return replace(config, path=path, cache=cache)


def documents(config: DataConfig) -> Iterator[tuple[str | None, Iterable[str]]]:
    """All documents in a fixed order, each as a split and blocks of text.

    ValueError, naming the corpus or file, where one cannot be read; of a text file when its blocks are.
    """
    if config.kind != "hub":
        found = (document for file in files_of(config) for document in _read_file(file, config.column))
        yield from ((None, blocks) for blocks in islice(found, config.max_documents))
        return
    splits = {"train": config.train_split, "val": config.val_split}
    for label, split in splits.items() if config.val_split else [(None, config.train_split)]:
        texts = _hub_texts(config, split)
        found = _articles(texts) if config.articles else texts
        yield from ((label, [text]) for text in islice(found, config.max_documents))


def files_of(config: DataConfig) -> list[Path]:
    """The files of a corpus that is not on the hub, each once and in order. ValueError where there is none."""
    if config.kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
        found: list[Path] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = set(subfolders) - left_out
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(found, key=lambda path: path.relative_to(root).as_posix())
    endings = (".bin",) if config.kind == "bin" else ENDINGS
    files: dict[Path, None] = {}
    for pattern in config.paths:
        if config.kind == "bin" and Path(pattern).is_dir():
            pattern = f"{glob.escape(pattern)}/*.bin"
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        found = [Path(name).absolute() for name in names if Path(name).is_file()]
        if not found:
            raise ValueError(f"data.path={pattern!r}: no file matches it; for a folder give a glob, '<folder>/*.txt'")
        files |= dict.fromkeys(found)
    for file in files:
        if not file.name.endswith(endings):
            raise ValueError(f"data.path: {file} is none of {', '.join(endings)}")
    return list(files)


def _read_file(file: Path, column: str) -> Iterator[Iterable[str]]:
    """A file's documents. JSON is not read by `datasets`: where a column also holds numbers, it quotes the texts."""
    if file.name.endswith(".parquet"):
        import pyarrow.parquet

        with _opened(file, "rb") as raw:
            table = pyarrow.parquet.ParquetFile(raw)
            columns = [column] if column in table.schema_arrow.names else None
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                yield from ([_text(row, column)] for row in batch.to_pylist())
    elif file.name.removesuffix(".gz").removesuffix(".zst").endswith(TEXT):
        yield _blocks(file)
    else:
        with _opened(file, "rt") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        yield [_text(json.loads(line), column)]
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error


def _blocks(file: Path) -> Iterator[str]:
    with _opened(file, "rt") as text:
        while block := text.read(BLOCK):
            yield block


@contextlib.contextmanager
def _opened(file: Path, mode: str) -> Iterator[Any]:
    """A file, packed or not; whatever fails while it is read becomes a ValueError that names it."""
    try:
        encoding = None if "b" in mode else "utf-8-sig"
        with fsspec.filesystem("file").open(file, mode, encoding=encoding, compression="infer") as opened:
            yield opened
    except Exception as error:  # pyarrow and the decompressors raise whatever the damage happens to trigger
        raise ValueError(f"data.path: could not read {file} ({error})") from error


def _text(row: Any, column: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        columns = ", ".join(row) if isinstance(row, dict) else "none"
        raise ValueError(f"data.column={column!r}: a row has no text there; its columns are {columns}")
    return row[column]


def _hub_texts(config: DataConfig, split: str) -> Iterator[str]:
    import datasets

    load = partial(datasets.load_dataset_builder, config.path, config.subset, revision=config.revision)
    try:
        builder = load()
        if hasattr(builder.config, "on_mixed_types"):  # JSON: see _read_file
            builder = load(on_mixed_types="refuse")
        if not config.streaming:
            builder.download_and_prepare()
        rows = builder.as_streaming_dataset(split) if config.streaming else builder.as_dataset(split)
        yield from (_text(row, config.column) for row in rows)
    except Exception as error:  # whatever a broken connection or a missing data set happens to trigger
        raise ValueError(
            f"data={config.name}: could not read {config.path} from the Hugging Face hub ({error}); check data.path, "
            "data.subset, data.column and data.train_split. data=stdlib and data=files need no network"
        ) from error


_TITLE = re.compile(r" = [^=].*[^=] = \n?| = [^=] = \n?")


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's rows, which are lines, joined to articles. A title has one `=` a side, its sections have more."""
    article: list[str] = []
    for line in lines:
        if _TITLE.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
