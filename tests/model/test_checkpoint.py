"""Checkpoint files: whole or not there, and nothing in them is run."""

import hashlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model import GPTConfig, load_run
from model.checkpoint import checkpoints, latest_checkpoint, load_state, prune_checkpoints, save_checkpoint, step_of
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

ENDINGS = ("pt", "safetensors")


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_a_saved_model_is_the_same_model(pos, tmp_path):
    model = small_model(pos, torch.float32, n_kv_head=2, bias=False)
    save_checkpoint(tmp_path, 7, model.config, model.state_dict(), {"step": 7})
    loaded = load_run(tmp_path)
    assert loaded.config == model.config
    assert not loaded.training
    tokens = random_tokens(model, 2, 20)
    assert torch.equal(loaded(tokens), model(tokens))
    path = latest_checkpoint(tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_state(path) == {"step": 7, "weights_sha256": digest}


def steps(run) -> list[int]:
    return [step_of(path) for path in checkpoints(run)]


def save(run, step, **more):
    model = small_model({"name": "none"}, torch.float32)
    return save_checkpoint(run, step, model.config, model.state_dict(), {"step": step, **more})


def test_the_last_ones_are_kept_and_incomplete_ones_do_not_count(tmp_path):
    for step in (5, 20, 999_999, 1_000_000):
        save(tmp_path, step)
    folder = tmp_path / "checkpoint"
    (folder / "step_2000000.pt").touch()  # killed between the two files
    (folder / ".step_3000000.safetensors.1.tmp").touch()  # killed while writing
    assert latest_checkpoint(tmp_path).name == "step_1000000.safetensors"
    others = {"notes.txt", "step_best.safetensors", "step_000005.safetensors.bak"}  # not ours
    for name in others:
        (folder / name).touch()
    assert step_of(latest_checkpoint(tmp_path)) == 1_000_000
    prune_checkpoints(tmp_path, 2, step=1_000_000)
    assert steps(tmp_path) == [999_999, 1_000_000]
    kept = {f"{stem}.{end}" for stem in ("step_999999", "step_1000000") for end in ENDINGS}
    assert {path.name for path in folder.iterdir()} == kept | others


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    for step in (5, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoint" / "step_000020.pt").write_bytes(b"")
    assert step_of(latest_checkpoint(tmp_path)) == 5
    save(tmp_path, 12)  # stopped again, before step 20
    prune_checkpoints(tmp_path, 1, step=12)
    assert steps(tmp_path) == [12]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_checkpoint_is_passed_over(ending, damage, tmp_path, caplog):
    moments = torch.arange(5000.0)
    save(tmp_path, 1, moments=moments)
    path = save(tmp_path, 2, moments=moments)
    victim = path.with_suffix(f".{ending}")
    whole = victim.read_bytes()
    for at in {"flip": range(0, len(whole), len(whole) // 50), "cut": (len(whole) - 2,)}.get(damage, (0,)):
        victim.write_bytes(whole[:at] + (bytes([whole[at] ^ 1]) + whole[at + 1 :] if damage == "flip" else b""))
        caplog.clear()
        if latest_checkpoint(tmp_path) == path:  # a bit that nobody reads, such as the padding between a zip's entries
            assert ending == "pt"
            assert torch.equal(load_state(path)["moments"], moments)
            continue
        assert latest_checkpoint(tmp_path).name == "step_000001.safetensors"
        assert "step_000002" in caplog.text
        assert "the checkpoint before it is used" in caplog.text
    if damage != "flip":
        (tmp_path / "checkpoint" / "step_000001.safetensors").unlink()
        with pytest.raises(ValueError, match="step_000002"):
            latest_checkpoint(tmp_path)


def test_a_full_disk_is_one_error_that_names_the_file(tmp_path):
    """A real refusal of the kernel: this process may write no file beyond 4 kB."""
    code = """
import resource, sys
from pathlib import Path
from model.checkpoint import save_checkpoint
from tests.helpers import small_model
run, model = Path(sys.argv[1]), small_model({"name": "none"})
save = lambda step, state: save_checkpoint(run, step, model.config, model.state_dict(), state)
save(1, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for state in ({"step": 2}, {"step": 2, "moments": model.state_dict()}):
    try:
        save(2, state)
    except OSError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    for line in done.stdout.splitlines():
        assert re.match(rf"{tmp_path / 'checkpoint' / 'step_000002'}\.(pt|safetensors): cannot be written \(", line)
    assert len(done.stdout.splitlines()) == 2
    assert latest_checkpoint(tmp_path).name == "step_000001.safetensors"
    assert not [path for path in (tmp_path / "checkpoint").iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize("victim", ["state", "weights"])
def test_a_crash_while_saving_keeps_the_last_checkpoint(victim, tmp_path, monkeypatch):
    save(tmp_path, 1)

    def crash(*args, **kwargs):
        raise OSError("disk full")

    target = (torch, "save") if victim == "state" else (Path, "write_bytes")
    monkeypatch.setattr(*target, crash)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2)
    assert latest_checkpoint(tmp_path).stem == "step_000001"
    assert load_state(latest_checkpoint(tmp_path))["step"] == 1
    assert not [path for path in (tmp_path / "checkpoint").iterdir() if path.suffix == ".tmp"]


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="it holds no checkpoint"):
        load_run(tmp_path)
    path = save(tmp_path, 1)
    path.with_suffix(".pt").write_bytes(path.with_suffix(".pt").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step_000001\.pt: not a whole training state"):
        load_state(path)
    path.with_suffix(".pt").unlink()  # damage shows without the digest too, where it breaks the format
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[:-10], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"step_000001\.safetensors: not a whole checkpoint"):
            load_run(tmp_path)


@pytest.mark.parametrize("name", ["blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "norm.weight"])
def test_a_tensor_of_another_shape_or_name_is_named(name, tmp_path):
    path = save(tmp_path, 1)
    path.with_suffix(".pt").unlink()
    with safe_open(path, "pt") as file:
        header = file.metadata()
    whole = load_file(path)
    for damaged in (whole | {name: whole[name][:-1].clone()}, whole | {"x": torch.zeros(1)}):
        save_file(damaged, path, metadata=header)
        with pytest.raises(ValueError, match=rf"(?s)step_000001\.safetensors: .*({name}|Unexpected)"):
            load_run(tmp_path)
    save_file(whole, path, metadata=header)
    assert load_run(tmp_path) is not None


def test_a_state_file_cannot_run_code(tmp_path):
    path = save(tmp_path, 1)
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


def test_a_config_cannot_name_a_class_to_import():
    with pytest.raises(ValueError, match="known names are"):
        GPTConfig(vocab_size=61, pos={"name": "os.system"})
