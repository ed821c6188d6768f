"""The same configuration and seed are the same numbers: repeated, in a sweep, whatever the process did before."""

import json
import math
import re
import subprocess
from importlib.metadata import version

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from model.checkpoint import latest_checkpoint
from runs import agreement, repeated_config, run_dir
from tests.trained import REPOSITORY, TINY, command, composed, metrics, run, same, weights


def changed(folder, key: str, by: float) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-2][key] = rows[-2].get(key, 1.0) + by
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_that_agree_and_runs_that_do_not(corpus, tmp_path):
    for name in ("a", "b"):
        run(tmp_path / name, *TINY, *corpus, "model.dropout=0.1")
    agree, lines = agreement(tmp_path / "a", tmp_path / "b")
    assert agree
    count = len(metrics(tmp_path / "a"))
    assert lines == [f"{count} rows of metrics are equal, bit for bit", "weights of step_000004 are equal, bit for bit"]
    row = metrics(tmp_path / "b")[-2]
    key = next(key for key in row if key not in ("step", "tokens") and row[key])
    changed(tmp_path / "b", key, abs(row[key]))
    agree, lines = agreement(tmp_path / "a", tmp_path / "b")
    assert not agree
    assert lines[0] == f"metrics differ from step 4 on, at most by 0.5 of their value ({key}, step 4)"
    path = latest_checkpoint(tmp_path / "a")
    tensors = load_file(path)
    tensors["norm.weight"][3] += 0.25
    path.with_suffix(".sha256").unlink()
    save_file(tensors, path, metadata={"config": _header(path)})
    agree, lines = agreement(tmp_path / "a", tmp_path / "b")
    assert lines[-1] == "weights of step_000004 differ by up to 0.2"  # 0.25 to one digit
    run(tmp_path / "c", *TINY, *corpus, "model.dropout=0.1", "train.max_steps=3")
    agree, lines = agreement(tmp_path / "c", tmp_path / "a")
    assert not agree
    assert any(line.endswith("are compared") for line in lines)
    assert lines[-1] == "the last checkpoints are step_000003 there, step_000004 here"


def _header(path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()["config"]


def test_a_run_is_repeated_by_a_command(corpus, tmp_path):
    folder = tmp_path / "outputs" / "first"
    run(folder, *TINY, *corpus, "pos=alibi", "seed=3", "train.skip_bad_steps=2")
    done = command("train.py", f"repeat={folder}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the numbers agree" in done.stdout
    (repeated,) = tmp_path.glob("outputs/*_repeat_of_first")
    assert metrics(repeated) == metrics(folder)
    changed(folder, "tokens", 1)
    done = command("train.py", f"repeat={folder}", cwd=tmp_path)
    assert done.returncode == 3
    assert "the numbers do not agree" in done.stdout
    assert "Traceback" not in done.stderr


def test_what_repeats_takes_no_other_settings(corpus, tmp_path):
    run(tmp_path / "run", *TINY, *corpus)
    config = composed(*TINY, *corpus, f"repeat={tmp_path / 'run'}")
    with pytest.raises(ValueError, match=r"seed: cannot change when a run is repeated .*leave repeat= out"):
        repeated_config(config, ["seed=1", "repeat=x"])
    assert "repeat_of_run" in run_dir(None, str(tmp_path / "run"), "x")


def test_a_run_says_where_it_came_from(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus)
    origin = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml").provenance)
    assert origin["packages"]["torch"] == version("torch")
    assert origin["packages"]["datasets"] == version("datasets")
    assert (origin["device"], origin["precision"], origin["processes"]) == ("cpu", "fp32", 1)
    assert origin["threads"] == torch.get_num_threads()
    assert origin["device_name"]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if git.returncode == 0:
        assert origin["commit"] == git.stdout.strip()
        assert origin["dirty"] in (True, False)
    else:
        assert (origin["commit"], origin["dirty"]) == (None, None)


def test_jobs_of_a_sweep_leave_each_other_alone(corpus, tmp_path):
    """Each job's numbers are those of a run alone, although one before it fails and another sets all it can."""
    odd = "deterministic=true,false"
    sweep = command("train.py", "-m", *TINY, *corpus, odd, "train.tf32=false,true", "seed=-1,1", cwd=tmp_path)
    assert sweep.returncode != 0
    assert "seed=-1: must be at least 0" in sweep.stderr
    folders = sorted(tmp_path.glob("outputs/*_seed1*"))
    assert len(folders) == 4
    run(tmp_path / "alone", *TINY, *corpus, "seed=1")
    for folder in folders:
        assert metrics(folder) == metrics(tmp_path / "alone")
        assert same(weights(folder), weights(tmp_path / "alone"))


def test_deterministic_is_set_and_unset(corpus, tmp_path):
    run(tmp_path / "on", *TINY, *corpus, "deterministic=true", "model.dropout=0.1")
    assert torch.are_deterministic_algorithms_enabled()
    run(tmp_path / "off", *TINY, *corpus, "model.dropout=0.1")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert same(weights(tmp_path / "on"), weights(tmp_path / "off"))
    losses = [row["train/loss"] for row in metrics(tmp_path / "on") if "train/loss" in row]
    assert all(map(math.isfinite, losses))
    assert re.search("deterministic: true", (tmp_path / "on" / "config.yaml").read_text())
