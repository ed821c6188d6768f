"""Killed at any moment, signalled, a full disk, a damaged checkpoint: a run goes on as if nothing had been."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import train
from data import TokenFiles
from model.checkpoint import checkpoints, latest_checkpoint, load_state, step_of
from runs.folder import read_run, resumed
from runs.processes import noted_signals
from tests.processes import end, start
from tests.trained import REPOSITORY, TINY, command, composed, metrics, run, same, weights
from train import Trainer

SETTINGS = [*TINY, "train.max_steps=12", "train.eval_every=3", "train.log_every=2", "model.dropout=0.1"]


def finish(folder, *settings, ranks=1):
    """Start again, and again, until the run is done; the number of starts."""
    for count in range(1, 10):
        resumable = bool(list(folder.glob("checkpoint/*.safetensors")))
        if not resumable:  # killed before its first checkpoint: nothing to go on from
            (folder / "config.yaml").unlink(missing_ok=True)
        if set(end(start(folder, *settings, ranks=ranks, resume=resumable))) == {0}:
            return count
    raise AssertionError("it never comes to its end")


def in_order(value):
    """Nested dicts, their keys sorted, and tuples as lists."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value, key=str)}
    return [in_order(one) for one in value] if isinstance(value, list | tuple) else value


def assert_equal(folder, whole):
    assert same(weights(folder), weights(whole))
    assert metrics(folder) == metrics(whole)
    steps = [row["step"] for row in metrics(folder) if "train/loss" in row]
    assert steps == sorted(set(steps))
    # the digest is of a file whose header lists its metadata in any order
    states = [load_state(checkpoints(run)[-1]) | {"weights_sha256": None} for run in (folder, whole)]
    assert str(in_order(states[0])) == str(in_order(states[1]))
    left = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix != ".log"}
    assert left == {path.relative_to(whole) for path in whole.rglob("*") if path.suffix != ".log"}


def interrupted(monkeypatch, step: int, folder: Path, *settings: str, method: str = "_checkpoint", **how) -> None:
    """Train until after this step's checkpoint, or its measurement."""
    real = getattr(Trainer, method)

    def stopping(self):
        real(self)
        if self.step == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, method, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(folder, *settings, **how)


@pytest.mark.parametrize("method", ["_checkpoint", "_evaluate"])
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_twelve_steps_are_six_and_six_more_bit_for_bit(pos, method, corpus, tmp_path, monkeypatch):
    settings = [*SETTINGS, *corpus, f"pos={pos}", "train.micro_batch_size=2"]
    run(tmp_path / "whole", *settings)
    interrupted(monkeypatch, 6, tmp_path / "parts", *settings, method=method)
    torch.manual_seed(99)  # whatever generator state the new process has must not matter
    run(tmp_path / "parts", *settings, resume=True)
    assert_equal(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("pos", ["rope", "t5"])
def test_killed_at_random_moments(pos, corpus, tmp_path):
    settings = [*SETTINGS, *corpus, f"pos={pos}", "train.micro_batch_size=2"]
    begun = time.monotonic()
    assert end(start(tmp_path / "whole", *settings)) == [0]
    lasted, moments, folder = time.monotonic() - begun, random.Random(pos), tmp_path / "killed"
    for _ in range(3):
        resume = bool(list(folder.glob("checkpoint/*.safetensors")))
        (process,) = start(folder, *settings, resume=resume)
        time.sleep(moments.uniform(0.3, 1.0) * lasted)
        process.kill()
        if end([process]) == [0]:
            break
        if not list(folder.glob("checkpoint/*.safetensors")):
            (folder / "config.yaml").unlink(missing_ok=True)
    if not (folder / "extrapolation.json").exists():
        finish(folder, *settings)
    assert_equal(folder, tmp_path / "whole")


@pytest.mark.slow
def test_killed_before_every_change_of_a_file(corpus, tmp_path):
    settings = [*SETTINGS, *corpus, "train.max_steps=4", "train.checkpoint_every=2", "train.keep=1"]
    run(tmp_path / "whole", *settings)
    killed = 0
    for kill_at in random.Random(0).sample(range(40), 10):
        folder = tmp_path / str(kill_at)
        (code,) = end(start(folder, *settings, kill_at=kill_at))
        killed += code == -9
        if code:
            finish(folder, *settings)
        assert_equal(folder, tmp_path / "whole")
    assert killed >= 5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_after_any_step_changes_no_number(ranks, corpus, tmp_path):
    # rows of metrics are rarer than steps: a stop between two of them must not show in either
    settings = [*TINY, *corpus, "train.log_every=7", "train.eval_every=10", "train.checkpoint_every=50"]
    settings += ["train.max_steps=24", "train.micro_batch_size=1", "train.keep=1", "model.dropout=0.1"]
    assert set(end(start(tmp_path / "whole", *settings, ranks=ranks))) == {0}
    folder = tmp_path / "parts"
    for step in (3, 9, 10, 23):
        resume = bool(list(folder.glob("checkpoint/*.safetensors")))
        # the last process gets the signal, and all of them stop after the same step
        assert set(end(start(folder, *settings, ranks=ranks, resume=resume, stop_in=(step - 1,)))) == {143}
        assert step_of(latest_checkpoint(folder)) == step
    assert set(end(start(folder, *settings, ranks=ranks, resume=True))) == {0}
    assert_equal(folder, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step(signum, status, corpus, tmp_path):
    settings = [*TINY, *corpus, "train.max_steps=100000", "train.eval_every=100000", "hydra.run.dir=run"]
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *settings, "wandb.mode=offline"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's background jobs ignore Ctrl-C, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not list((tmp_path / "run").glob("checkpoint/*.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signum)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status
    step = step_of(checkpoints(tmp_path / "run")[-1])
    assert f"stopped at step {step}; to go on: python train.py resume={tmp_path / 'run'}" in output
    assert "Traceback" not in errors
    done = command("train.py", "resume=run", f"train.max_steps={step + 3}", "wandb.mode=disabled", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run") if "train/loss" in row] == list(range(1, step + 4))


def test_the_first_signal_is_noted_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with noted_signals() as noted:
        assert noted == []
        for signum in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), signum)
        assert noted[0] == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "limit"), [("config.yaml", 500), ("metrics.jsonl", 6_000), ("step_000004.pt", 50_000)]
)
def test_a_full_disk_ends_the_run_with_one_message(full, limit, corpus, trained, tmp_path):
    """A real refusal of the kernel: the process may write no file beyond so many bytes."""
    settings = [*TINY, *corpus, "train.max_steps=40", "train.eval_every=40", "hydra.run.dir=run"]
    settings += ["train.checkpoint_every=50"] if full == "metrics.jsonl" else ["train.checkpoint_every=4"]
    words = [sys.executable, str(REPOSITORY / "train.py"), *settings]
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, **few)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "cannot be written" in line
    assert full in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    if full == "metrics.jsonl":
        steps = [row["step"] for row in metrics(tmp_path / "run")]
        assert steps == list(range(1, len(steps) + 1))


