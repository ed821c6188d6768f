"""Data sets of the hub: a stand-in for its library, folders that the library reads alike, hand-written articles."""

import json
from dataclasses import replace

import datasets
import pytest

from data import DataConfig
from data.corpora import _articles, documents, identity
from tests.data.written import parquet, texts, whole


class Hub:
    """Stands in for `datasets.load_dataset_builder` and the builder: splits of rows, and a record of what was asked."""

    config = None

    def __init__(self, **splits):
        self.splits = splits
        self.asked = []

    def __call__(self, path, name=None, *, revision=None):
        self.source = (path, name)
        self.revision = revision
        return self

    def download_and_prepare(self):
        pass

    def as_dataset(self, split):
        self.asked.append((*self.source, split, self.revision))
        return self.splits[split]

    def as_streaming_dataset(self, split):
        return self.splits[split]


def hub_rows(*texts, column="text"):
    return [{column: text, "id": i} for i, text in enumerate(texts)]


def test_a_hub_data_set_without_a_validation_split(monkeypatch):
    hub = Hub(all=hub_rows("one", "two", column="body"))
    monkeypatch.setattr(datasets, "load_dataset_builder", hub)
    config = DataConfig("h", "hub", "o/h", subset="s", revision="r1", column="body", train_split="all")
    assert whole(config) == [(None, "one"), (None, "two")]
    assert hub.asked == [("o/h", "s", "all", "r1")]


def test_the_publishers_splits_are_kept(monkeypatch):
    hub = Hub(train=hub_rows("one", "two"), validation=hub_rows("three"), test=hub_rows("no"))
    monkeypatch.setattr(datasets, "load_dataset_builder", hub)
    config = DataConfig("h", "hub", "o/h", val_split="validation")
    assert whole(config) == [("train", "one"), ("train", "two"), ("val", "three")]


def test_articles_of_a_hub_data_set(monkeypatch):
    lines = ["", " = A = \n", " text\n", " = B = \n", " more\n"]
    monkeypatch.setattr(datasets, "load_dataset_builder", Hub(train=hub_rows(*lines), validation=hub_rows(*lines[3:])))
    config = DataConfig("h", "hub", "o/h", articles=True, val_split="validation")
    found = [(split, text) for split, text in whole(config) if text.strip()]
    assert found == [("train", " = A = \n text\n"), ("train", " = B = \n more\n"), ("val", " = B = \n more\n")]


