"""Token ids of other programs, against files written by `struct` and documents cut by plain Python."""

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

import data.bins
from data import DataConfig, absolute, draw_batch, get_tokenizer, prepare
from data.bins import Shards

END = 256  # of the tokenizer `bytes`
BYTES = get_tokenizer("bytes")


def silent(message):
    pass


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


def config(folder, path=None, **settings):
    return DataConfig("mine", "bin", str(path or folder / "set"), cache=str(folder / "cache"), **settings)


def pair(folder, write=raw, train=("one", "two", "three"), val=("four", "five")):
    write(folder / "set" / "train.bin", ids(*train))
    write(folder / "set" / "val.bin", ids(*val))
    return folder / "set"


@pytest.mark.parametrize("write", [raw, headed])
def test_ids_and_borders(tmp_path, write):
    pair(tmp_path, write)
    found = prepare(config(tmp_path), BYTES, silent)
    assert found.train.tolist() == ids("one", "two", "three")
    assert found.val.tolist() == ids("four", "five")
    assert found.train_offsets.tolist() == [0, 4, 8, 14]
    assert found.val_offsets.tolist() == [0, 5, 10]
    assert found.meta["tokens"] == {"train": 14, "val": 10}
    assert found.meta["documents"] == {"train": 3, "val": 2}
    assert found.train.dtype == np.uint16


@pytest.mark.parametrize("write", [raw, headed])
def test_nothing_is_copied(tmp_path, write):
    folder = pair(tmp_path, write)
    found = prepare(config(tmp_path), BYTES, silent)
    assert not list((tmp_path / "cache").rglob("*.bin"))
    assert isinstance(found.train, np.memmap)
    assert Path(found.train.filename) == folder / "train.bin"
    with pytest.raises(ValueError, match="read-only"):
        found.train[0] = 1


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
    pair(tmp_path)
    raw(tmp_path / "set" / "val.bin", tokens)
    for read in (1, 2, 3, 1 << 24):
        monkeypatch.setattr(data.bins, "READ", read)
        place = DataConfig("mine", "bin", str(tmp_path / "set"), cache=str(tmp_path / f"cache{read}"))
        found = prepare(place, BYTES, silent)
        assert found.val_offsets.tolist() == offsets
        assert found.val.tolist() == tokens


def test_text_without_an_end_is_one_document_and_says_so(tmp_path):
    pair(tmp_path)
    raw(tmp_path / "set" / "train.bin", [*b"no end in here"])
    raw(tmp_path / "set" / "val.bin", [END, *b"text"])
    said = []
    assert prepare(config(tmp_path), BYTES, said.append).train_offsets.tolist() == [0, 14]
    assert [line for line in said if "one document" in line] == [said[-1]]
    assert "train split" in said[-1]  # and of the val split, whose only end may stand first, not


@pytest.mark.parametrize("write", [raw, headed])
def test_shards_are_one_stream_in_the_order_of_their_names(tmp_path, write):
    whole = ids(*(f"document {i}" for i in range(50)), end_first=True)
    cuts = [0, 100, 333, 334, len(whole)]
    for i in range(4):
        write(tmp_path / "set" / f"fineweb_train_{i + 1:06d}.bin", whole[cuts[i] : cuts[i + 1]])
    write(tmp_path / "set" / "fineweb_val_000000.bin", ids("one", "two"))
    found = prepare(config(tmp_path), BYTES, silent)
    assert found.train.tolist() == whole
    assert found.val.tolist() == ids("one", "two")
    assert found.meta["documents"]["train"] == 50  # though some lie across the ends of files
    single = raw(tmp_path / "single" / "train.bin", whole)
    raw(single.with_name("val.bin"), ids("one", "two"))
    alone = prepare(config(tmp_path, single.parent), BYTES, silent)
    assert found.train_offsets.tolist() == alone.train_offsets.tolist()
    assert found.fingerprint == alone.fingerprint  # of the ids, wherever and however they lie
    for step in range(20):
        for ours, theirs in zip(
            draw_batch(found.train, 16, 4, 0, step), draw_batch(alone.train, 16, 4, 0, step), strict=True
        ):
            assert np.array_equal(ours, theirs)


