"""Checkpoint files: whole or not there, and nothing in them is run."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model import GPTConfig, load_run
from model.checkpoint import (
    best_checkpoint,
    checkpoints,
    latest_checkpoint,
    load_state,
    mark_best,
    prune_checkpoints,
    read_best,
    save_checkpoint,
    step_of,
)
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

ENDINGS = ("pt", "sha256", "safetensors")


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


def steps(run) -> list[int]:
    return [step_of(path) for path in checkpoints(run)]


def test_the_last_ones_and_the_best_are_kept_and_incomplete_ones_do_not_count(tmp_path):
    model = small_model({"name": "none"}, torch.float32)
    for step in (5, 10, 20, 999_999, 1_000_000):
        save_checkpoint(tmp_path, step, model, {"step": step})
    mark_best(tmp_path, 10, 1.5)
    folder = tmp_path / "checkpoint"
    (folder / "step_2000000.pt").touch()  # killed between the two files
    (folder / ".step_3000000.safetensors.1.tmp").touch()  # killed while writing
    (folder / ".best.json.1.tmp").touch()
    assert latest_checkpoint(tmp_path).name == "step_1000000.safetensors"
    (folder / "notes.txt").touch()  # not ours
    prune_checkpoints(tmp_path, 2, step=1_000_000)
    assert steps(tmp_path) == [10, 999_999, 1_000_000]
    assert best_checkpoint(tmp_path).name == "step_000010.safetensors"
    kept = {f"{stem}.{end}" for stem in ("step_000010", "step_999999", "step_1000000") for end in ENDINGS}
    assert {path.name for path in folder.iterdir()} == kept | {"best.json", "notes.txt"}


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    model = small_model({"name": "none"}, torch.float32)
    for step in (5, 20):
        save_checkpoint(tmp_path, step, model, {"step": step})
    (tmp_path / "checkpoint" / "step_000020.pt").write_bytes(b"")
    assert step_of(latest_checkpoint(tmp_path, resumable=True)) == 5
    save_checkpoint(tmp_path, 12, model, {"step": 12})  # stopped again, before it came to step 20
    prune_checkpoints(tmp_path, 1, step=12)
    assert steps(tmp_path) == [12]


def test_the_digests_are_those_of_sha256sum(tmp_path):
    path = save_checkpoint(tmp_path, 5, small_model({"name": "none"}, torch.float32), {"step": 5})
    command = ["sha256sum", "--check", "--strict", path.with_suffix(".sha256").name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["step_000005.pt: OK", "step_000005.safetensors: OK"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_checkpoint_is_never_used(ending, damage, tmp_path, caplog):
    model = small_model({"name": "none"}, torch.float32)
    for step in (1, 2):
        path = save_checkpoint(tmp_path, step, model, {"step": step})
    victim = path.with_suffix(f".{ending}")
    whole = victim.read_bytes()
    for at in {"flip": range(0, len(whole), max(1, len(whole) // 50)), "cut": (len(whole) - 2,)}.get(damage, (0,)):
        if damage == "flip":
            victim.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        elif damage == "gone":
            victim.unlink()
        else:
            victim.write_bytes(whole[:at])
        caplog.clear()
        used = latest_checkpoint(tmp_path, resumable=True)
        if (ending, damage) == ("sha256", "gone"):  # nothing is known then, as of an imported model
            assert used == path
            continue
        assert used.name == "step_000001.safetensors"
        if damage != "gone" or ending == "pt":  # without its weights there never was one
            assert "step_000002" in caplog.text
            assert "the checkpoint before it is used" in caplog.text
        if ending != "sha256":  # the model is whole without its training state
            assert step_of(latest_checkpoint(tmp_path)) == (2 if ending == "pt" else 1)
    (tmp_path / "checkpoint" / "step_000001.safetensors").unlink()
    if ending != "safetensors" and damage != "gone":
        with pytest.raises(ValueError, match="step_000002"):
            latest_checkpoint(tmp_path, resumable=True)


def test_the_best_is_known_or_said_not_to_be(tmp_path):
    model = small_model({"name": "none"}, torch.float32)
    path = save_checkpoint(tmp_path, 3, model, None)
    assert not path.with_suffix(".pt").exists()
    with pytest.raises(FileNotFoundError, match=r"best\.json"):
        best_checkpoint(tmp_path)
    for text in ("", "{}", '{"step": "../../x", "nll": 1}', "[1]", '{"step": 3}', '{"step": Infinity, "nll": 1}'):
        (path.parent / "best.json").write_text(text)
        assert read_best(tmp_path) is None
    mark_best(tmp_path, 3, 0.25)
    assert read_best(tmp_path) == (3, 0.25)
    assert best_checkpoint(tmp_path) == path
    mark_best(tmp_path, 4, 0.125)
    with pytest.raises(FileNotFoundError, match=r"step_000004\.safetensors"):
        best_checkpoint(tmp_path)


def test_a_full_disk_is_one_error_that_names_the_file(tmp_path):
    """A real refusal of the kernel: this process may write no file beyond 4 kB."""
    code = """
import resource, sys
from pathlib import Path
from model.checkpoint import save_checkpoint
from tests.helpers import small_model
run, model = Path(sys.argv[1]), small_model({"name": "none"})
save_checkpoint(run, 1, model, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for state in ({"step": 2}, {"step": 2, "moments": model.state_dict()}):
    try:
        save_checkpoint(run, 2, model, state)
    except OSError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    weights, state = done.stdout.splitlines()
    assert weights.startswith(f"{tmp_path / 'checkpoint' / 'step_000002.safetensors'}: cannot be written (")
    assert state.startswith(f"{tmp_path / 'checkpoint' / 'step_000002.pt'}: cannot be written (")
    assert latest_checkpoint(tmp_path, resumable=True).name == "step_000001.safetensors"
    assert not [path for path in (tmp_path / "checkpoint").iterdir() if path.name.endswith(".tmp")]


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
    path.with_suffix(".sha256").unlink()  # damage shows without it too, where it breaks the format
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


@pytest.mark.parametrize("name", ["blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "norm.weight"])
def test_a_tensor_of_another_shape_or_name_is_named(name, tmp_path):
    path = save_checkpoint(tmp_path, 1, small_model({"name": "none"}, torch.float32), None)
    path.with_suffix(".sha256").unlink()
    with safe_open(path, "pt") as file:
        header = file.metadata()
    whole = load_file(path)
    for damaged in (whole | {name: whole[name][:-1].clone()}, whole | {"x": torch.zeros(1)}):
        save_file(damaged, path, metadata=header)
        with pytest.raises(ValueError, match=rf"step_000001\.safetensors: .*({name}|tensors, not)"):
            load_run(tmp_path)
    save_file(whole, path, metadata=header)
    assert load_run(tmp_path) is not None


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