def test_a_hub_data_set_with_another_column_names_it(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset_builder", Hub(train=hub_rows("one", column="content")))
    with pytest.raises(ValueError, match=r"data\.column='text': o/h has the columns content, id"):
        texts(DataConfig("h", "hub", "o/h"))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no route"),
        datasets.exceptions.DatasetNotFoundError("doesn't exist on the Hub"),
        ValueError("Unknown split"),
        RuntimeError("Dataset scripts are no longer supported"),
    ],
)
def test_an_unreachable_hub_data_set(monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(ValueError, match="stdlib and files need no network") as raised:
        texts(DataConfig("mine", "hub", "owner/set"))
    for part in ("data=mine", "owner/set", str(error)):
        assert part in str(raised.value)


def test_an_endless_stream_ends_after_so_many_documents(monkeypatch):
    def endless(split):
        yield from ({"text": f"{split} {i}"} for i in range(100))
        raise AssertionError("read on and on")

    hub = Hub(train=endless("train"), validation=endless("validation"))
    monkeypatch.setattr(hub, "as_dataset", None)
    monkeypatch.setattr(datasets, "load_dataset_builder", hub)
    config = DataConfig("h", "hub", "o/h", val_split="validation", streaming=True, max_documents=2)
    assert whole(config) == [
        ("train", "train 0"),
        ("train", "train 1"),
        ("val", "validation 0"),
        ("val", "validation 1"),
    ]


def test_articles_are_what_is_counted(monkeypatch):
    lines = [" = A = \n", " a\n", " = B = \n", " b\n", " b\n", " = C = \n"]
    monkeypatch.setattr(datasets, "load_dataset_builder", Hub(train=hub_rows(*lines)))
    config = DataConfig("h", "hub", "o/h", articles=True, max_documents=2)
    assert texts(config) == [" = A = \n a\n", " = B = \n b\n b\n"]


@pytest.mark.parametrize("most", [1, 5, 7, 99])
def test_streaming_reads_the_same_rows_and_keeps_no_copy(tmp_path, most):
    # a folder stands in for the hub; `datasets` reads both alike
    rows = [f"row {i} ü" for i in range(12)]
    for i in range(3):
        parquet(tmp_path / "set" / f"train-{i}.parquet", text=rows[4 * i : 4 * i + 4])
    config = DataConfig("h", "hub", str(tmp_path / "set"), max_documents=most)
    assert texts(replace(config, streaming=True)) == rows[:most]
    assert not list(tmp_path.rglob("*.arrow"))
    assert texts(config) == rows[:most]
    assert list(tmp_path.rglob("*.arrow"))
    assert identity(config) == identity(replace(config, streaming=True))  # so token files serve both


@pytest.mark.parametrize("streaming", [True, False])
def test_texts_beside_a_number_stay_as_they_are_or_are_an_error(tmp_path, streaming):
    # of itself, `datasets` makes JSON of all texts within 10 MB of the number: with quotes around them
    folder = tmp_path / "set"
    folder.mkdir()
    config = DataConfig("mine", "hub", str(folder), streaming=streaming, max_documents=200_000)
    rows = [json.dumps({"text": f"{i} " + "x" * 200}) + "\n" for i in range(60_000)]
    (folder / "train.jsonl").write_text("".join(rows))
    assert [text[:9] for text in texts(config)][-1] == "59999 xxx"
    (folder / "train.jsonl").write_text("".join([*rows, '{"text": 5}\n', '{"text": "y"}\n']))
    with pytest.raises(ValueError, match="data=mine: could not read"):
        texts(config)


def test_a_stream_that_breaks_off(monkeypatch):
    def broken():
        yield {"text": "one"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset_builder", Hub(train=broken()))
    found = documents(DataConfig("mine", "hub", "o/h", streaming=True, max_documents=9))
    assert next(found) == (None, ["one"])
    with pytest.raises(ValueError, match=r"data=mine: could not read o/h .*gone"):
        next(found)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "hub", "streaming": True}, r"data\.max_documents"),
        ({"kind": "files", "streaming": True, "max_documents": 3}, r"data\.streaming.*data\.kind=hub"),
        ({"kind": "hub", "max_documents": 0}, r"data\.max_documents=0: .*at least 1"),
        ({"kind": "bin", "max_documents": 5}, r"data\.max_documents=5"),
    ],
)
def test_settings_of_streams_that_do_not_fit(settings, words):
    with pytest.raises(ValueError, match=words):
        DataConfig("mine", path="x", **settings)


def test_articles_begin_at_titles_and_not_at_sections():
    first = [
        " = Valkyria Chronicles III = \n",
        "",
        " Senjō no Valkyria 3 is a game . \n",
        " = = Gameplay = = \n",
        "",
        " a = b = c \n",
        " = = = Missions = = = \n",
        " = = = = Deeper = = = = \n",
        " and its text . \n",
    ]
    second = [" = A = \n", " one letter \n"]
    third = [" = E = mc2 = \n", " = = B = = \n", " x = \n", " = y \n"]
    found = list(_articles(iter(first + second + third)))
    assert found == ["".join(first), "".join(second), "".join(third)]


def test_lines_before_the_first_title_are_kept():
    assert list(_articles(["before\n", " = A = \n", " a\n"])) == ["before\n", " = A = \n a\n"]
    assert list(_articles([" no title\n", " at all\n"])) == [" no title\n at all\n"]
    assert list(_articles([])) == []


def test_a_title_may_come_without_a_line_feed():
    assert list(_articles([" = A = ", " a", " = B = ", " b"])) == [" = A =  a", " = B =  b"]
