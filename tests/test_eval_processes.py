"""Measuring with several processes gives the same numbers, and keeps them in step."""

import json
import sys

import pytest

from tests.trained import command

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.slow
def test_three_processes_measure_as_one(two_runs, tmp_path):
    settings = [
        f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]", "scalings=[null,dynamic]", "protocol=both",
        "lengths=[16,20,64]", "max_windows=null", "recall=true", "device=cpu", "precision=fp32", "wandb.mode=disabled",
    ]  # fmt: skip
    for name, launcher in (("one", (sys.executable,)), ("three", (*TORCHRUN, "3"))):
        done = command("eval.py", *settings, f"out={tmp_path / name}", cwd=tmp_path, launcher=launcher)
        assert done.returncode == 0, done.stderr
    one, three = (json.loads((tmp_path / name / "extrapolation.json").read_text()) for name in ("one", "three"))
    assert one["results"] == three["results"]
    assert one["groups"] == three["groups"]
    assert done.stdout.count("tokens scored: perplexity\n") == 2  # a table per protocol, by the first process
