"""Token files, against documents joined by plain Python and files read by `struct`."""

import hashlib
import json
import os
import random
import re
import shutil
import tracemalloc
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

import data.tokens
from data import DataConfig, get_tokenizer, prepare
from data.tokenizers import parts
from data.tokens import Part, _batches, _digest, smallest_dtype
from tests.data.toys import BYTES, forbid_reading, give, read, silent, some_documents, texts_of, toy


class Letters:
    """A tokenizer of one id a character, with a vocabulary of any size; its last id ends a document."""

    def __init__(self, vocab_size):
        self.name = f"letters{vocab_size}"
        self.vocab_size = vocab_size
        self.end_of_document = vocab_size - 1

    def encode_to_arrays(self, texts):
        return [np.array([ord(character) % (self.vocab_size - 1) for character in text]) for text in texts]


def joined(texts):
    """Ids of bytes and offsets, as they should be."""
    documents = [[*text.encode("utf-8"), 256] for text in texts]
    offsets = [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]
    return list(chain.from_iterable(documents)), offsets


@pytest.mark.parametrize(("fraction", "held_out"), [(0.001, 1), (0.05, 15), (0.5, 150), (0.999, 299)])
def test_files_hold_the_documents_in_order(monkeypatch, tmp_path, fraction, held_out):
    documents = some_documents(300)  # more than are tokenised at once
    give(monkeypatch, documents)
    found = prepare(toy(tmp_path, val_fraction=fraction), BYTES, silent)
    val = set(texts_of(found, "val"))
    assert len(val) == held_out
    expected = {
        "train": joined([text for text in documents if text not in val]),
        "val": joined([text for text in documents if text in val]),
    }
    for split, (ids, offsets) in expected.items():
        assert read(found.folder / f"{split}.bin", "H") == ids
        assert read(found.folder / f"{split}.offsets", "q") == offsets
        assert getattr(found, split).tolist() == ids
        assert getattr(found, f"{split}_offsets").tolist() == offsets


def test_description(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(30))
    config = toy(tmp_path)
    found = prepare(config, BYTES, silent)
    meta = json.loads((found.folder / "tokens.json").read_text(encoding="utf-8"))
    assert meta == found.meta
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ("bytes", 257, "uint16")
    assert meta["tokens"] == {"train": len(found.train), "val": len(found.val)}
    assert meta["documents"] == {"train": len(found.train_offsets) - 1, "val": len(found.val_offsets) - 1}
    assert meta["data"]["path"] == "owner/toy"
    assert meta["data"]["val_fraction"] == 0.05
    assert {path.name for path in found.folder.iterdir()} == {
        "tokens.json", "train.bin", "train.offsets", "val.bin", "val.offsets"
    }  # fmt: skip
    assert found.folder.parent == tmp_path / "cache"


