"""Corpora: where documents come from. All of them are read by the `datasets` library.

A corpus yields documents, as (split, text): split is "train" or "val" where the publisher has split it, else None.
"""

import glob
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

KINDS = ("stdlib", "files", "hub")


@dataclass
class DataConfig:
    """What to read, and how to split it. `name` is for people; `kind` decides how it is read.

    kind `stdlib`: the Python standard library's source. `files`: `path` is a .txt, .py, .jsonl or .parquet file, a
    glob, or a list of them; a file of text is one document, a row of the others is one, its text in `column`. `hub`:
    `path` is a data set on the Hugging Face hub (`subset`, `revision`), its documents are rows, or articles
    (`articles`: WikiText, whose rows are lines). `val_split` names the publisher's validation split; null holds out
    `val_fraction` of the documents, drawn with `split_seed`. `cache`: the folder for token files.
    """

    name: str
    kind: str
    path: Any = None
    subset: str | None = None
    revision: str | None = None
    column: str = "text"
    articles: bool = False
    train_split: str = "train"
    val_split: str | None = None
    val_fraction: float = 0.05
    split_seed: int = 0
    cache: str = "~/.cache/ropewalk"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"data.kind={self.kind!r}: known kinds are {', '.join(KINDS)}")
        if self.kind != "stdlib" and not self.path:
            raise ValueError(f"data.path is missing: data={self.name} needs it, e.g. data.path='texts/*.txt'")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction}: must be above 0 and below 1")


def absolute(config: DataConfig) -> DataConfig:
    """With local paths that hold in any working directory: a run is read again from elsewhere."""
    place = lambda path: str(Path(str(path)).expanduser().absolute())  # noqa: E731
    path = config.path
    if config.kind == "files":
        path = place(path) if isinstance(path, str | Path) else [place(one) for one in path]
    return replace(config, path=path, cache=config.cache if config.cache.startswith("~") else place(config.cache))


def identity(config: DataConfig) -> dict:
    """A description that changes when what `documents` reads may have changed; made without reading any text."""
    shared = {"kind": config.kind, "column": config.column, "articles": config.articles}
    if config.kind == "hub":
        source = [config.path, config.subset, config.revision, config.train_split, config.val_split]
        return {**shared, "source": source}
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(config)]
    return {**shared, "source": stats}


def documents(config: DataConfig) -> Iterator[tuple[str | None, str]]:
    """All documents in a fixed order. ValueError, naming the corpus or file, where one cannot be read."""
    return _hub(config) if config.kind == "hub" else _read_files(_files(config), config.column)


def describe(config: DataConfig) -> str:
    """The corpus in a few words, for people: `stdlib (CPython 3.11.7)`."""
    if config.kind == "stdlib":
        return f"stdlib ({platform.python_implementation()} {platform.python_version()})"
    return f"{config.name} ({config.path})"


def _files(config: DataConfig) -> list[Path]:
    return _stdlib_files() if config.kind == "stdlib" else _user_files(config.path)


def _stdlib_files() -> list[Path]:
    """The standard library's own modules, in the order of their names; not its tests, nor what is installed into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    if not found:
        raise ValueError(f"data=stdlib: no Python source under {root}; use data=files data.path=<your text>")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _user_files(path: Any) -> list[Path]:
    files: list[Path] = []
    for pattern in [path] if isinstance(path, str | Path) else list(path):
        pattern = str(Path(str(pattern)).expanduser())
        if Path(pattern).is_dir():
            raise ValueError(f"data.path={pattern!r}: is a folder; say which files, e.g. '{pattern}/*.txt'")
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        found = [Path(name).absolute() for name in found if Path(name).is_file()]
        if not found:
            raise ValueError(f"data.path={pattern!r}: no such file, and no file matches it")
        files += [name for name in found if name not in files]
    for file in files:
        if file.suffix not in READERS:
            raise ValueError(f"data.path: {file} is none of {', '.join(READERS)}")
    return files


# datasets' reader for a file, by its ending
READERS = {".txt": "text", ".py": "text", ".jsonl": "json", ".parquet": "parquet"}


def _read_files(files: list[Path], column: str) -> Iterator[tuple[None, str]]:
    """In the order given. Text files are read as whole documents; of the others each may have columns of its own."""
    for reader, group in groupby(files, key=lambda file: READERS[file.suffix]):
        if reader == "text":
            rows = _rows(reader, list(group), sample_by="document", encoding="utf-8-sig")
            yield from ((None, row["text"]) for row in rows)
        else:
            yield from ((None, _text(row, column, str(file))) for file in group for row in _rows(reader, [file]))


def _rows(reader: str, files: list[Path], **options: Any) -> Iterator[dict]:
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a user's own files are nothing to report to the hub
    try:
        names = [glob.escape(str(file)) for file in files]
        yield from datasets.load_dataset(reader, data_files=names, split="train", streaming=True, **options)
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: {_not_utf8(files)} is not UTF-8 text ({error.reason}); convert it") from error
    except Exception as error:  # datasets and pyarrow raise whatever the damage happens to trigger
        raise ValueError(f"data.path: could not read {', '.join(map(str, files[:3]))} ({error})") from error


def _not_utf8(files: list[Path]) -> Path | None:
    for file in files:
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return file
    return None


def _text(row: dict, column: str, where: str) -> str:
    if column not in row:
        raise ValueError(f"data.column={column!r}: {where} has the columns {', '.join(row)}")
    if not isinstance(row[column], str):
        raise ValueError(f"data.column={column!r}: {where} holds {type(row[column]).__name__} there, not text")
    return row[column]


def _hub(config: DataConfig) -> Iterator[tuple[str | None, str]]:
    import datasets

    splits = {"train": config.train_split}
    if config.val_split is not None:
        splits["val"] = config.val_split
    for split, hub_split in splits.items():
        try:
            rows = datasets.load_dataset(config.path, config.subset, revision=config.revision, split=hub_split)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"data={config.name}: could not get {config.path} from the Hugging Face hub ({error}). The corpora "
                "stdlib and files need no network"
            ) from error
        texts = (_text(row, config.column, config.path) for row in rows)
        label = split if config.val_split is not None else None
        yield from ((label, text) for text in (_articles(texts) if config.articles else texts))


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
