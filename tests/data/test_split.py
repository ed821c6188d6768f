"""Which documents are held out, against pieces cut by plain Python."""

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml

import data.overlap
import data.split
from data import DataConfig, prepare
from data.overlap import group_duplicates, measure_overlap
from data.split import hold_out
from tests.data.toys import BYTES, files, silent, texts_of, toy, write


def words(rng, size):
    """A text of `size` bytes, whose 32-byte pieces occur nowhere else."""
    return "".join(rng.choices("abcdefgh ijklm\nnop", k=size))


def pieces(text):
    raw = text.encode().ljust(32, b"\0")
    return {raw[i : i + 32] for i in range(len(raw) - 31)}


def near(one, other):
    one, other = pieces(one), pieces(other)
    return len(one & other) > min(len(one), len(other)) / 2


def some_families(seed):
    """Documents of 20 to 900 bytes; of most there are others that share more, or less, than half of their text."""
    rng, documents = random.Random(seed), []
    for _ in range(25):
        text = words(rng, rng.randrange(20, 600))
        documents.append(text)
        for _ in range(rng.randrange(3)):
            begin, size = rng.randrange(len(text)), rng.randrange(len(text) // 3, len(text))
            documents.append(words(rng, rng.randrange(200)) + text[begin : begin + size])
    return rng.sample(documents, len(documents))


def spool(path, documents):
    write(path, "".join(documents))
    return path, [len(text.encode()) for text in documents]


@pytest.mark.parametrize("seed", range(4))
def test_near_duplicates_are_on_one_side(tmp_path, seed):
    documents = some_families(seed)
    pairs = [pair for pair in combinations(range(len(documents)), 2) if near(*(documents[i] for i in pair))]
    assert len(pairs) > 5
    expected = list(range(len(documents)))
    for one, other in pairs:
        expected = [expected[one] if group == expected[other] else group for group in expected]
    groups = group_duplicates(*spool(tmp_path / "spool", documents)).tolist()
    for one, other in combinations(range(len(documents)), 2):
        assert (groups[one] == groups[other]) == (expected[one] == expected[other])
    found = prepare(toy(tmp_path, *documents, val_fraction=0.4, split_seed=seed), BYTES, silent)
    val = set(texts_of(found, "val"))
    assert all((documents[one] in val) == (documents[other] in val) for one, other in pairs)
    size = len("".join(documents))
    assert len(found.val) - len(found.val_offsets) + 1 == pytest.approx(0.4 * size, rel=0.1)


@pytest.mark.parametrize(("share", "grouped"), [(0.4, False), (0.6, True)])
def test_long_documents_are_compared_by_a_sample(tmp_path, share, grouped):
    rng = random.Random(0)
    text = words(rng, 150_000)  # more than are hashed at once
    other = words(rng, 40_000) + text[: round(share * 150_000)] + words(rng, 200_000)
    groups = group_duplicates(*spool(tmp_path / "spool", [words(rng, 9), text, words(rng, 5000), other]))
    assert (groups[1] == groups[3]) == grouped
    assert len(set(groups.tolist())) == 4 - grouped


def test_a_piece_that_many_have_joins_all_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr(data.overlap, "OWNERS", 4)
    rng = random.Random(0)
    common = words(rng, 300)
    documents = [words(rng, rng.randrange(100, 250)) + common for _ in range(40)]
    documents += [words(rng, 300) for _ in range(3)] + [common[:150]]
    groups = group_duplicates(*spool(tmp_path / "spool", documents)).tolist()
    assert len(set(groups[:40] + groups[-1:])) == 1
    assert len(set(groups)) == 4


def test_how_much_of_the_validation_text_is_covered(tmp_path):
    documents = [*some_families(9), "short", "short", "shorter", "漢" * 30]
    splits = random.Random(1).choices(["train", "val"], k=len(documents))
    splits[-4:] = ["train", "val", "val", "val"]
    known = set().union(*(pieces(text) for text, split in zip(documents, splits, strict=True) if split == "train"))
    covered = size = 0
    for text, split in zip(documents, splits, strict=True):
        raw = text.encode()
        if split == "val":
            size += len(raw)
            begins = [i for i in range(max(1, len(raw) - 31)) if raw[i : i + 32].ljust(32, b"\0") in known]
            covered += len({j for i in begins for j in range(i, min(i + 32, len(raw)))})
    assert 0.1 < covered / size < 0.9
    found = measure_overlap(*spool(tmp_path / "spool", documents), splits)
    assert found == {"val_covered": covered / size, "val_covered_of_train": 1.0}


def test_large_splits_are_covered_by_samples(monkeypatch, tmp_path):
    monkeypatch.setattr(data.overlap, "VAL_MOST", 20_000)
    monkeypatch.setattr(data.overlap, "TRAIN_MOST", 25_000)
    rng = random.Random(0)
    train = [words(rng, 500) for _ in range(100)]
    documents = [text for one in train for text in (one, rng.choice([one, words(rng, 500)]))]
    found = measure_overlap(*spool(tmp_path / "spool", documents), ["train", "val"] * 100)
    assert found["val_covered_of_train"] == 0.5  # and so about half of what is covered is seen to be
    assert found["val_covered"] == pytest.approx(0.25, abs=0.1)


def test_the_covered_share_is_said_and_kept(tmp_path):
    rng = random.Random(0)
    shared, said = words(rng, 132), []
    documents = [shared + words(rng, 300) for _ in range(20)]  # 132 of 432 bytes: less than half, so no duplicates
    found = prepare(toy(tmp_path, *documents, val_fraction=0.2), BYTES, said.append)
    assert found.meta["val_covered"] == pytest.approx(132 / 432, abs=0.005)
    assert f"{found.meta['val_covered']:.1%} of the validation text" in said[-1]


def test_a_book_and_a_note(tmp_path):
    rng = random.Random(0)
    book, note = words(rng, 287_000) + "漢字ü" * 125, words(rng, 356)
    paths = [write(tmp_path / "book.txt", book), write(tmp_path / "note.txt", note)]
    found = prepare(files(paths, cache=str(tmp_path / "cache")), BYTES, silent)
    train, val = texts_of(found, "train"), texts_of(found, "val")
    assert (train[0] + val[0], train[1:] + val[1:]) == (book, [note])
    assert sum(len(text.encode()) for text in val) / 288_356 == pytest.approx(0.05, rel=0.001)


@pytest.mark.parametrize("fraction", [0.05, 0.9])
@pytest.mark.parametrize("text", ["0123456789" * 2, "naïve 漢字, \U0001f4bb and so on\n" * 9])
def test_the_end_of_a_single_document_is_held_out(tmp_path, text, fraction):
    found = prepare(toy(tmp_path, "", text, "  ", val_fraction=fraction), BYTES, silent)
    (train,), (val,) = texts_of(found, "train"), texts_of(found, "val")
    assert train + val == text
    assert 0 <= len(val.encode()) - fraction * len(text.encode()) < 4  # bytes of a character


def test_the_held_out_documents_are_drawn(tmp_path):
    documents = [words(random.Random(i), 50) for i in range(40)]
    drawn = [
        set(texts_of(prepare(toy(tmp_path, *documents, split_seed=seed), BYTES, silent), "val")) for seed in range(15)
    ]
    assert {len(val) for val in drawn} == {2}
    assert len(set.union(*drawn)) > 10  # 30 draws from 40: 21 on average, 2 if the seed did nothing
    again = prepare(toy(tmp_path, *documents[::-1]), BYTES, silent)  # wherever they stand
    assert set(texts_of(again, "val")) == drawn[0]


def test_a_few_large_documents_are_not_drawn_where_others_are_enough():
    sizes, rng = [100] * 300 + [2000] * 5, np.random.default_rng(0)
    for seed in range(20):
        digests = [rng.bytes(16) for _ in sizes]
        held_out = hold_out(sizes, digests, np.arange(305), 0.1, seed)
        assert held_out.tolist()[300:] == [0] * 5
        assert set(held_out.tolist()) == {0, 100}
        assert held_out.sum() == 4000
    held_out = hold_out(sizes, digests, np.arange(305), 0.5, 0)  # more than the others can give
    assert any(held_out[300:])
    assert held_out.sum() == pytest.approx(20_000, rel=0.1)


def test_documents_that_are_all_alike(tmp_path):
    text, said = words(random.Random(0), 300), []
    found = prepare(toy(tmp_path, *(f"{i:02d}{text}" for i in range(20))), BYTES, said.append)
    assert len(found.val_offsets) == 2
    assert any("near-duplicates of each other" in line for line in said)
    assert found.meta["val_covered"] > 0.99


@pytest.mark.parametrize("labelled", [False, True])
def test_tuning_leaves_the_validation_documents_out(tmp_path, monkeypatch, labelled):
    rng = random.Random(2)
    documents = [words(rng, 200) for _ in range(40)]
    if labelled:
        found = [("val" if i % 4 == 0 else "train", text) for i, text in enumerate(documents)]
        monkeypatch.setattr(data.split, "documents", lambda config: found)
    plain, tuning = (
        prepare(toy(tmp_path, *documents, val_fraction=0.2, tuning=on), BYTES, silent) for on in (False, True)
    )
    held_out, chosen_by = set(texts_of(plain, "val")), set(texts_of(tuning, "val"))
    assert held_out | set(texts_of(plain, "train")) == set(documents)
    assert chosen_by | set(texts_of(tuning, "train")) == set(documents) - held_out
    assert 3 <= len(chosen_by) <= 9
    assert chosen_by.isdisjoint(texts_of(tuning, "train"))


@pytest.mark.parametrize(
    ("documents", "message"),
    [(["", " \n"], "holds no text at all"), (["a"], "train split"), (["same"] * 5, "val split")],
)
def test_a_corpus_that_cannot_be_split(tmp_path, documents, message):
    with pytest.raises(ValueError, match=rf"data=mine \(.*\): .*{message}"):
        prepare(toy(tmp_path, *documents), BYTES, silent)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_stdlib_has_a_hundred_validation_documents_and_no_encodings(tmp_path):
    settings = yaml.safe_load((Path(__file__).parents[2] / "configs/data/stdlib.yaml").read_text())
    found = prepare(DataConfig(**settings, cache=str(tmp_path)), BYTES, silent)
    assert found.meta["documents"]["val"] >= 100
    assert found.meta["val_covered"] < 0.35
    ends = np.split(found.val[:], found.val_offsets[1:-1])
    assert not any(b"Python Character Mapping Codec" in bytes(ids[:-1].astype(np.uint8)) for ids in ends)