def test_arrays_cannot_be_written_to(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(30))
    found = prepare(toy(tmp_path), BYTES, silent)
    for array in (found.train, found.val, found.train_offsets, found.val_offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_files_through_datasets(tmp_path):
    texts = {"b.txt": "one\n", "a 1.txt": "two ünï", "c.txt": "three\n\n", "d.txt": "\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = DataConfig("my own: texts/", "files", [str(tmp_path / name) for name in texts], cache=str(tmp_path / "c"))
    found = prepare(config, BYTES, silent)
    val = texts_of(found, "val")
    assert len(val) == 1
    assert texts_of(found, "train") == [text for text in ("one\n", "two ünï", "three\n\n") if text not in val]
    assert found.folder.parent == tmp_path / "c"  # whatever the characters of its name


@pytest.mark.parametrize(
    ("vocab_size", "name", "code"),
    [(256, "uint8", "B"), (257, "uint16", "H"), (65536, "uint16", "H"), (65537, "uint32", "I")],
)
def test_the_smallest_type_that_holds_the_vocabulary(monkeypatch, tmp_path, vocab_size, name, code):
    assert smallest_dtype(vocab_size) == np.dtype(name)
    largest = chr(vocab_size - 2)  # the last id but that of the end of a document
    give(monkeypatch, [("train", f"a{largest}b"), ("val", largest)])
    found = prepare(toy(tmp_path), Letters(vocab_size), silent)
    assert read(found.folder / "train.bin", code) == [97, vocab_size - 2, 98, vocab_size - 1]
    assert read(found.folder / "val.bin", code) == [vocab_size - 2, vocab_size - 1]
    assert found.train.dtype == np.dtype(name)


@pytest.mark.parametrize("seed", range(5))
def test_duplicates_stay_together(monkeypatch, tmp_path, seed):
    documents = [text for i, text in enumerate(some_documents(40)) for _ in range(1 + i % 4)]
    random.Random(seed).shuffle(documents)
    give(monkeypatch, documents)
    found = prepare(toy(tmp_path, val_fraction=0.4, split_seed=seed), BYTES, silent)
    train, val = texts_of(found, "train"), texts_of(found, "val")
    assert len(set(val)) == 16  # of the 40 texts
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(documents)


def test_the_held_out_documents_are_drawn(monkeypatch, tmp_path):
    documents = some_documents(40)
    give(monkeypatch, documents)
    drawn = [texts_of(prepare(toy(tmp_path, split_seed=seed), BYTES, silent), "val") for seed in range(15)]
    assert len(set(chain.from_iterable(drawn))) > 10  # 30 draws from 40: 21 on average, 2 if the seed did nothing
    # which ones does not depend on where they stand
    give(monkeypatch, documents[::-1])
    again = prepare(DataConfig("toy", "hub", "owner/reversed", cache=str(tmp_path / "cache")), BYTES, silent)
    assert texts_of(again, "val") == drawn[0][::-1]


@pytest.mark.parametrize("fraction", [0.003, 0.3])
def test_the_drawing_and_the_fingerprint_are_what_they_always_were(monkeypatch, tmp_path, fraction):
    # files and runs of former versions are found, and resumed, by them
    documents = [text for i, text in enumerate(some_documents(300)) for _ in range(1 + i % 3)]
    give(monkeypatch, documents)
    found = prepare(toy(tmp_path, val_fraction=fraction, split_seed=7), BYTES, silent)
    digest = {text: hashlib.blake2b(text.encode(), digest_size=16).digest() for text in documents}
    drawn = sorted(set(digest.values()), key=lambda one: hashlib.blake2b(b"7" + one).digest())
    held_out = set(drawn[: round(fraction * 300)])
    assert texts_of(found, "val") == [text for text in documents if digest[text] in held_out]
    labelled = [(b"val" if digest[text] in held_out else b"train") + digest[text] for text in documents]
    assert found.fingerprint == hashlib.sha256(b"".join(labelled)).hexdigest()[:16]


def test_long_documents_are_tokenised_in_parts(monkeypatch, tmp_path):
    tokenizer = get_tokenizer("gpt2", 1000)  # to which it matters where a text is cut
    documents = [" the other one ".join(some_documents(40, seed)) for seed in range(9)]
    give(monkeypatch, documents)
    longest = []

    class Watched:
        name, vocab_size, end_of_document = tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_document

        def encode_to_arrays(self, texts):
            longest.append(max(map(len, texts)))
            return tokenizer.encode_to_arrays(texts)

    monkeypatch.setattr(data.tokens, "parts", lambda blocks: parts(blocks, 50))
    found = prepare(toy(tmp_path), Watched(), silent)
    assert max(longest) < 200 < min(map(len, documents))
    expected = [[*ids, 999] for ids in tokenizer.encode(documents)]
    cut = [
        array[begin:end].tolist()
        for array, offsets in ((found.train, found.train_offsets), (found.val, found.val_offsets))
        for begin, end in pairwise(offsets)
    ]
    assert sorted(cut) == sorted(expected)


def test_batches_hold_neither_many_documents_nor_much_text():
    def sizes(*lengths):
        found = (Part(None, "x" * length, ends=True) for length in lengths)
        return [[len(part.text) for part in batch] for batch in _batches(found, most=3, characters=100)]

    assert sizes(1, 1, 1, 1, 1) == [[1, 1, 1], [1, 1]]
    assert sizes(60, 60, 1, 200, 1) == [[60, 60], [1, 200], [1]]
    assert sizes() == []


def test_a_document_costs_few_bytes_of_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(data.tokens, "documents", lambda config: ((None, [f"{i}"]) for i in range(10_000)))
    prepare(toy(tmp_path / "first", max_documents=1), BYTES, silent)  # for what is made only once
    tracemalloc.start()
    prepare(toy(tmp_path, val_fraction=0.3), BYTES, silent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / 10_000 < 250


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_both_splits_of_two_documents_hold_one(monkeypatch, tmp_path, fraction):
    give(monkeypatch, ["one", "two"])
    found = prepare(toy(tmp_path, val_fraction=fraction), BYTES, silent)
    assert sorted(texts_of(found, "train") + texts_of(found, "val")) == ["one", "two"]
    assert len(texts_of(found, "val")) == 1


def test_blank_documents_are_dropped(monkeypatch, tmp_path):
    give(monkeypatch, ["", "one", " ", "\n\t\n", "two ", "\u3000", " three"])
    found = prepare(toy(tmp_path), BYTES, silent)
    assert sorted(texts_of(found, "train") + texts_of(found, "val")) == [" three", "one", "two "]


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
@pytest.mark.parametrize(
    "text", ["0123456789", "naïve 漢字, \U0001f4bb and so on\n" * 9, "blank at the end" + "\n" * 40]
)
def test_the_end_of_a_single_document_is_held_out(monkeypatch, tmp_path, text, fraction):
    give(monkeypatch, ["", text * 2, "  "])
    found = prepare(toy(tmp_path, val_fraction=fraction), BYTES, silent)
    (train,), (val,) = texts_of(found, "train"), texts_of(found, "val")
    assert train + val == text * 2
    assert len(val) == pytest.approx(fraction * len(text) * 2, abs=0.5)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "holds no text at all"),
        (["", " \n"], "holds no text at all"),
        (["a"], "too short to hold out"),
        (["same"] * 5, "5 documents are the same text"),
        ([("train", "one"), ("train", "two")], "the val split holds no text"),
        ([("val", "one"), ("train", " ")], "the train split holds no text"),
    ],
)
def test_a_corpus_that_cannot_be_split(monkeypatch, tmp_path, documents, message):
    give(monkeypatch, documents)
    with pytest.raises(ValueError, match=rf"data=toy \(owner/toy\).*{message}"):
        prepare(toy(tmp_path), BYTES, silent)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_publishers_splits_are_kept(monkeypatch, tmp_path):
    documents = [("train", "one"), ("val", "two"), ("val", " "), ("train", "two"), ("train", "three"), ("val", "four")]
    give(monkeypatch, documents)
    found = prepare(toy(tmp_path, val_split="validation", val_fraction=0.9), BYTES, silent)
    assert texts_of(found, "train") == ["one", "two", "three"]
    assert texts_of(found, "val") == ["two", "four"]


