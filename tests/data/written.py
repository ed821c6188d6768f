"""Corpora that tests write, and what is read from them."""

import json

import pyarrow
import pyarrow.parquet

from data import DataConfig
from data.corpora import documents


def files(path, **settings):
    return DataConfig("mine", "files", path, **settings)


def whole(config):
    """Documents with their blocks joined."""
    return [(split, "".join(blocks)) for split, blocks in documents(config)]


def texts(config):
    return [text for _, text in whole(config)]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def jsonl(path, *rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)
