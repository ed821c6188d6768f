"""Corpora of files, against the same files read by plain Python."""

import gzip
import io
import json
import os
import platform
import random
import socket
import sysconfig
from pathlib import Path

import datasets
import fsspec
import pytest

import data.corpora
from data import DataConfig, absolute
from data.corpora import describe, documents, identity
from tests.data.written import files, jsonl, parquet, texts, whole, write


def test_stdlib_is_the_standard_library_in_order():
    root = Path(sysconfig.get_paths()["stdlib"])
    expected = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                expected[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
    assert len(expected) > 300  # CPython has some 700
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(expected)

    found = whole(DataConfig("stdlib", "stdlib"))
    assert {split for split, _ in found} == {None}
    assert [text for _, text in found] == [expected[name] for name in sorted(expected)]


def test_stdlib_without_a_source_says_what_to_use_instead(monkeypatch, tmp_path):
    # tests, other people's packages and caches alone are no standard library
    for folder in ("test", "json/tests", "site-packages/numpy", "dist-packages", "__pycache__"):
        write(tmp_path / "lib" / folder / "a.py", "pass")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    with pytest.raises(ValueError, match="data=files"):
        whole(DataConfig("stdlib", "stdlib"))


def test_stdlib_leaves_out_only_folders_of_these_names(monkeypatch, tmp_path):
    root = tmp_path / "tests" / "lib"  # where Python itself is installed does not matter
    for name in ("test.py", "unittest/case.py", "unittest/tests/case.py", "tests/a.py", "latest/a.py", "a.txt", "B.py"):
        write(root / name, name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    assert texts(DataConfig("stdlib", "stdlib")) == ["B.py", "latest/a.py", "test.py", "unittest/case.py"]


def test_stdlib_is_described_with_its_version():
    assert platform.python_version() in describe(DataConfig("stdlib", "stdlib"))


@pytest.mark.parametrize("text", ["one line", "two\nlines\n\n  and more\n\n", "naïve 漢字 \U0001f4bb", " ", ""])
def test_a_txt_file_is_one_document(tmp_path, text):
    assert whole(files(write(tmp_path / "a.txt", text))) == [(None, text)]


def test_only_line_feeds_are_made_of_other_line_ends(tmp_path):
    text = "a\r\nb\rc\x0bd\x0ce\x1cf\x85g\u2028h\x00i"
    path = write(tmp_path / "a.txt", text)
    assert texts(files(path)) == ["a\nb\nc\x0bd\x0ce\x1cf\x85g\u2028h\x00i"] == [Path(path).read_text(encoding="utf-8")]


def test_a_row_of_jsonl_is_one_document(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "one", "n": 1}, {"text": "two\nlines ", "n": 2}, {"text": "漢", "n": 3})
    assert whole(files(path)) == [(None, "one"), (None, "two\nlines "), (None, "漢")]


def test_a_row_of_parquet_is_one_document(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=["one", "two\r\nlines ", "漢"], n=[1, 2, 3])
    assert whole(files(path)) == [(None, "one"), (None, "two\r\nlines "), (None, "漢")]


def test_text_in_another_column(tmp_path):
    rows = jsonl(tmp_path / "a.jsonl", {"text": "no", "body": "one"}, {"text": "no", "body": "two"})
    table = parquet(tmp_path / "a.parquet", body=["three"])
    text = write(tmp_path / "a.txt", "four")  # has no columns, so none can be missing
    assert texts(files([rows, table, text], column="body")) == ["one", "two", "three", "four"]


def test_a_glob_is_read_in_the_order_of_names(tmp_path):
    for name in ("b", "a", "c/d", "10", "9"):
        write(tmp_path / f"{name}.txt", name)
    write(tmp_path / "a.md", "no")
    assert texts(files(str(tmp_path / "*.txt"))) == ["10", "9", "a", "b"]
    assert texts(files(str(tmp_path / "**/*.txt"))) == ["10", "9", "a", "b", "c/d"]
    assert texts(files(str(tmp_path / "[ab].txt"))) == ["a", "b"]


def test_a_list_is_read_in_its_order_and_each_file_once(tmp_path):
    names = [write(tmp_path / f"{name}.txt", name) for name in "bca"]
    assert texts(files(names)) == ["b", "c", "a"]
    assert texts(files([names[1], str(tmp_path / "*.txt"), names[0]])) == ["c", "a", "b"]


def test_a_list_of_several_kinds(tmp_path):
    text = write(tmp_path / "a.txt", "txt")
    rows = jsonl(tmp_path / "a.jsonl", {"text": "jsonl"})
    table = parquet(tmp_path / "a.parquet", text=["parquet"])
    assert texts(files([text, rows, table])) == ["txt", "jsonl", "parquet"]  # in the order given


@pytest.mark.parametrize(
    "name", ["a b", "a=b", "ünï 漢", "a{b,c}", "a#b", "a%20b", "a,b", "a'b\"c", "$HOME", ".hid", "__a__"]
)
def test_names_of_all_kinds(tmp_path, name):
    folder = tmp_path / name
    rows = jsonl(folder / f"{name}.jsonl", {"text": "rows"})
    table = parquet(folder / f"{name}.parquet", text=["table"])
    text = write(folder / f"{name}.txt", "text")
    assert texts(files([rows, table, text])) == ["rows", "table", "text"]


@pytest.mark.parametrize(("name", "decoy"), [("a[1]", "a1"), ("[!a]", "b"), ("st*r", "star"), ("what?", "whats")])
def test_the_name_of_a_file_is_no_pattern(tmp_path, name, decoy):
    write(tmp_path / decoy / f"{decoy}.txt", "another")
    path = write(tmp_path / name / f"{name}.txt", "this")
    assert texts(files(path)) == ["this"]


def test_files_need_no_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)  # what a user has
    rows = jsonl(tmp_path / "a.jsonl", {"text": "rows"})
    table = parquet(tmp_path / "a.parquet", text=["table"])
    text = write(tmp_path / "a.txt", "text")
    assert texts(files([rows, table, text])) == ["rows", "table", "text"]


