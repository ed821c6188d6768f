"""Data sets of the hub: folders, which `datasets` reads alike, a stand-in for its library, hand-written articles."""

from dataclasses import replace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data import DataConfig
from data.corpora import documents
from tests.data.toys import files, jsonl, texts


class Hub:
    """Stands in for `datasets.load_dataset`: splits of rows, and a record of what was asked."""

    def __init__(self, **splits):
        self.splits = splits

    def __call__(self, path, name=None, *, revision=None, split=None, streaming=False):
        self.asked = (path, name, revision)
        return self.splits[split]


def rows(*texts):
    return [{"body": text, "id": i} for i, text in enumerate(texts)]


def use(monkeypatch, **splits):
    hub = Hub(**splits)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    return hub, DataConfig("h", "hub", "o/h", subset="s", revision="r1", column="body")


def test_the_publishers_splits_are_kept(monkeypatch):
    hub, config = use(monkeypatch, all=rows("one", "two", "three"), validation=rows("four"))
    config = replace(config, train_split="all")
    assert list(documents(config)) == [(None, "one"), (None, "two"), (None, "three")]
    assert hub.asked == ("o/h", "s", "r1")
    found = list(documents(replace(config, val_split="validation", max_documents=2)))
    assert found == [("train", "one"), ("train", "two"), ("val", "four")]


def test_a_stream_is_read_no_further_than_asked(monkeypatch):
    def endless():
        yield from rows("one", "two")
        raise AssertionError("read on and on")

    _, config = use(monkeypatch, train=endless())
    assert texts(replace(config, streaming=True, max_documents=2)) == ["one", "two"]


@pytest.mark.parametrize("most", [1, 5, 99])
def test_streaming_reads_the_same_rows_and_keeps_no_copy(tmp_path, most):
    found = [f"row {i} ü" for i in range(8)]
    for i in range(2):
        path = tmp_path / "set" / f"train-{i}.parquet"
        path.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": found[4 * i : 4 * i + 4]}), path)
    config = DataConfig("h", "hub", str(tmp_path / "set"), max_documents=most)
    assert texts(replace(config, streaming=True)) == found[:most]
    assert not list(tmp_path.rglob("*.arrow"))
    assert texts(config) == found[:most]


@pytest.mark.parametrize("error", [ConnectionError("no route"), RuntimeError("scripts are no longer supported")])
def test_an_unreachable_data_set_says_what_needs_no_network(monkeypatch, error):
    def broken():
        yield rows("one")[0]
        raise error

    _, config = use(monkeypatch, train=broken())
    found = documents(config)
    assert next(found) == (None, "one")
    with pytest.raises(ValueError, match=rf"data=h: could not read o/h .*{error}.*data=stdlib needs no network"):
        next(found)


def test_rows_of_wikitext_become_articles_at_titles_and_not_at_sections(monkeypatch, tmp_path):
    articles = [
        ["before the first title\n"],
        [" = Valkyria Chronicles III = \n", "", " Text . \n", " = = Play = = \n", " a = b = c \n", " = = = M = = = \n"],
        [" = A = ", " one letter, and no line feed"],
        [" = E = mc2 = \n", " = = B = = \n", " x = \n", " = y \n"],
    ]
    lines = [line for article in articles for line in article]
    _, config = use(monkeypatch, train=rows(*lines))
    config = replace(config, articles=True)
    assert texts(files(jsonl(tmp_path / "a.jsonl", *lines), articles=True)) == texts(config)
    assert texts(config) == ["".join(article) for article in articles]
    assert texts(replace(config, max_documents=2)) == ["".join(article) for article in articles[:2]]
