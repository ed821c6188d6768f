"""Token files, against documents joined by plain Python and files read by `struct`."""

import json
import os
import random
from itertools import chain, pairwise

import numpy as np
import pytest

import data.split
import data.tokens
from data import DataConfig, get_tokenizer, prepare
from tests.data.toys import BYTES, files, jsonl, numbers, silent, texts_of, toy, write


def some_documents(count, seed=0):
    """Different texts of 1 to 60 characters, in no order."""
    rng = random.Random(seed)
    letters = "abc xyz\n=<|endoftext|>ü漢\U0001f4bb"
    return [f"{i}:" + "".join(rng.choices(letters, k=rng.randrange(58))) for i in rng.sample(range(count), count)]


class Letters:
    """A tokenizer of one id a character, with a vocabulary of any size; its last id ends a document."""

    def __init__(self, vocab_size):
        self.name, self.vocab_size, self.end_of_document = f"letters{vocab_size}", vocab_size, vocab_size - 1

    def encode_to_arrays(self, texts):
        return [np.array([ord(character) % (self.vocab_size - 1) for character in text]) for text in texts]


def test_files_hold_the_documents_in_order(tmp_path):
    documents = some_documents(600)  # more than are tokenised at once
    found = prepare(toy(tmp_path, *documents, " \n", "", val_fraction=0.3), BYTES, silent)
    val = set(texts_of(found, "val"))
    assert len("".join(val).encode()) / len("".join(documents).encode()) == pytest.approx(0.3, rel=0.1)
    for split in ("train", "val"):
        kept = [[*text.encode("utf-8"), 256] for text in documents if (text in val) == (split == "val")]
        assert numbers(found.folder / f"{split}.bin", "H") == list(chain.from_iterable(kept))
        assert numbers(found.folder / f"{split}.offsets", "q") == [
            sum(map(len, kept[:i])) for i in range(len(kept) + 1)
        ]
        assert getattr(found, split).tolist() == list(chain.from_iterable(kept))
        assert (found.meta["tokens"][split], found.meta["documents"][split]) == (sum(map(len, kept)), len(kept))
    assert found.meta == json.loads((found.folder / "tokens.json").read_text(encoding="utf-8"))
    assert os.listdir(tmp_path / "cache") == [found.folder.name]
    with pytest.raises(ValueError, match="read-only"):
        found.train[0] = 1


@pytest.mark.parametrize(("vocab_size", "code"), [(256, "B"), (257, "H"), (65536, "H"), (65537, "I")])
def test_the_smallest_type_that_holds_the_vocabulary(tmp_path, vocab_size, code):
    largest = chr(vocab_size - 2)  # the last id but that of the end of a document
    found = prepare(toy(tmp_path, f"a{largest}b", f"c{largest}d", val_fraction=0.5), Letters(vocab_size), silent)
    ids = [97, vocab_size - 2, 98, vocab_size - 1], [99, vocab_size - 2, 100, vocab_size - 1]
    assert sorted(numbers(found.folder / f"{split}.bin", code) for split in ("train", "val")) == sorted(ids)
    assert found.train.tolist() in ids


def test_each_document_has_its_own_tokens(tmp_path):
    tokenizer = get_tokenizer("gpt2", 1000)  # to which it matters where a text is cut
    documents = [" the other one ".join(some_documents(40, seed)) for seed in range(9)]
    found = prepare(toy(tmp_path, *documents, val_fraction=0.2), tokenizer, silent)
    ids = [
        array[begin:end].tolist()
        for array, offsets in ((found.train, found.train_offsets), (found.val, found.val_offsets))
        for begin, end in pairwise(offsets)
    ]
    assert sorted(ids) == sorted([*ids, 999] for ids in tokenizer.encode(documents))


def test_the_publishers_splits_are_kept(monkeypatch, tmp_path):
    found = [("train", "one"), ("val", "two"), ("val", " "), ("train", "two"), ("val", "four")]
    monkeypatch.setattr(data.split, "documents", lambda config: iter(found))
    config = DataConfig("toy", "hub", "owner/toy", val_split="validation", cache=str(tmp_path))
    files = prepare(config, BYTES, silent)
    assert (texts_of(files, "train"), texts_of(files, "val")) == (["one", "two"], ["two", "four"])
    monkeypatch.setattr(data.split, "documents", lambda config: iter(found[1:3]))
    with pytest.raises(ValueError, match=r"data=toy \(owner/toy\): the train split holds no text"):
        prepare(DataConfig("toy", "hub", "owner/toy", val_split="other", cache=str(tmp_path)), BYTES, silent)


def test_what_is_prepared_anew(monkeypatch, tmp_path):
    said = []

    def prepared(text="an old text", time=1, names=("a.txt", "b.txt"), tokenizer=BYTES, **settings):
        for name in ("b.txt", "c.txt"):
            write(tmp_path / name, name)
        paths = [str(tmp_path / name) for name in names]
        write(tmp_path / "a.txt", text)
        for path in paths:
            os.utime(path, ns=(time, time))
        found = prepare(files(paths, cache=str(tmp_path / "cache"), **settings), tokenizer, said.append)
        assert sum(found.meta["tokens"].values()) >= len(text)
        return found.folder

    first = prepared()
    assert str(first) in said[0]
    others = [
        prepared(text="another, longer text"),
        prepared(text="a newer one", time=2),  # as long as the old
        prepared(names=["a.txt", "b.txt", "c.txt"]),
        prepared(split_seed=1),
        prepared(val_fraction=0.3),
        prepared(tokenizer=Letters(300)),
    ]
    assert len({first, *others}) == 7
    monkeypatch.setattr(data.split, "documents", None)  # it must not be read again
    said.clear()
    assert prepared() == first
    assert said == []


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.offsets", "val.offsets", "tokens.json"])
@pytest.mark.parametrize("change", [lambda raw: raw[:-2], lambda raw: raw[:-8], lambda raw: raw + b"12345678", None])
def test_a_damaged_folder_is_named(tmp_path, name, change):
    config = toy(tmp_path, *some_documents(30))
    path = prepare(config, BYTES, silent).folder / name
    raw = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(raw))
    with pytest.raises(ValueError, match=rf"{path.parent}: cannot be read .*; delete it"):
        prepare(config, BYTES, silent)


class Interrupted:
    """The bytes, and something that happens while they are tokenised."""

    name, vocab_size, end_of_document = BYTES.name, BYTES.vocab_size, BYTES.end_of_document

    def __init__(self, happen):
        self.happen = happen

    def encode_to_arrays(self, texts):
        self.happen()
        return BYTES.encode_to_arrays(texts)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_preparation_leaves_nothing(tmp_path, error):
    def stop():
        raise error

    config = toy(tmp_path, *some_documents(30))
    words = r"data\.cache=.*No space left.*data\.cache=<folder>" if isinstance(error, OSError) else None
    with pytest.raises(type(error), match=words):
        prepare(config, Interrupted(stop), silent)
    assert os.listdir(tmp_path / "cache") == []
    with pytest.raises(OSError, match=r"data\.cache=/dev/null/x: could not write"):
        prepare(files(jsonl(tmp_path / "a.jsonl", "one", "two"), cache="/dev/null/x"), BYTES, silent)


def test_of_two_preparations_at_once_the_first_to_finish_is_kept(tmp_path):
    config, first = toy(tmp_path, *some_documents(30)), []
    second = prepare(config, Interrupted(lambda: first.append(prepare(config, BYTES, silent))), silent)
    assert second.folder == first[0].folder
    assert second.train.tolist() == first[0].train.tolist()
    assert os.listdir(tmp_path / "cache") == [second.folder.name]
