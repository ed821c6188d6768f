"""Kept losses: what brings them back, what does not, and files that are damaged or cannot be written."""

import numpy as np
import pytest

from measure import store
from measure.store import Losses
from model.checkpoint import file_digest

EMPTY = np.full(4, np.nan)


def kept(folder, identity=None, values=(1.0, 2.0, np.nan, 4.0)):
    losses = Losses(folder, identity or {"weights": "a"}, EMPTY.copy())
    losses.values[:] = values
    losses.save(now=True)
    return losses


def test_they_come_back_for_the_same_and_for_nothing_else(tmp_path, monkeypatch):
    kept(tmp_path)
    again = Losses(tmp_path, {"weights": "a"}, EMPTY.copy())
    np.testing.assert_array_equal(again.values, [1, 2, np.nan, 4])
    assert not again.complete
    assert np.isnan(Losses(tmp_path, {"weights": "b"}, EMPTY.copy()).values).all()
    assert np.isnan(Losses(tmp_path, {"weights": "a"}, EMPTY.copy(), fresh=True).values).all()
    assert np.isnan(Losses(tmp_path, {"weights": "a"}, np.full(5, np.nan)).values).all()
    monkeypatch.setattr(store, "source_digest", lambda: "another program")
    assert np.isnan(Losses(tmp_path, {"weights": "a"}, EMPTY.copy()).values).all()
    assert kept(tmp_path, values=(1, 2, 3, 4)).complete


def test_the_source_is_all_of_the_network_and_of_the_scoring(tmp_path, monkeypatch):
    root = tmp_path / "copy"
    for name in ("model/gpt.py", "model/positions.py", "measure/protocols.py", "measure/store.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(store, "__file__", str(root / "measure" / "store.py"))
    digests = [store.source_digest.__wrapped__()]
    for name in ("model/gpt.py", "model/positions.py", "measure/protocols.py"):
        (root / name).write_text("changed")
        digests.append(store.source_digest.__wrapped__())
    assert len(set(digests)) == 4


@pytest.mark.parametrize("damage", [b"", b"PK", b"\x93NUMPY", b"text", None])
def test_a_damaged_file_is_measured_again(damage, tmp_path):
    path = kept(tmp_path).path
    path.write_bytes(path.read_bytes()[:-8] if damage is None else damage)
    again = Losses(tmp_path, {"weights": "a"}, EMPTY.copy())
    assert np.isnan(again.values).all()
    again.save(now=True)
    assert np.load(path).shape == (4,)


def test_pickled_objects_are_not_read(tmp_path):
    path = kept(tmp_path).path
    np.save(path, np.array([{"a": 1}] * 4, dtype=object), allow_pickle=True)
    assert np.isnan(Losses(tmp_path, {"weights": "a"}, EMPTY.copy()).values).all()


def test_measuring_goes_on_where_nothing_can_be_kept(tmp_path, caplog):
    (tmp_path / "file").touch()
    kept(tmp_path / "file" / "folder")
    assert "cannot be kept" in caplog.text


def test_they_are_saved_every_few_seconds(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: clock[0])
    losses = Losses(tmp_path, {"weights": "a"}, EMPTY.copy())
    losses.save()
    assert not losses.path.exists()
    clock[0] += store.SAVE_EVERY + 1
    losses.save()
    assert losses.path.exists()


def test_a_files_digest_is_of_its_content(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * 100)
    assert file_digest(tmp_path / "a") == file_digest(tmp_path / "b")
    (tmp_path / "b").write_bytes(b"x" * 99 + b"y")
    assert file_digest(tmp_path / "a") != file_digest(tmp_path / "b")