def test_the_home_directory_is_understood(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write(tmp_path / "books" / "a.txt", "at home")
    assert texts(files("~/books/*.txt")) == texts(files("~/books/a.txt")) == ["at home"]


@pytest.mark.parametrize("name", ["none.txt", "*.txt", "folder"])
def test_a_missing_file_is_named(tmp_path, name):
    there = jsonl(tmp_path / "a.jsonl", {"text": "one"})
    (tmp_path / "folder").mkdir()
    for path in (str(tmp_path / name), [there, str(tmp_path / name)]):
        with pytest.raises(ValueError, match=r"no such file|is a folder") as raised:
            texts(files(path))
        assert str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize("name", ["a.csv", "a.TXT", "a", "a.txt.bz2", "a.gz", "a.parquet.gz"])
def test_an_unknown_ending_lists_the_known(tmp_path, name):
    path = write(tmp_path / name, "one")
    with pytest.raises(ValueError, match=r"\.txt.*\.jsonl.*\.parquet") as raised:
        texts(files(path))
    assert path in str(raised.value)


def test_a_missing_column_lists_what_is_there(tmp_path):
    rows = jsonl(tmp_path / "a.jsonl", {"body": "one", "n": 1})
    table = parquet(tmp_path / "a.parquet", body=["one"], n=[1])
    for path in (rows, table):
        with pytest.raises(ValueError, match=r"data\.column='text'.*body, n"):
            texts(files(path))


@pytest.mark.parametrize("values", [[1, 2], ["a", None], [["a"], ["b"]], [{"a": "b"}]])
def test_a_column_without_text(tmp_path, values):
    rows = jsonl(tmp_path / "a.jsonl", *({"text": value} for value in values))
    table = parquet(tmp_path / "a.parquet", text=values)
    for path in (rows, table):
        with pytest.raises(ValueError, match=r"data\.column='text'.*not text"):
            texts(files(path))


def test_a_row_without_the_column(tmp_path):
    with pytest.raises(ValueError, match=r"data\.column='text'"):
        texts(files(jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"other": "b"})))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bad.txt", "café".encode("latin-1")),
        ("bad.txt", "text".encode("utf-16")),
        ("bad.txt", b"a" * 100_000 + b"\xff"),
        ("bad.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9 au lait"}\n'),
    ],
    ids=["latin-1", "utf-16", "late", "jsonl"],
)
def test_invalid_utf8_names_the_file(tmp_path, name, content):
    good = tmp_path / f"good{Path(name).suffix}"
    write(good, '{"text": "good"}')
    bad = write(tmp_path / name, content)
    with pytest.raises(ValueError, match="UTF-8") as raised:
        texts(files([str(good), bad]))
    assert bad in str(raised.value)
    assert str(good) not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("cut.jsonl", b'{"text": "one"}\n{"text": "tw'), ("no.jsonl", b"not JSON at all\n"), ("cut.parquet", b"PAR1PAR1")],
    ids=["cut short", "no JSON", "parquet"],
)
def test_a_broken_file_is_named(tmp_path, name, content):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=r"data\.path") as raised:
        texts(files(path))
    assert name in str(raised.value)


def zstd(content):
    with io.BytesIO() as file:
        with fsspec.compression.compr["zstd"](file, mode="wb") as packed:
            packed.write(content)
        return file.getvalue()