def test_a_full_disk_leaves_earlier_checkpoints_whole(corpus, tmp_path, monkeypatch):
    real = torch.save

    def save(state, path):
        if state["step"] == 4:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(state, path)

    settings = [*SETTINGS, *corpus]
    run(tmp_path / "whole", *settings)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(OSError, match=r"step_000004\.\w+: cannot be written .*No space left"):
            run(tmp_path / "full", *settings)
    assert step_of(latest_checkpoint(tmp_path / "full")) == 2
    run(tmp_path / "full", *settings, resume=True)
    assert_equal(tmp_path / "full", tmp_path / "whole")


@pytest.mark.parametrize("victim", ["safetensors", "pt"])
@pytest.mark.parametrize("how", ["bit", "cut"])
def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(how, victim, corpus, tmp_path, monkeypatch):
    settings = [*TINY, *corpus, "train.max_steps=8", "train.eval_every=8"]
    run(tmp_path / "whole", *settings)
    folder = tmp_path / "damaged"
    interrupted(monkeypatch, 6, folder, *settings)
    path = checkpoints(folder)[-1].with_suffix(f".{victim}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content if how == "bit" else content[: len(content) // 2])
    assert run(folder, *settings, resume=True).step == 8
    assert_equal(folder, tmp_path / "whole")


def test_a_report_that_fails_costs_no_steps_and_can_be_made_up(corpus, tmp_path, monkeypatch):
    run(tmp_path / "whole", *TINY, *corpus)
    with monkeypatch.context() as patch:
        patch.setattr(train.Report, "write", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "parts", *TINY, *corpus)
    run(tmp_path / "parts", *TINY, *corpus, resume=True)
    assert_equal(tmp_path / "parts", tmp_path / "whole")


def test_resuming_refuses_what_would_not_be_the_same_run(corpus, tmp_path, monkeypatch):
    run(tmp_path, *TINY, *corpus)
    config = composed(*TINY, *corpus, f"resume='{tmp_path}'")
    with pytest.raises(ValueError, match=r"pos: cannot change in a resumed run"):
        resumed(config, ["pos=learned", f"resume={tmp_path}"])
    with pytest.raises(FileNotFoundError, match="nowhere: not a run folder"):
        resumed(composed(*TINY, *corpus, "resume=nowhere"), ["resume=nowhere"])
    run(tmp_path, *TINY, *corpus, "train.max_steps=6", resume=True)
    assert [row["step"] for row in metrics(tmp_path) if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match=r"train\.max_steps=5: .* is at step 6 already"):
        run(tmp_path, *TINY, *corpus, "train.max_steps=5", resume=True)
    monkeypatch.setattr(TokenFiles, "fingerprint", "another")
    with pytest.raises(ValueError, match=r"was trained on data \w+, not on this"):
        run(tmp_path, *TINY, *corpus, "train.max_steps=8", resume=True)


class Canary:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(folder, *TINY, *corpus)
    return folder


def test_a_training_state_runs_nothing(trained, corpus, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "copy")
    torch.save({"step": 4, "optimizer": Canary(tmp_path / "canary")}, folder / "checkpoint" / "step_000004.pt")
    for path in folder.glob("checkpoint/step_000002*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"step_000004\.pt"):
        run(folder, *TINY, *corpus, "train.max_steps=6", resume=True)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "damage",
    [
        "", "text", "a: 1", "name: x\nprovenance: {}", "{", "a: &a [*a]",
        "!!python/object/apply:os.mkdir [canary]", "name: !!python/object/apply:os.mkdir [canary]",
    ],
)  # fmt: skip
def test_a_config_that_train_did_not_write_is_refused_and_runs_nothing(damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(damage)
    with pytest.raises(ValueError, match=r"config\.yaml: not a configuration written by train\.py"):
        read_run(tmp_path)
    assert not (tmp_path / "canary").exists()


def test_interpolations_of_a_run_folder_are_not_followed(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "canary")
    plain = yaml.safe_load((trained / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**plain, "name": "${oc.env:SECRET}"}))
    with pytest.raises(ValueError, match="interpolations") as error:
        read_run(tmp_path)
    assert "canary" not in str(error.value)
    # what was typed may look like one, and stays as it is
    plain["provenance"]["command"] = "train.py 'name=${pos.name}'"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    assert read_run(tmp_path)[1]["command"] == "train.py 'name=${pos.name}'"
