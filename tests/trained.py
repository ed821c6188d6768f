"""Tiny runs: the settings that make them, and functions that train and measure in this process, as the commands do."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from wandb.util import get_core_path

from measure.plots import Plot
from model.checkpoint import latest_checkpoint
from runs.folder import RESUMABLE, resumed
from runs.processes import Ranks
from runs.settings import TrainConfig, check_settings, checked
from train import Trainer

REPOSITORY = Path(__file__).parents[1]
ALONE = Ranks()
TINY = [
    "preset=cpu", "data=files", "model.n_layer=1", "model.n_head=2", "model.head_dim=8", "model.train_length=16",
    "train.batch_size=4", "train.max_steps=4", "train.warmup_steps=2", "train.eval_every=4", "train.checkpoint_every=2",
    "train.log_every=1", "train.lr=2e-3", "val.max_windows=8", "precision=fp32", "device=cpu", "wandb.mode=disabled",
]  # fmt: skip


@cache  # it takes as long as a tiny training
def _composed(name: str, *overrides: str):
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def composed(*overrides, name="train", schema=TrainConfig):
    return checked(_composed(name, *overrides), schema)


def run(folder: Path, *overrides, resume: bool = False, ranks: Ranks = ALONE) -> Trainer:
    """Train in this process, as main does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = composed(*overrides)
    if resume:
        changes = [o for o in overrides if o.split("=")[0] in RESUMABLE]
        config = resumed(composed(*overrides, f"resume='{folder}'"), [*changes, f"resume={folder}"])
    trainer = Trainer(config, check_settings(config, ranks.world_size), folder, ranks)
    with mock.patch.object(Plot, "save", lambda plot, path: path.write_bytes(b"not drawn")):  # slow; measure/ is tested
        trainer.train()
    return trainer


def weights(folder: Path) -> dict:
    return load_file(latest_checkpoint(folder))


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("speed/")} for row in rows]


def assert_near(folder: Path, whole: Path, rel: float) -> None:
    """The rows of metrics of two runs agree up to rounding; what is null in one is null in the other."""
    assert len(metrics(folder)) == len(metrics(whole))
    for row, other in zip(metrics(folder), metrics(whole), strict=True):
        numbers = {key: value for key, value in other.items() if value is not None}
        assert row == {**dict.fromkeys(row), **{key: pytest.approx(value, rel=rel) for key, value in numbers.items()}}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def measure(*overrides):
    from eval import EvalConfig, evaluate_runs

    return evaluate_runs(composed("wandb.mode=disabled", "device=cpu", *overrides, name="eval", schema=EvalConfig))


def command(script: str, *arguments, cwd: Path, launcher=(sys.executable,), **env) -> subprocess.CompletedProcess:
    words = [*launcher, str(REPOSITORY / script), *arguments]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=240, env={**os.environ, **env})


def records(wandb_folder: Path) -> list[dict]:
    """An offline run's log, read back by wandb's own reader; `wandb leet inspect --json` starts it, in a second."""
    (log,) = wandb_folder.glob("*.wandb")
    reader = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--run-file", log, log.parent]
    text = subprocess.run(reader, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line) for line in text.splitlines()]
