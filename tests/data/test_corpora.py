"""Corpora of files, against the same files read by plain Python."""

import gzip
import importlib
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import DataConfig
from tests.data.toys import files, jsonl, texts, write

zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_stdlib_is_the_standard_library_in_the_order_of_names():
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
    found = {path.relative_to(root) for path in root.rglob("*.py")}
    expected = {path.as_posix(): (root / path).read_text("utf-8") for path in found if not left_out & {*path.parts}}
    assert len(expected) > 300  # CPython has some 700
    assert texts(DataConfig("stdlib", "stdlib")) == [expected[name] for name in sorted(expected)]


def test_text_is_read_without_the_seconds_that_datasets_takes(tmp_path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"one"))
    source = """if True:
        import sys
        from tests.data.toys import DataConfig, files, texts
        assert texts(files(sys.argv[1])) == ["one"] and texts(DataConfig("stdlib", "stdlib"))
        assert "datasets" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", source, path], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("packed", PACKERS)
def test_a_text_file_is_one_document_and_a_row_is_one(tmp_path, packed):
    pack = PACKERS[packed]
    text = write(tmp_path / f"a.txt{packed}", pack("\ufeffone\r\nünï 漢\r\x0b\u2028\n".encode()))
    source = write(tmp_path / f"a.py{packed}", pack(b"two"))
    rows = write(tmp_path / f"a.jsonl{packed}", pack(b'{"body": "three\\r\\n", "n": 1}\n\n{"body": "2020-01-01"}\n'))
    table = parquet(tmp_path / "a.parquet", n=[1, None], body=["five", "2020-01-01"])
    expected = ["one\nünï 漢\n\x0b\u2028\n", "two", "three\r\n", "2020-01-01", "five", "2020-01-01"]
    assert texts(files([text, source, rows, table], column="body")) == expected


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_packed_files_are_read_to_the_end_of_their_last_piece_or_are_an_error(tmp_path, packed):
    # what `cat a.gz b.gz` and parallel compressors make
    text = "".join(random.Random(0).choices("ab ü漢\n", k=20_000))
    raw = b"".join(PACKERS[packed](piece.encode()) for piece in (text[:9000], text[9000:]))
    assert texts(files(write(tmp_path / f"a.txt{packed}", raw))) == [text]
    for damaged in (raw[:-9], b"no " * 99):
        path = write(tmp_path / f"bad.txt{packed}", damaged)
        with pytest.raises(ValueError, match=r"data\.path: could not read .*bad"):
            texts(files(path))


def test_globs_and_lists_give_each_file_once_in_order(tmp_path):
    names = {name: write(tmp_path / f"{name}.txt", name) for name in ("b", "a", "c/d", "10", "9", "[ab]")}
    assert texts(files(str(tmp_path / "*.txt"))) == ["10", "9", "[ab]", "a", "b"]
    assert texts(files(str(tmp_path / "**/*.txt"))) == ["10", "9", "[ab]", "a", "b", "c/d"]
    assert texts(files(names["[ab]"])) == ["[ab]"]  # a file of that name, so no pattern
    assert texts(files([names["b"], str(tmp_path / "[ab].txt"), str(tmp_path / "?.txt")])) == ["b", "[ab]", "9", "a"]


def test_paths_hold_in_any_working_directory(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", "one")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    here = files(["a.jsonl", "*.jsonl"], cache="cache")
    monkeypatch.chdir("/")
    assert texts(here) == texts(files("~/*.jsonl")) == ["one"]
    assert here.cache == str(tmp_path / "cache")
    assert DataConfig("stdlib", "stdlib").cache.startswith("~")


LATE_NUMBER = b'{"text": "%s"}\n' % (b"a" * 500) * 30_000 + b'{"text": 5}'  # in a part of its own


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"one", r"a\.csv is none of \.txt.*\.jsonl.*\.parquet"),
        ("a.txt", b"a" * 100_000 + b"\xff", r"a\.txt \('utf-8' codec"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}\n', r"a\.jsonl \('utf-8' codec"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "tw', r"a\.jsonl \(JSON parse error"),
        ("a.jsonl", b'{"text": "one"}\n\n[1]\n', r"a\.jsonl \("),
        ("a.jsonl", b'{"text": "one"}\n{"body": "b", "n": 1}', r"data\.column='text'.*columns are text, body, n"),
        (
            "a.jsonl",
            b'{"text": "one"}\n{"text": 5}\n{"text": "two"}',
            r"a\.jsonl \(JSON parse error: .*string to number",
        ),
        pytest.param("a.jsonl", LATE_NUMBER, r"a\.jsonl \(JSON.*string to number", id="a late number"),
        ("a.jsonl", b'{"text": null}', r"data\.column='text': .* no text"),
        ("a.parquet", b"PAR1PAR1", r"could not read .*a\.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, words):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=rf"data\.path: .*{words}"):
        texts(files([jsonl(tmp_path / "good.jsonl", "good"), path]))


def test_a_table_without_the_column_lists_what_it_has(tmp_path):
    with pytest.raises(ValueError, match=r"data\.column='text'.*columns are body, n"):
        texts(files(parquet(tmp_path / "a.parquet", body=["one"], n=[1])))


@pytest.mark.parametrize("name", ["none.txt", "*.txt", "folder"])
def test_a_missing_file_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="no file matches it") as raised:
        texts(files([jsonl(tmp_path / "a.jsonl", "one"), str(tmp_path / name)]))
    assert str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize("most", [1, 3, 4, 9])
def test_files_end_after_so_many_documents(tmp_path, most):
    paths = [jsonl(tmp_path / "a.jsonl", "one", "two", "three"), write(tmp_path / "a.txt", "four")]
    assert texts(files(paths, max_documents=most)) == ["one", "two", "three", "four"][:most]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "web"}, r"data\.kind='web'.*stdlib, task, files, hub, bin"),
        ({"kind": "files"}, r"data\.path is missing.*texts/\*\.txt"),
        ({"kind": "hub", "path": ""}, r"data\.path is missing.*owner/name"),
        ({"kind": "bin", "path": []}, r"data\.path is missing"),
        ({"kind": "stdlib", "path": "book.txt"}, r"data\.path=book\.txt: data=mine reads no path; .* data=files"),
        ({"kind": "files", "path": "a.txt", "val_split": "test"}, r"data\.val_split=test: only data=hub has splits"),
        ({"kind": "stdlib", "val_fraction": 0}, r"data\.val_fraction=0: .*above 0 and below 1"),
        ({"kind": "stdlib", "val_fraction": 1.0}, r"data\.val_fraction=1\.0"),
        ({"kind": "stdlib", "val_fraction": float("nan")}, r"data\.val_fraction=nan"),
        ({"kind": "stdlib", "max_documents": 0}, r"data\.max_documents=0: .*at least 1"),
        ({"kind": "hub", "path": "o/h", "streaming": True}, r"data\.streaming=true: .*data\.max_documents"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(ValueError, match=words):
        DataConfig("mine", **settings)
