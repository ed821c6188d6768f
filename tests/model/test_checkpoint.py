"""Checkpoint files: whole or not there, and nothing in them is run."""

import os
import pickle

import pytest
import torch

from model import GPTConfig, load_run
from model.checkpoint import latest_checkpoint, load_state, save_checkpoint
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_a_saved_model_is_the_same_model(pos, tmp_path):
    model = small_model(pos, torch.float32, n_kv_head=2, bias=False)
    save_checkpoint(tmp_path, 7, model, {"step": 7})
    loaded = load_run(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    tokens = random_tokens(model, 2, 20)
    assert torch.equal(loaded(tokens), model(tokens))
    assert load_state(latest_checkpoint(tmp_path)) == {"step": 7}


def test_only_the_latest_is_kept_and_incomplete_ones_do_not_count(tmp_path):
    model = small_model({"name": "none"}, torch.float32)
    for step in (5, 10, 1_000_000):
        save_checkpoint(tmp_path, step, model, {"step": step})
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        "step_1000000.pt",
        "step_1000000.safetensors",
    ]
    (tmp_path / "checkpoint" / "step_2000000.pt").touch()  # killed between the two files
    (tmp_path / "checkpoint" / ".step_3000000.safetensors.1.tmp").touch()  # killed while writing
    assert latest_checkpoint(tmp_path).name == "step_1000000.safetensors"


@pytest.mark.parametrize("victim", ["state", "weights"])
def test_a_crash_while_saving_keeps_the_last_checkpoint(victim, tmp_path, monkeypatch):
    import model.checkpoint as checkpoint

    model = small_model({"name": "none"}, torch.float32)
    save_checkpoint(tmp_path, 1, model, {"step": 1})

    def crash(*args, **kwargs):
        raise OSError("disk full")

    target = (torch, "save") if victim == "state" else (checkpoint, "save_file")
    monkeypatch.setattr(*target, crash)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, model, {"step": 2})
    assert latest_checkpoint(tmp_path).stem == "step_000001"
    assert load_state(latest_checkpoint(tmp_path)) == {"step": 1}
    assert not [path for path in (tmp_path / "checkpoint").iterdir() if path.suffix == ".tmp"]


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load_run(tmp_path)
    path = save_checkpoint(tmp_path, 1, small_model({"name": "none"}, torch.float32), {"step": 1})
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[:-10], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"step_000001\.safetensors: not a whole checkpoint"):
            load_run(tmp_path)
    path.write_bytes(whole)
    state = path.with_suffix(".pt")
    state.write_bytes(state.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step_000001\.pt: not a whole training state"):
        load_state(path)


def test_a_state_file_cannot_run_code(tmp_path):
    path = save_checkpoint(tmp_path, 1, small_model({"name": "none"}, torch.float32), {"step": 1})
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(marker),))

    path.with_suffix(".pt").write_bytes(pickle.dumps({"step": Evil()}))
    with pytest.raises(ValueError, match="not a whole training state"):
        load_state(path)
    torch.save({"step": Evil()}, path.with_suffix(".pt"))
    with pytest.raises(ValueError, match="not a whole training state"):
        load_state(path)
    assert not marker.exists()


def test_a_config_cannot_name_a_class_to_import(tmp_path):
    with pytest.raises(ValueError, match="known names are"):
        GPTConfig(vocab_size=61, pos={"name": "os.system"})