def test_shards_are_indexed_as_an_array_is():
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 60000, 100).astype(np.uint16)
    shards = Shards([whole[:1], whole[1:40], whole[40:41], whole[41:]])
    assert (len(shards), shards.shape, shards.ndim, shards.dtype) == (100, (100,), 1, whole.dtype)
    indices = [0, 39, 40, 99, -1, -100, np.int64(5), slice(None), slice(30, 50), slice(-70, -50, 3), slice(60, 30, -1),
               slice(5, 5), rng.integers(-100, 100, (3, 7)), [1, 2, 99], np.array([], dtype=np.int64)]  # fmt: skip
    for index in indices:
        assert np.array_equal(shards[index], whole[index])
        assert shards[index].dtype == whole.dtype
    for index in (100, -101, [3, 100]):
        with pytest.raises(IndexError):
            shards[index]
    assert np.array_equal(np.asarray(shards), whole)
    table = rng.random(60000)
    assert np.array_equal(table[shards], table[whole])  # how bytes of tokens are looked up


@pytest.mark.parametrize(
    ("name", "split"),
    [("train", "train"), ("TinyStories_train", "train"), ("val", "val"), ("fineweb_val_000000", "val"),
     ("owt-validation", "val"), ("training_01", "train"), ("Val", "val")],
)  # fmt: skip
def test_the_split_is_in_the_name(tmp_path, name, split):
    other = "val" if split == "train" else "train"
    raw(tmp_path / "set" / f"{name}.bin", ids("here"))
    raw(tmp_path / "set" / f"{other}_other.bin", ids("there"))
    assert getattr(prepare(config(tmp_path), BYTES, silent), split).tolist() == ids("here")


@pytest.mark.parametrize("name", ["interval", "data", "train_val", "trains"])
def test_a_name_without_a_split(tmp_path, name):
    path = raw(pair(tmp_path) / f"{name}.bin", ids("x"))
    with pytest.raises(ValueError, match="either train or val in its name") as raised:
        prepare(config(tmp_path), BYTES, silent)
    assert str(path) in str(raised.value)


def test_a_missing_split(tmp_path):
    (pair(tmp_path) / "val.bin").unlink()
    with pytest.raises(ValueError, match=r"data\.path=.*no file of the val split"):
        prepare(config(tmp_path), BYTES, silent)


def test_globs_lists_and_what_is_no_bin_file(tmp_path):
    folder = pair(tmp_path)
    (folder / "readme.md").write_text("not ids")
    first = prepare(config(tmp_path), BYTES, silent)
    for path in (f"{folder}/*.bin", [f"{folder}/val.bin", f"{folder}/train.bin"]):
        found = prepare(DataConfig("mine", "bin", path, cache=str(tmp_path / "cache")), BYTES, silent)
        assert found.train.tolist() == first.train.tolist()
    with pytest.raises(ValueError, match=r"readme\.md is none of \.bin"):
        prepare(config(tmp_path, f"{folder}/*"), BYTES, silent)
    with pytest.raises(ValueError, match="no such file"):
        prepare(config(tmp_path, tmp_path / "nowhere"), BYTES, silent)


