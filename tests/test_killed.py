"""Trainings that are killed with SIGKILL, at any moment, go on as if nothing had been."""

import random
import time

import pytest

from model.checkpoint import checkpoints, load_state
from model.positions import SCHEMES
from tests.processes import end, start
from tests.trained import TINY, composed, metrics, run, same, weights

SETTINGS = [*TINY, "train.max_steps=12", "train.eval_every=3", "train.log_every=2", "model.dropout=0.1"]


def finish(folder, *settings, ranks=1):
    """Start again, and again, until the run is done; the number of starts."""
    for count in range(1, 10):
        there = (folder / "config.yaml").exists()
        resumable = there and bool(list(folder.glob("checkpoint/*.safetensors")))
        if there and not resumable:  # killed before its first checkpoint: nothing to go on from
            (folder / "config.yaml").unlink()
        if set(end(start(folder, *settings, ranks=ranks, resume=resumable))) == {0}:
            return count
    raise AssertionError("it never comes to its end")


def assert_equal(folder, whole):
    assert same(weights(folder), weights(whole))
    assert metrics(folder) == metrics(whole)
    steps = [row["step"] for row in metrics(folder) if "train/loss" in row]
    assert steps == sorted(set(steps))
    states = [load_state(checkpoints(run)[-1]) for run in (folder, whole)]
    assert str(states[0]) == str(states[1])
    left = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix != ".log"}
    assert left == {path.relative_to(whole) for path in whole.rglob("*") if path.suffix != ".log"}


@pytest.mark.parametrize("pos", SCHEMES)
def test_every_scheme_killed_at_random_moments(pos, corpus, tmp_path):
    """Three kills a scheme: over twenty in all."""
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


def test_killed_before_every_change_of_a_file(corpus, tmp_path):
    settings = [*SETTINGS, *corpus, "train.max_steps=4", "train.checkpoint_every=2", "train.keep=1"]
    run(tmp_path / "whole", *settings)
    points = random.Random(0).sample(range(60), 12)
    killed = 0
    for kill_at in points:
        folder = tmp_path / str(kill_at)
        (code,) = end(start(folder, *settings, kill_at=kill_at))
        killed += code == -9
        if code:
            finish(folder, *settings)
        assert_equal(folder, tmp_path / "whole")
    assert killed >= 6


@pytest.mark.parametrize("victim", [0, 1])
def test_two_processes_one_of_which_is_killed(victim, corpus, tmp_path):
    settings = [*SETTINGS, *corpus, "train.micro_batch_size=1"]
    assert end(start(tmp_path / "whole", *settings, ranks=2)) == [0, 0]
    folder = tmp_path / "killed"
    processes = start(folder, *settings, "train.max_steps=12", ranks=2)
    while not list(folder.glob("checkpoint/*.safetensors")):
        time.sleep(0.01)
    processes[victim].kill()
    begun = time.monotonic()
    codes = end(processes, within=60)  # the other does not wait for ever
    assert codes[victim] == -9
    assert codes[1 - victim] not in (0, -9)
    assert time.monotonic() - begun < 60
    finish(folder, *settings, ranks=2)
    assert_equal(folder, tmp_path / "whole")


def test_composed_settings_reach_the_killed_runs():
    """The settings above mean what they say."""
    t = composed(*SETTINGS).train
    assert (t.max_steps, t.checkpoint_every, t.eval_every) == (12, 2, 3)