PACKED = {".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", PACKED)
def test_packed_files(tmp_path, ending):
    pack = PACKED[ending]
    text = write(tmp_path / f"a.txt{ending}", pack("one\r\nünï 漢\n".encode()))
    source = write(tmp_path / f"a.py{ending}", pack(b"two"))
    rows = write(tmp_path / f"a.jsonl{ending}", pack(b'{"body": "three"}\n{"body": "four"}\n'))
    assert texts(files([text, source, rows], column="body")) == ["one\nünï 漢\n", "two", "three", "four"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("ending", PACKED)
def test_packed_files_in_several_pieces_are_read_to_the_end(tmp_path, ending, name):
    # what `cat a.gz b.gz` and parallel compressors make
    lines = [json.dumps({"text": str(random.random())}) + "\n" for _ in range(3000)]
    parts = "".join(lines[:1000]), "".join(lines[1000:])
    path = write(tmp_path / (name + ending), b"".join(PACKED[ending](part.encode()) for part in parts))
    expected = ["".join(parts)] if name == "a.txt" else [json.loads(line)["text"] for line in lines]
    assert texts(files(path)) == expected


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: packed[:99], lambda packed: b"no " * 99])
def test_damaged_packed_files_are_named(tmp_path, ending, name, damage):
    content = "".join(json.dumps({"text": str(random.random())}) + "\n" for _ in range(3000)).encode()
    path = write(tmp_path / (name + ending), damage(PACKED[ending](content)))
    with pytest.raises(ValueError, match=r"data\.path: could not read") as raised:
        texts(files(path))
    assert path in str(raised.value)


def test_a_missing_decompressor_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt.zst", zstd(b"one"))
    monkeypatch.delitem(fsspec.compression.compr, "zstd")
    with pytest.raises(ValueError, match=r"pip install backports\.zstd"):
        texts(files(path))


def test_a_long_text_comes_in_blocks(tmp_path, monkeypatch):
    text = "".join(random.Random(0).choices("ab ü漢\r\n", k=2000))
    path = write(tmp_path / "a.txt", "\ufeff" + text)
    monkeypatch.setattr(data.corpora, "BLOCK", 7)
    ((_, blocks),) = documents(files(path))
    blocks = list(blocks)
    assert max(map(len, blocks)) <= 7  # so what is in memory does not grow with the file
    assert "".join(blocks) == Path(path).read_text(encoding="utf-8-sig")


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_files_end_after_so_many_documents(tmp_path, most):
    rows = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"}, {"text": "three"})
    text = write(tmp_path / "a.txt", "four")
    assert texts(files([rows, text], max_documents=most)) == ["one", "two", "three", "four"][:most]


def test_identity_follows_the_files(tmp_path):
    path = tmp_path / "a.jsonl"
    jsonl(path, {"text": "one", "body": "two"})
    one = identity(files(str(path)))
    assert one == identity(files([str(path)])) == identity(files(str(tmp_path / "*.jsonl")))
    os.utime(path, ns=(0, 12345))  # written again, with as many bytes
    touched = identity(files(str(path)))
    write(tmp_path / "b.jsonl", path.read_bytes())
    more = identity(files(str(tmp_path / "*.jsonl")))
    column = identity(files(str(path), column="body"))
    fewer = identity(files(str(path), max_documents=1))
    assert len({repr(found) for found in (one, touched, more, column, fewer)}) == 5


def test_an_unknown_kind_lists_the_known():
    with pytest.raises(ValueError, match=r"data\.kind='web'.*stdlib, files, hub, bin"):
        DataConfig("mine", "web", "x")


@pytest.mark.parametrize("kind", ["files", "hub", "bin"])
@pytest.mark.parametrize("path", [None, "", []])
def test_a_missing_path(kind, path):
    with pytest.raises(ValueError, match=r"data\.path is missing"):
        DataConfig("mine", kind, path)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, 0.0, 1.0, float("nan")])
def test_a_fraction_that_splits_nothing(fraction):
    with pytest.raises(ValueError, match=r"data\.val_fraction=.*above 0 and below 1"):
        DataConfig("stdlib", "stdlib", val_fraction=fraction)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_a_fraction_that_splits(fraction):
    assert DataConfig("stdlib", "stdlib", val_fraction=fraction).val_fraction == fraction


def test_paths_hold_in_any_working_directory(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl", {"text": "one"})
    monkeypatch.chdir(tmp_path)
    here = absolute(DataConfig(name="files", kind="files", path=["a.jsonl", "*.jsonl"], cache="cache"))
    monkeypatch.chdir("/")
    assert texts(here) == ["one"]
    assert here.cache == str(tmp_path / "cache")
    assert absolute(DataConfig(name="stdlib", kind="stdlib")).cache.startswith("~")


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone")
    assert texts(files(str(path))) == ["one"]