def test_a_second_preparation_does_no_work(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(30))
    said = []
    first = prepare(toy(tmp_path), BYTES, said.append)
    assert len(said) == 2
    assert str(first.folder) in said[0]
    count = len(first.train) + len(first.val)
    assert re.fullmatch(rf"tokenised {count:,} tokens in [0-9.]+ s, [0-9,]+ tokens/s", said[1])
    forbid_reading(monkeypatch)
    second = prepare(toy(tmp_path), get_tokenizer("bytes"), said.append)
    assert len(said) == 2
    assert second.folder == first.folder
    assert second.train.tolist() == first.train.tolist()


def test_what_makes_other_files(tmp_path):
    path = tmp_path / "a.txt"
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text(name)

    def prepared(text="an old text", mtime=1, names=("a.txt", "b.txt"), tokenizer=BYTES, **settings):
        path.write_text(text)
        os.utime(path, ns=(mtime, mtime))
        places = [str(tmp_path / name) for name in names]
        found = prepare(
            DataConfig("mine", "files", places, cache=str(tmp_path / "cache"), **settings), tokenizer, silent
        )
        assert text in "".join(map(chr, [*found.train, *found.val]))
        return found.folder

    first = prepared()
    others = [
        prepared(text="another, longer text"),
        prepared(text="a newer one", mtime=2),  # as long as the old
        prepared(names=["a.txt", "b.txt", "c.txt"]),
        prepared(split_seed=1),
        prepared(val_fraction=0.3),
        prepared(tokenizer=Letters(300)),
    ]
    assert len({first, *others}) == 7
    assert prepared() == first
    assert sorted((tmp_path / "cache").iterdir()) == sorted([first, *others])