def test_relative_paths_hold_elsewhere(tmp_path, monkeypatch):
    pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    here = absolute(DataConfig("mine", "bin", "set", cache="cache"))
    monkeypatch.chdir("/")
    assert prepare(here, BYTES, silent).val.tolist() == ids("four", "five")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: path.write_bytes(b"\1"), "has 1 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "no whole number of uint16"),
        (lambda path: headed(path, ids("one"), count=5), r"header says 5 ids, which are 1034 bytes; it may"),
        (lambda path: headed(path, ids("one"), count=-4), r"header says -4 ids"),
        (lambda path: headed(path, ids("one"), version=2), "version 2, not 1"),
        (lambda path: headed(path, []), "only 1024 bytes"),
        (lambda path: path.write_bytes(struct.pack("<3i", 20240520, 1, 3)), "only 12 bytes"),
        (lambda path: path.write_bytes(struct.pack("<i", 20240520)), "only 4 bytes"),
        (lambda path: headed(path, ids("one"), magic=20240801, version=7), r"Llama 3 ids of llm\.c"),
        (lambda path: headed(path, ids("one"), magic=20240522), "an evaluation set"),
        (lambda path: raw(path, [*ids("one"), 257, 5]), r"id 257 at place 4, outside the 257 ids of tokenizer bytes"),
        (lambda path: headed(path, [*ids("one"), 65535]), r"id 65535 at place 4, outside .*tokenizer=gpt2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_damaged_files_are_named(tmp_path, name, change, words):
    path = pair(tmp_path) / name
    change(path)
    with pytest.raises(ValueError, match=words) as raised:
        prepare(config(tmp_path), BYTES, silent)
    assert str(path) in str(raised.value)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_vocabulary_of_its_own_is_refused_and_not_unpickled(tmp_path):
    folder = pair(tmp_path)
    (folder / "meta.pkl").write_bytes(b"cos\nabort\n(tR.")  # unpickled, it would end this process
    with pytest.raises(ValueError, match=r"meta\.pkl.*data=files"):
        prepare(config(tmp_path), BYTES, silent)


def test_the_ids_are_read_once(tmp_path, monkeypatch):
    pair(tmp_path)
    said = []
    first = prepare(config(tmp_path), BYTES, said.append)
    monkeypatch.setattr(np, "fromfile", None)
    second = prepare(config(tmp_path), BYTES, said.append)
    assert len(said) == 1
    assert second.folder == first.folder
    assert second.fingerprint == first.fingerprint


def test_how_changes_are_noticed(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 100, 1_000_000).astype("<u2")  # 2 MB, of which 256 KB are sampled
    path = pair(tmp_path) / "train.bin"

    def prepared(places=(), time=1):
        changed = tokens.copy()
        changed[list(places)] += 100
        changed.tofile(path)
        os.utime(path, ns=(time, time))
        return prepare(config(tmp_path), BYTES, silent)

    first = prepared()
    assert prepared().folder == first.folder
    later = prepared(time=2)
    assert later.folder != first.folder
    assert later.fingerprint == first.fingerprint  # the content is what counts
    # with the same length and time: at the ends and wherever a sample lies
    for places in ([0], [999_999], range(5000, 1_000_000, 2000)):
        other = prepared(places)
        assert other.folder != first.folder
        assert other.fingerprint != first.fingerprint


def test_the_fingerprint_is_of_ids_and_split(tmp_path):
    found = {
        prepare(config(tmp_path / str(i), pair(tmp_path / str(i), headed, *texts)), BYTES, silent).fingerprint
        for i, texts in enumerate(
            [
                (("one", "two"), ("three",)),
                (("one",), ("two", "three")),
                (("one", "twO"), ("three",)),
                (("two", "one"), ("three",)),
            ]
        )
    }
    assert len(found) == 4


def test_ids_that_do_not_fit_the_borders_are_named(tmp_path):
    pair(tmp_path)
    found = prepare(config(tmp_path), BYTES, silent)
    meta = json.loads((found.folder / "tokens.json").read_text())
    meta["tokens"]["train"] += 1
    (found.folder / "tokens.json").write_text(json.dumps({**meta, "sampled": {}, "digest": None}))
    borders = np.array([0, 4, 8, 15], dtype=np.int64)
    borders.tofile(found.folder / "train.offsets")
    with pytest.raises(ValueError, match=r"train\.offsets: is of 15 ids, and data\.path has 14; delete"):
        prepare(config(tmp_path), BYTES, silent)


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path, monkeypatch):
    path = pair(tmp_path) / "val.bin"
    shards = data.bins.shards_of

    def and_then_cut(config):
        found = shards(config)
        path.write_bytes(path.read_bytes()[:-4])
        return found

    monkeypatch.setattr(data.bins, "shards_of", and_then_cut)
    with pytest.raises(ValueError, match=r"val\.bin became shorter while it was read"):
        prepare(config(tmp_path), BYTES, silent)
    assert list((tmp_path / "cache").iterdir()) == []


def test_it_trains_and_is_measured_within_documents(tmp_path):
    from tests.trained import TINY, measure, run

    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdef ", k=60)) for _ in range(60)]
    for i in range(2):
        headed(tmp_path / "set" / f"w_train_{i}.bin", ids(*texts[20 * i : 20 * i + 20], end_first=True))
        headed(tmp_path / "set" / f"w_val_{i}.bin", ids(*texts[40 + 10 * i : 50 + 10 * i], end_first=True))
    settings = [setting for setting in TINY if setting != "data=files"]
    place = [f"data.path={tmp_path / 'set'}", f"data.cache={tmp_path / 'cache'}"]
    trainer = run(tmp_path / "run", *settings, "data=bin", *place)
    assert isinstance(trainer.files.train, Shards)
    assert isinstance(trainer.files.val, Shards)
    measure(f"runs=[{tmp_path / 'run'}]", "lengths=[16,32]", "documents=within", f"cache={tmp_path / 'cache'}")
    result = json.loads((tmp_path / "run" / "extrapolation.json").read_text())
    assert result["fingerprint"] == trainer.files.fingerprint
    assert [row["length"] for row in result["rows"]] == [16, 32]
    assert all(row["bits_per_byte"] > 0 for row in result["rows"])
