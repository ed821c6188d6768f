"""Token ids of other programs, against files written by `struct` and documents cut by plain Python."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest

import data.bins
from data import DataConfig, prepare
from tests.data.toys import BYTES, numbers, silent

END = 256  # of the tokenizer `bytes`


def ids(*documents, end_first=False):
    """Documents as nanoGPT joins them, or llm.c."""
    return [i for text in documents for i in ([END, *text.encode()] if end_first else [*text.encode(), END])]


def raw(path, tokens):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def headed(path, tokens, magic=20240520, version=1, count=None):
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    raw(path, tokens)
    path.write_bytes(header + path.read_bytes())
    return path


def config(folder, path=None):
    return DataConfig("mine", "bin", str(path or folder / "set"), cache=str(folder / "cache"))


def pair(folder, write=raw, train=("one", "two", "three"), val=("four", "five")):
    write(folder / "set" / "train.bin", ids(*train))
    write(folder / "set" / "val.bin", ids(*val))
    return folder / "set"


@pytest.mark.parametrize("write", [raw, headed])
def test_ids_are_copied(tmp_path, write):
    pair(tmp_path, write)
    found = prepare(config(tmp_path), BYTES, silent)
    assert found.train.tolist() == numbers(found.folder / "train.bin", "H") == ids("one", "two", "three")
    assert found.val.tolist() == ids("four", "five")
    assert numbers(found.folder / "train.offsets", "q") == found.train_offsets.tolist() == [0, 4, 8, 14]
    assert found.val_offsets.tolist() == [0, 5, 10]
    assert (found.meta["tokens"], found.meta["documents"]) == ({"train": 14, "val": 10}, {"train": 3, "val": 2})
    assert found.train.dtype == np.uint16


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        (ids("ab", "c", "def", end_first=True), [0, 4, 6, 9]),  # llm.c: the end stands before each document
        ([97, 98, END, 99], [0, 3, 4]),  # nothing at the end
        ([97, 98, 99], [0, 3]),
        ([97, END, END, 98, END], [0, 2, 3, 5]),
        ([END], [0, 1]),
    ],
)
def test_borders_lie_after_the_end_of_a_document(tmp_path, monkeypatch, tokens, offsets):
    raw(pair(tmp_path) / "val.bin", tokens)
    for read in (1, 2, 3, 1 << 24):
        monkeypatch.setattr(data.bins, "READ", read)
        place = DataConfig("mine", "bin", str(tmp_path / "set"), cache=str(tmp_path / f"cache{read}"))
        found = prepare(place, BYTES, silent)
        assert found.val_offsets.tolist() == offsets


@pytest.mark.parametrize("write", [raw, headed])
def test_shards_are_one_stream_in_the_order_of_their_names(tmp_path, write):
    whole = ids(*(f"document {i}" for i in range(50)), end_first=True)
    cuts = [0, 100, 333, 334, len(whole)]
    for i in range(4):
        write(tmp_path / "set" / f"fineweb_train_{i + 1:06d}.bin", whole[cuts[i] : cuts[i + 1]])
    write(tmp_path / "set" / "owt-validation.bin", ids("one", "two"))
    found = prepare(config(tmp_path), BYTES, silent)
    assert np.asarray(found.train).tolist() == whole
    assert found.meta["documents"]["train"] == 50  # though some lie across the ends of files
    single = raw(tmp_path / "single" / "train.bin", whole)
    raw(single.with_name("Val.bin"), ids("one", "two"))
    alone = prepare(config(tmp_path, single.parent), BYTES, silent)
    assert found.train_offsets.tolist() == alone.train_offsets.tolist()
    assert found.fingerprint == alone.fingerprint  # of the ids, wherever and however they lie
    raw(tmp_path / "single" / "train.bin", [*whole[:-1], 98])
    assert prepare(config(tmp_path, single.parent), BYTES, silent).fingerprint != alone.fingerprint


def test_globs_lists_and_what_is_no_bin_file(tmp_path):
    folder = pair(tmp_path)
    (folder / "readme.md").write_text("not ids")
    for path in (f"{folder}/*.bin", [f"{folder}/val.bin", f"{folder}/train.bin"]):
        found = prepare(DataConfig("mine", "bin", path, cache=str(tmp_path / "cache")), BYTES, silent)
        assert found.train.tolist() == ids("one", "two", "three")
    with pytest.raises(ValueError, match=r"readme\.md is none of \.bin"):
        prepare(config(tmp_path, f"{folder}/*"), BYTES, silent)
    (folder / "val.bin").unlink()
    with pytest.raises(ValueError, match=r"data\.path=.*no file of the val split"):
        prepare(config(tmp_path), BYTES, silent)


@pytest.mark.parametrize("name", ["interval", "data", "train_val"])
def test_a_name_without_a_split(tmp_path, name):
    path = raw(pair(tmp_path) / f"{name}.bin", ids("x"))
    with pytest.raises(ValueError, match=rf"{path} must have either train or val in its name"):
        prepare(config(tmp_path), BYTES, silent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(b""), r"val\.bin has 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"val\.bin has 19 bytes"),
        (lambda path: headed(path, ids("one"), count=5), r"val\.bin has 1032 bytes"),
        (lambda path: headed(path, ids("one"), count=-4), r"val\.bin has 1032 bytes"),
        (lambda path: headed(path, ids("one"), version=2), r"val\.bin has 1032 bytes"),
        (lambda path: headed(path, []), r"val\.bin has 1024 bytes"),
        (lambda path: headed(path, ids("one"), magic=20240801), "not of the 257 of"),  # another kind of llm.c's
        (lambda path: raw(path, [*ids("one"), 257, 5]), r"val\.bin has .* as large as 257, .* 257 of .*bytes"),
        (lambda path: headed(path, [*ids("one"), 65535]), r"as large as 65535, .*tokenizer=gpt2"),
        (lambda path: path.with_name("meta.pkl").write_bytes(b"cos\nabort\n(tR."), r"meta\.pkl.*data=files"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_named(tmp_path, change, words):
    change(pair(tmp_path) / "val.bin")
    with pytest.raises(ValueError, match=words):
        prepare(config(tmp_path), BYTES, silent)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("code", ["I", "Q"])
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_ids_of_32_or_64_bits_are_refused(tmp_path, name, code):
    path = pair(tmp_path) / name
    path.write_bytes(struct.pack(f"<5{code}", *ids("some")))
    with pytest.raises(ValueError, match=rf"{path} has a 0 at every second place"):
        prepare(config(tmp_path), BYTES, silent)


def test_a_tokenizer_of_more_ids_than_16_bits_hold_is_refused(tmp_path):
    pair(tmp_path)
    with pytest.raises(ValueError, match=r"not of the 200019 of tokenizer o200k.*tokenizer=gpt2"):
        prepare(config(tmp_path), SimpleNamespace(name="o200k", vocab_size=200_019, end_of_document=199_999), silent)
