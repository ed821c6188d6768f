"""Corpora that tests write, and what is read from their token files."""

import json
import struct
from itertools import pairwise

from data import DataConfig, get_tokenizer
from data.corpora import documents

BYTES = get_tokenizer("bytes")


def silent(message):
    pass


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def jsonl(path, *texts):
    return write(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def files(path, **settings):
    return DataConfig("mine", "files", path, **settings)


def texts(config):
    return [text for _, text in documents(config)]


def toy(tmp_path, *contents, **settings):
    """A corpus of rows, with a cache beside it."""
    return files(jsonl(tmp_path / "toy.jsonl", *contents), cache=str(tmp_path / "cache"), **settings)


def numbers(path, code):
    """A file of little-endian numbers."""
    raw = path.read_bytes()
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def texts_of(found, split):
    """The documents of a split of token files of bytes, cut where the offsets say."""
    ids, offsets = numbers(found.folder / f"{split}.bin", "H"), numbers(found.folder / f"{split}.offsets", "q")
    assert [ids[end - 1] for end in offsets[1:]] == [256] * (len(offsets) - 1)
    return [bytes(ids[begin : end - 1]).decode("utf-8") for begin, end in pairwise(offsets)]