def test_the_fingerprint_is_of_the_text_and_its_split(monkeypatch, tmp_path):
    documents = some_documents(60)

    def fingerprint(place, documents, tokenizer=BYTES, **settings):
        give(monkeypatch, documents)
        return prepare(toy(tmp_path / place, **settings), tokenizer, silent).fingerprint

    first = fingerprint("a", documents)
    assert first == fingerprint("b", documents) == fingerprint("a", documents, Letters(70000))
    assert first == fingerprint("c", [*documents[:7], " \n", *documents[7:]])  # blank documents are none
    others = [
        fingerprint("d", documents[:-1]),
        fingerprint("e", [*documents[:-1], documents[-1] + "."]),
        fingerprint("f", [*documents, documents[0]]),
        fingerprint("g", documents[::-1]),
        fingerprint("a", documents, split_seed=1),
        fingerprint("a", documents, val_fraction=0.1),
        fingerprint("h", [("train", text) for text in documents[:-1]] + [("val", documents[-1])]),
    ]
    assert len({first, *others}) == 8


def damage(folder, name, change):
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if (content := change(content)) is not None:
        path.write_bytes(content)
    return path


def rewritten(change):
    """Another description, with the digest that belongs to it, as somebody would write who knows how."""

    def rewrite(content):
        about = json.loads(content)
        change(about)
        return json.dumps({**about, "digest": _digest(about)}).encode()

    return rewrite


def described(**changes):
    return rewritten(lambda about: about.update(changes))


def without(key):
    return rewritten(lambda about: about.pop(key))


def counted(key, number):
    return rewritten(lambda about: about[key].update(val=number))


