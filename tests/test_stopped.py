"""SIGTERM, Ctrl-C, a full disk, damaged checkpoints: a training stops with its work saved, and says how to go on."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model.checkpoint import checkpoints, latest_checkpoint, load_state, step_of
from runs import Stop, Stopped
from runs.signals import REPEATED
from tests.processes import end, start
from tests.test_killed import assert_equal
from tests.trained import REPOSITORY, TINY, command, metrics, records, run
from train import Trainer

# rows of metrics are rarer than steps: a stop between two of them must not show in either
SETTINGS = [*TINY, "train.log_every=7", "train.eval_every=10", "train.checkpoint_every=50", "model.dropout=0.1"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_after_any_step_changes_no_number(ranks, corpus, tmp_path):
    settings = [*SETTINGS, *corpus, "train.max_steps=24", "train.micro_batch_size=1", "train.keep=1"]
    assert set(end(start(tmp_path / "whole", *settings, ranks=ranks))) == {0}
    folder = tmp_path / "parts"
    for step, stop_in in ((3, (2,)), (9, (8,)), (10, (9,)), (20, ("evaluation", 19)), (23, (22,))):
        there = bool(list(folder.glob("checkpoint/*.safetensors")))
        # the last process gets the signal, and all of them stop after the same step
        assert set(end(start(folder, *settings, ranks=ranks, resume=there, stop_in=stop_in))) == {1}
        if "evaluation" in stop_in:  # step 10 is measured first, and is where it stopped
            step = 10
        assert step_of(latest_checkpoint(folder)) == step
    assert set(end(start(folder, *settings, ranks=ranks, resume=True))) == {0}
    assert_equal(folder, tmp_path / "whole")


def begin(tmp_path: Path, *settings: str) -> subprocess.Popen:
    """A real command in the background, at work: it has written its first checkpoint."""
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *SETTINGS, *settings, "hydra.run.dir=run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore Ctrl-C, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list((tmp_path / "run").glob("checkpoint/*.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_and_closes_wandb(signum, status, corpus, tmp_path):
    process = begin(tmp_path, *corpus, "train.max_steps=100000", "wandb.mode=offline")
    process.send_signal(signum)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == status
    step = step_of(checkpoints(tmp_path / "run")[-1])
    assert f"stopped at step {step}; to go on: python train.py resume={tmp_path / 'run'}" in said
    assert "Traceback" not in errors
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert '"exitCode"' in json.dumps(records(folder)).replace("exit_code", "exitCode")  # closed, not cut off
    done = command("train.py", "resume=run", f"train.max_steps={step + 3}", "wandb.mode=disabled", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [row["step"] for row in metrics(tmp_path / "run") if "train/loss" in row]
    assert rows[-1] == step + 3
    assert rows == sorted(set(rows))


def test_a_second_ctrl_c_leaves_at_once_and_breaks_no_file(corpus, tmp_path):
    # one step lasts for ever: only the second Ctrl-C ends it
    process = begin(tmp_path, *corpus, "train.max_steps=100000", "train.eval_every=100000")
    os.kill(process.pid, signal.SIGSTOP)  # so that both arrive within one step
    process.send_signal(signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert load_state(latest_checkpoint(tmp_path / "run", resumable=True))["step"] >= 50


def test_stop_raises_at_once_or_where_the_work_asks(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    before = signal.getsignal(signal.SIGTERM)
    with Stop(), pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.status == 143
    with Stop() as stop, stop.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, after the terminal's Ctrl-C
        assert left == []
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with Stop() as stop, stop.deferred():
        for _ in range(2):  # the terminal's, and the same passed on by torchrun
            os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]
        stop._when -= REPEATED
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130, 130]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("full", "limit"), [("step_000002.pt", 50_000), ("metrics.jsonl", 6_000), ("config.yaml", 500)]
)
def test_a_full_disk_ends_the_run_with_one_message_and_loses_nothing(full, limit, corpus, tmp_path):
    """A real refusal of the kernel: the process may write no file beyond so many bytes."""
    settings = [*TINY, *corpus, "train.max_steps=40", "train.log_every=1", "train.eval_every=40", "hydra.run.dir=run"]
    settings += ["train.checkpoint_every=50"] if full == "metrics.jsonl" else []
    words = [sys.executable, str(REPOSITORY / "train.py"), *settings]
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, **few)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert line.startswith("error: ")
    assert full in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    if full == "metrics.jsonl":
        steps = [row["step"] for row in metrics(tmp_path / "run")]
        assert steps == list(range(1, len(steps) + 1))


EIGHT = [*TINY, "train.max_steps=8", "train.checkpoint_every=2", "train.eval_every=8"]


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


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("victim", ["safetensors", "pt"])
def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(victim, corpus, tmp_path, monkeypatch):
    settings = [*EIGHT, *corpus]
    run(tmp_path / "whole", *settings)
    folder = tmp_path / "damaged"
    interrupted(monkeypatch, 6, folder, *settings)
    assert [step_of(path) for path in checkpoints(folder)] == [4, 6]
    damage(checkpoints(folder)[-1].with_suffix(f".{victim}"))
    trainer = run(folder, *settings, resume=True)
    assert trainer.step == 8
    assert_equal(folder, tmp_path / "whole")


def test_a_damaged_checkpoint_is_not_kept_in_the_place_of_a_new_one(corpus, tmp_path, monkeypatch):
    interrupted(monkeypatch, 6, tmp_path, *EIGHT, *corpus)
    damage(checkpoints(tmp_path)[-1])
    often = ["train.keep=1", "train.checkpoint_every=1"]
    interrupted(monkeypatch, 5, tmp_path, *EIGHT, *corpus, *often, resume=True)
    assert step_of(latest_checkpoint(tmp_path, resumable=True)) == 5


@pytest.mark.parametrize("left", [True, False])
def test_a_longer_training_makes_its_own_report(left, corpus, tmp_path, monkeypatch):
    """Though it was killed before it, and a file of the shorter training, or of eval.py since then, is there."""
    run(folder := tmp_path, *EIGHT, *corpus, "train.max_steps=6", "train.eval_every=6")
    stale = (folder / "extrapolation.json").read_text()
    longer = [*EIGHT, *corpus, "train.max_steps=8", "train.eval_every=8"]
    interrupted(monkeypatch, 8, folder, *longer, resume=True)
    if left:
        (folder / "extrapolation.json").write_text(stale.replace("step_000006", "step_000008"))
    run(folder, *longer, resume=True)
    report = json.loads((folder / "extrapolation.json").read_text())
    assert report["checkpoint"] == "step_000008"
    logged = [(row["step"], row["extrapolation/length"]) for row in metrics(folder) if "extrapolation/length" in row]
    assert logged[-len(report["rows"]) :] == [(8, row["length"]) for row in report["rows"]]


@pytest.mark.parametrize("state", [[1], {"step": 6}, {"step": "6", "fingerprint": "", "optimizer": {}, "scaler": {}}])
def test_a_state_of_another_program_is_refused(state, corpus, tmp_path, monkeypatch):
    interrupted(monkeypatch, 6, tmp_path, *EIGHT, *corpus)
    path = checkpoints(tmp_path)[-1]
    path.with_suffix(".sha256").unlink()
    torch.save(state, path.with_suffix(".pt"))
    with pytest.raises(ValueError, match=r"step_000006.pt: not a training state of this program"):
        run(tmp_path, *EIGHT, *corpus, resume=True)


def test_a_run_that_is_being_trained_is_not_resumed(corpus, tmp_path):
    process = begin(tmp_path, *corpus, "train.max_steps=100000", "train.eval_every=100000")
    try:
        done = command("train.py", "resume=run", "wandb.mode=disabled", cwd=tmp_path)
        assert done.returncode == 1
        assert "error: run: another process is training in it" in done.stderr.replace(f"{tmp_path}/", "")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    step = step_of(latest_checkpoint(tmp_path / "run", resumable=True))
    done = command("train.py", "resume=run", f"train.max_steps={step + 1}", "wandb.mode=disabled", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [row["step"] for row in metrics(tmp_path / "run") if "train/loss" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] == step + 1


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run" / "train.log").mkdir(parents=True)
    done = command("train.py", *TINY, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 1
    assert f"Is a directory: '{tmp_path / 'run' / 'train.log'}'" in done.stderr
    assert "Traceback" not in done.stderr
