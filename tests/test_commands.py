"""The command train.py, as a user types it, alone and in sweeps."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from model.checkpoint import latest_checkpoint
from runs.folder import next_commands
from runs.settings import CONFIGS
from tests.trained import TINY, command, composed, metrics, run, same, weights


def test_one_command_makes_one_run_folder(corpus, tmp_path):
    words = [*TINY[:-1], *corpus, "name='lr=${train.lr}, {a}'"]
    done = command("train.py", *words, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*_lr_0.002_a_")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.yaml", "metrics.jsonl", "checkpoint", "extrapolation.json", "extrapolation.png", "train.log",
    }  # fmt: skip
    for word in ("device   cpu", "preset=cpu", "model    rope: ", "fingerprint", "wandb    run ", "time     about"):
        assert word in done.stdout
        assert word in (folder / "train.log").read_text(encoding="utf-8")
    assert re.search(r"^ *64 ", done.stdout, re.M)  # the table's last row, in ASCII
    assert "Error" not in done.stderr
    following = re.findall(r"^  (python|wandb) (\S+) (\S+)", done.stdout, re.M)
    assert following == [
        ("python", "eval.py", f"runs={folder.relative_to(tmp_path)}"),
        ("wandb", "leet", "outputs/wandb"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]
    rows = json.loads((folder / "extrapolation.json").read_text())["rows"]
    assert [row["length"] for row in rows] == [16, 20, 24, 32, 64]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["pos=rope"], "python train.py pos=alibi "),
        (["pos=alibi"], "python train.py pos=rope "),
        (["data=task", "task=sort"], "python train.py data=task task=sort pos=alibi "),
        (["data=files", "data.path=a.txt"], None),  # what it would take to train on the same text is not known
    ],
)
def test_another_scheme_is_suggested_where_the_command_is_short(settings, line):
    lines = next_commands(Path("outputs/a"), composed(*settings)).splitlines()
    assert [found.strip().startswith(line or "python eval.py") for found in lines[1:2]] == [True]


def test_a_refusal_is_one_message_and_leaves_no_folder(corpus, tmp_path):
    for words, message in (
        (["model.width=100"], "error: model.width=100"),
        (["model.train_length=100000"], "error: model.train_length=100000: a window and its target"),
        (["resume=nowhere"], "error: nowhere: not a run folder"),
    ):
        done = command("train.py", *([*TINY, *corpus] if "resume" not in words[0] else []), *words, cwd=tmp_path)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.glob("outputs/*"))


@pytest.mark.slow
def test_a_misspelt_setting_is_hydras_message_and_leaves_nothing(tmp_path):
    done = command("train.py", "train.max_step=5", cwd=tmp_path)
    assert done.returncode == 1
    assert "max_step" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_is_resumed_in_its_own_folder_only(corpus, tmp_path):
    for other in ("a", "b"):
        done = command("train.py", *TINY, *corpus, f"hydra.run.dir={other}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = command("train.py", "resume=a", "hydra.run.dir=b", "train.max_steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {other: latest_checkpoint(tmp_path / other).stem for other in ("a", "b")}
    assert found == {"a": "step_000006", "b": "step_000004"}


@pytest.mark.slow
def test_multirun_trains_all_jobs_and_names_each_that_fails(corpus, tmp_path):
    done = command("train.py", "-m", *TINY, *corpus, "pos=learned,rope", "seed=-1,-2,0", cwd=tmp_path)
    assert done.returncode != 0
    folders = {path.name.split("_", 2)[2] for path in tmp_path.glob("outputs/*_16_seed*")}
    assert folders == {f"{pos}_16_seed0" for pos in ("learned", "rope")}
    for seed in (-1, -2):
        assert f"seed={seed}: must be" in done.stderr


@pytest.mark.slow
def test_sweeps_in_other_processes_train_what_one_process_trains(corpus, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")
    settings = [*TINY, *corpus, "pos=rope,none", "name=${pos.name}"]
    for launcher in ("basic", "joblib", "submitit_local"):
        done = command("train.py", "-m", f"hydra/launcher={launcher}", *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for pos in ("rope", "none"):
        one, *others = sorted(tmp_path.glob(f"outputs/*_{pos}"))
        assert len(others) == 2
        for other in others:
            assert same(weights(one), weights(other))
            assert metrics(one) == metrics(other)


@pytest.mark.slow
def test_optuna_gets_the_validation_loss_and_goes_on_after_a_trial_that_fails(corpus, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed")
    sweep = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.sampler.seed=1",
    ]
    tiny = [word for word in TINY if not word.startswith("train.lr=")]
    for _ in range(2):
        done = command("train.py", "-m", *sweep, *tiny, *corpus, "train.lr=choice(1e-3,1e30,1e-2)", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "the loss is nan" in done.stderr
    losses = {}
    for folder in tmp_path.glob("outputs/*_rope_16_seed0*"):
        rows = [row for row in metrics(folder) if "val/loss" in row]
        if rows:
            losses[OmegaConf.load(folder / "config.yaml").train.lr] = rows[-1]["val/loss"]
    assert losses
    results = list((tmp_path / "outputs").glob("*optimization_results*.yaml"))
    assert len(results) == 2  # a later sweep leaves an earlier one's results alone
    for path in results:
        best = OmegaConf.load(path)
        assert best.best_value == min(losses.values())
        assert losses[float(best.best_params["train.lr"])] == best.best_value


def test_help_names_every_group_and_choice_and_only_settings_that_exist(tmp_path):
    groups = {path.name: [choice.stem for choice in path.glob("*.yaml")] for path in CONFIGS.iterdir() if path.is_dir()}
    groups.pop("hydra", None)
    done = command("train.py", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert list(tmp_path.iterdir()) == []
    config = composed()
    shown = set(re.findall(r"(?<![\w'.-])([a-z_]+(?:\.[a-z_]+)*)=", done.stdout))
    shown -= {*groups, "group", "setting", "install"}
    assert len(shown) >= 10
    for key in shown:
        *parents, last = key.split(".")
        assert last in (OmegaConf.select(config, ".".join(parents)) if parents else config), key
    for group in groups:
        for word in (group, *groups[group]):
            assert re.search(rf"\b{word}\b", done.stdout), word


@pytest.mark.slow
def test_a_run_trained_here_is_what_the_command_trains(corpus, tmp_path):
    run(tmp_path / "here", *TINY, *corpus)
    done = command("train.py", *TINY, *corpus, "hydra.run.dir=there", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(weights(tmp_path / "here"), weights(tmp_path / "there"))