DESCRIPTION = ["tokenizer", "vocab_size", "dtype", "corpus", "fingerprint", "tokens", "documents"]
ODD_NUMBERS = [0, -5, 2.0, float("nan"), float("inf"), True, None, "2", [2]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train.bin", lambda content: content[:-1]),
        ("train.bin", lambda content: content[:-2]),
        ("val.bin", lambda content: content + b"\0\0"),
        ("val.bin", lambda content: b""),
        ("train.bin", lambda content: None),
        ("train.offsets", lambda content: None),
        ("val.offsets", lambda content: None),
        ("val.offsets", lambda content: content[:-8]),
        ("tokens.json", lambda content: None),
        ("tokens.json", lambda content: b""),
        ("tokens.json", lambda content: content[: len(content) // 2]),
        ("tokens.json", lambda content: b"\xff\xfe"),
        ("tokens.json", lambda content: b"[]"),
        ("tokens.json", lambda content: b"{}"),
        ("tokens.json", described(dtype="words")),
        ("tokens.json", described(tokens=None)),
        ("tokens.json", described(documents={"train": 1})),
        ("tokens.json", lambda content: b"null"),
        ("tokens.json", lambda content: re.sub(rb'("fingerprint": "....).', rb"\1x", content)),
        ("tokens.json", lambda content: b"[" * 100_000),
        *(("tokens.json", without(key)) for key in DESCRIPTION),
        *(("tokens.json", described(**{key: value})) for key in DESCRIPTION for value in (None, [], {"train": "val"})),
        *(("tokens.json", counted("tokens", number)) for number in ODD_NUMBERS),
        *(("tokens.json", counted("documents", number)) for number in ODD_NUMBERS),
        ("tokens.json", described(tokens={"train": 1, "val": 1, "test": 1})),
        ("tokens.json", described(dtype="uint32")),
        ("tokens.json", described(dtype="object")),
        ("tokens.json", described(sampled=[])),
        ("train.bin", lambda content: content[:20] + bytes([content[20] ^ 4]) + content[21:]),
        ("val.bin", lambda content: content[::-1]),
        ("val.bin", lambda content: b"\xff" * len(content)),
        ("train.offsets", lambda content: content[:8] + b"\xff" * 8 + content[16:]),
        ("train.offsets", lambda content: content[:8] + content[16:24] + content[8:16] + content[24:]),  # not in order
        ("train.offsets", lambda content: content[:8] + content[16:24] + content[16:]),  # an empty document
        ("val.offsets", lambda content: content[8:] + content[:8]),
    ],
)
def test_a_damaged_file_is_named_and_the_way_out_works(monkeypatch, tmp_path, name, change):
    give(monkeypatch, some_documents(30))
    found = prepare(toy(tmp_path), BYTES, silent)
    expected = found.train.tolist()
    path = damage(found.folder, name, change)
    with pytest.raises(ValueError, match="delete") as raised:
        prepare(toy(tmp_path), BYTES, silent)
    assert str(path) in str(raised.value)
    shutil.rmtree(found.folder)
    assert prepare(toy(tmp_path), BYTES, silent).train.tolist() == expected


@pytest.mark.parametrize("name", ["train.offsets", "val.offsets"])
@pytest.mark.parametrize(
    "borders", [(0, 0, 0), (0, 1, 0), (0, -1, 0), (0, 1000, 0), (0, 2**62, 0), (0, 3, 1), (0, 3, -1), (1, 3, 0)]
)
def test_borders_that_cannot_be_are_refused_without_samples_too(monkeypatch, tmp_path, name, borders):
    give(monkeypatch, ["one", "two", "three", "four"])
    found = prepare(toy(tmp_path, val_fraction=0.5), BYTES, silent)  # two documents a split
    length = len(getattr(found, name.split(".")[0]))
    borders = np.array([borders[0], borders[1] if borders[1] != 1 else length, length + borders[2]], dtype=np.int64)
    borders.tofile(found.folder / name)
    damage(found.folder, "tokens.json", without("sampled"))
    with pytest.raises(ValueError, match=rf"{name}: does not fit .*delete"):
        prepare(toy(tmp_path, val_fraction=0.5), BYTES, silent)


@pytest.mark.parametrize("key", ["tokens", "documents"])
@pytest.mark.parametrize("number", [1, 3, 10**30])
def test_numbers_that_do_not_fit_the_files(monkeypatch, tmp_path, key, number):
    give(monkeypatch, some_documents(30))
    found = prepare(toy(tmp_path), BYTES, silent)
    damage(found.folder, "tokens.json", counted(key, number))
    with pytest.raises(ValueError, match=r"val\.offsets: .*delete"):
        prepare(toy(tmp_path), BYTES, silent)


def test_former_token_files_are_opened(monkeypatch, tmp_path):
    give(monkeypatch, some_documents(30))
    expected = prepare(toy(tmp_path), BYTES, silent)
    about = json.loads((expected.folder / "tokens.json").read_text())
    former = {key: value for key, value in about.items() if key not in ("sampled", "digest")}
    (expected.folder / "tokens.json").write_text(json.dumps(former))
    forbid_reading(monkeypatch)
    assert prepare(toy(tmp_path), BYTES, silent).train.tolist() == expected.train.tolist()


@pytest.mark.parametrize("outside", ["/etc/passwd", "../secret.bin", "secret.bin"])
def test_a_description_cannot_have_other_files_read(monkeypatch, tmp_path, outside):
    give(monkeypatch, some_documents(30))
    found = prepare(toy(tmp_path), BYTES, silent)
    expected = found.train.tolist()
    (tmp_path / "cache" / "secret.bin").write_bytes(bytes(2 * len(expected)))
    shards = {split: [[outside, 0, len(getattr(found, split))]] for split in ("train", "val")}
    damage(found.folder, "tokens.json", described(shards=shards))
    again = prepare(toy(tmp_path), BYTES, silent)
    assert again.train.tolist() == expected
    assert Path(again.train.filename) == found.folder / "train.bin"


@pytest.mark.parametrize("changes", [{"tokenizer": "gpt2", "vocab_size": 50257}, {"vocab_size": 258}])
def test_files_of_another_tokenizer_are_refused(monkeypatch, tmp_path, changes):
    give(monkeypatch, some_documents(30))
    found = prepare(toy(tmp_path), BYTES, silent)
    damage(found.folder, "tokens.json", described(**changes))
    with pytest.raises(ValueError, match=r"bytes \(257\)") as raised:
        prepare(toy(tmp_path), BYTES, silent)
    assert str(found.folder) in str(raised.value)
    assert str(changes["vocab_size"]) in str(raised.value)
