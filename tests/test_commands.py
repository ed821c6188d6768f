"""The commands, as a user types them."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf

from data import get_tokenizer
from eval import EvalConfig
from model import load_run
from runs import CONFIGS, TrainConfig, new_wandb_id
from tests.trained import REPOSITORY, TINY, command, composed, metrics, records, run, same, weights


def test_command_line_from_training_to_the_curve_in_wandb(corpus, tmp_path):
    settings = [setting for setting in TINY if not setting.startswith("wandb")]
    done = command("train.py", *settings, *corpus, "pos=rope", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*_rope_16_seed0")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.yaml", "metrics.jsonl", "checkpoint", "extrapolation.json", "extrapolation.png", "train.log",
    }  # fmt: skip
    for word in ("preset   cpu", "device   cpu", "model    rope: ", "parameters", "fingerprint", "wandb    offline"):
        assert word in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]

    measured = command("eval.py", "protocol=nonoverlapping", "lengths=[16,40]", cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    rows = json.loads((folder / "extrapolation.json").read_text())["rows"]
    lines = measured.stdout.splitlines()
    table = lines.index("nonoverlapping windows")
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["length", "16", "40"]

    first, second = sorted(tmp_path.glob("outputs/wandb/offline-run-*"))
    run_id = OmegaConf.load(folder / "config.yaml").provenance.wandb_id
    assert first.name.endswith(f"{run_id}-train1")
    assert second.name.endswith(run_id)  # the same run, not a new one
    text = json.dumps(records(first))
    for name in ("train/loss", "val/perplexity_64", "speed/tokens_per_second", "extrapolation/final/perplexity"):
        assert name in text
    text = json.dumps(records(second))
    for name in ("extrapolation/nonoverlapping/perplexity", "by_position/nll", "by_position/position", "paired"):
        assert name in text
    tables = [path for path in second.rglob("*.table.json") if path.name.startswith("paired")]
    assert [row[:3] for row in json.loads(tables[0].read_text())["data"]] == [["nonoverlapping", 40, "length 16"]]
    assert str(rows[1]["perplexity"]) in text


def test_multirun_trains_all_jobs_and_reports_the_one_that_fails(corpus, tmp_path):
    done = command("train.py", "-m", *TINY, *corpus, "pos=learned,rope", "seed=-1,0", cwd=tmp_path)
    assert done.returncode != 0
    folders = {path.name.split("_", 2)[2]: path for path in tmp_path.glob("outputs/*_16_seed*")}
    assert set(folders) == {f"{pos}_16_seed{seed}" for pos in ("learned", "rope") for seed in (-1, 0)}
    for name, folder in folders.items():
        log = (folder / "train.log").read_text()
        assert ("Traceback" in log and "seed=-1" in log) == name.endswith("-1")
        assert (folder / "checkpoint").exists() == name.endswith("0")
    assert "seed=-1: must be at least 0" in done.stderr


def test_an_error_is_one_message_without_a_traceback(corpus, tmp_path):
    done = command("train.py", *TINY, *corpus, "model.width=100", cwd=tmp_path)
    assert done.returncode == 1
    assert "model.width=100" in done.stderr
    assert "Traceback" not in done.stderr
    for other in ("a", "b"):
        done = command("train.py", *TINY, *corpus, f"hydra.run.dir={other}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = command("train.py", "resume=a", "hydra.run.dir=b", "train.max_steps=6", cwd=tmp_path)
    assert done.returncode == 1
    assert "hydra.run.dir=" in done.stderr
    assert "not with resume=" in done.stderr
    done = command("eval.py", "runs=nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere: not a run folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_says_how_to_go_on(corpus, tmp_path):
    settings = [*TINY, *corpus, "train.max_steps=100000", "hydra.run.dir=run"]
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *settings],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore Ctrl-C, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not list((tmp_path / "run").glob("checkpoint/*.safetensors")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"resume={tmp_path / 'run'}" in said
    assert "Traceback" not in errors
    steps = max(row["step"] for row in metrics(tmp_path / "run")) + 4
    done = command("train.py", "resume=run", f"train.max_steps={steps}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = [row["step"] for row in metrics(tmp_path / "run") if "train/loss" in row]
    assert written == list(range(1, steps + 1))


def test_two_processes_train_what_one_trains(corpus, tmp_path):
    settings = [*TINY, *corpus, "train.micro_batch_size=1", "name=run"]
    one = tmp_path / "one"
    run(one, *settings)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = command("train.py", *settings, cwd=tmp_path, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    (two,) = tmp_path.glob("outputs/*")  # one folder
    for name, tensor in weights(two).items():
        torch.testing.assert_close(tensor, weights(one)[name], rtol=0, atol=1e-5)
    for row, expected in zip(metrics(two), metrics(one), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    # a sweep's second job finds the processes joined already
    done = command("train.py", "-m", *settings, "seed=1,2", cwd=tmp_path, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("outputs/*/extrapolation.json"))) == 3


def test_sampling_streams_what_the_model_says(two_runs, tmp_path):
    """Greedy text from the command is GPT.generate's; any text can be a prompt; prompts in one batch are as alone."""
    settings = [
        "task=sample",
        f"runs={two_runs / 'rope'}",
        "tokens=40",
        "temperature=0",
        "precision=fp32",
        "device=cpu",
    ]
    odd = 'f(x): ${y} = {"a": [1,\\n]} \\'
    shown = {}
    for prompt in ("document 1", odd, ""):
        done = command("eval.py", *settings, f"prompt={prompt}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        text, _, last = done.stdout.removesuffix("\n").rpartition("\n")
        assert re.fullmatch(r"\d+ tokens in [\d.]+ s: \d+ tokens/s, rope_16_seed0 on cpu in fp32", last)
        shown[prompt] = text
    model, tokenizer = load_run(two_runs / "rope"), get_tokenizer("bytes")
    for prompt, text in shown.items():
        ids = tokenizer.encode([prompt])[0] or [tokenizer.end_of_document]
        new = model.generate(torch.tensor([ids]), 40)[0, len(ids) :].tolist()  # 16 positions were trained
        if tokenizer.end_of_document in new:
            new = new[: new.index(tokenizer.end_of_document) + 1]
        assert text == prompt + tokenizer.decode(new)
    both = command("eval.py", *settings, "prompt=['document 1','']", cwd=tmp_path)
    assert both.stdout.startswith("\n\n".join([shown["document 1"], shown[""]]))
    assert list(tmp_path.iterdir()) == []


def test_sampling_refuses(two_runs, tmp_path):
    for settings, words in (
        (["tokens=0"], "tokens=0"),
        (["temperature=-1"], "temperature=-1"),
        (["top_k=0"], "top_k=0"),
        (["scalings=[yarn]"], "scalings= and task=sample"),
        ([f"runs=[{two_runs / 'rope'},{two_runs / 'learned'}]"], "takes one run"),
        ([f"runs={two_runs / 'learned'}", "prompt=longer than the table"], "past the learned table"),
        (["task=sing"], "use measure or sample"),
    ):
        done = command("eval.py", "task=sample", f"runs={two_runs / 'rope'}", *settings, cwd=tmp_path)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_help_names_every_group_and_choice_and_only_settings_that_exist(tmp_path):
    groups = {path.name: [choice.stem for choice in path.glob("*.yaml")] for path in CONFIGS.iterdir() if path.is_dir()}
    for name, schema in (("train", TrainConfig), ("eval", EvalConfig)):
        done = command(f"{name}.py", "--help", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 120
        config = composed(name=name, schema=schema)
        shown = set(re.findall(r"(?<![\w'.-])([a-z_]+(?:\.[a-z_]+)*)=", done.stdout)) - {
            *groups,
            "group",
            "setting",
            "install",
        }
        assert len(shown) >= 10
        for key in shown:
            *parents, last = key.split(".")
            assert last in (OmegaConf.select(config, ".".join(parents)) if parents else config), key
        for group in groups if name == "train" else ["scaling"]:
            for word in (group, *groups[group]):
                assert re.search(rf"\b{word}\b", done.stdout), word


@pytest.mark.parametrize(
    ("script", "word", "name"),
    [
        ("train.py", "train.max_step=5", "train.max_steps"),
        ("train.py", "pos=ropee", "pos=rope"),
        ("train.py", "pos.bse=5", "pos.base"),
        ("train.py", "+modl.n_layer=2", "model.n_layer"),
        ("eval.py", "protocl=sliding", "protocol"),
    ],
)
def test_a_misspelt_setting_is_met_with_the_nearest_one(script, word, name, tmp_path):
    done = command(script, word, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{word}: did you mean {name}?"
    assert "Traceback" not in done.stderr


def test_sweeps_in_parallel_processes_train_what_one_process_trains(corpus, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    settings = [*TINY, *corpus, "pos=rope,none", "name=${pos.name}"]
    for launcher in ("basic", "joblib"):
        done = command("train.py", "-m", f"hydra/launcher={launcher}", *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for pos in ("rope", "none"):
        one, other = sorted(tmp_path.glob(f"outputs/*_{pos}"))
        assert same(weights(one), weights(other))
        assert metrics(one) == metrics(other)


def test_optuna_gets_the_validation_loss(corpus, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed")
    sweep = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "train.lr=tag(log,interval(1e-4,1e-1))"]
    done = command("train.py", "-m", *sweep, *TINY, *corpus, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = {}
    for folder in tmp_path.glob("outputs/*_rope_16_seed0*"):
        (final,) = [row for row in metrics(folder) if "val/loss" in row]
        losses[OmegaConf.load(folder / "config.yaml").train.lr] = final["val/loss"]
    assert len(losses) == 2
    best = OmegaConf.load(tmp_path / "outputs" / "optimization_results.yaml")
    assert best.best_value == min(losses.values())
    assert losses[best.best_params["train.lr"]] == best.best_value


def test_a_wandb_sweep_gives_hydra_what_it_understands(monkeypatch):
    """The command of configs/wandb_sweep.yaml, its parameters filled in as wandb's agent does."""
    sweep = OmegaConf.to_container(OmegaConf.load(CONFIGS / "wandb_sweep.yaml"), resolve=False)
    assert sweep["command"] == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    words = [f"{key}={value.get('values', [value.get('value')])[0]}" for key, value in sweep["parameters"].items()]
    config = composed("preset=cpu", *words)
    assert (config.pos.name, config.train.lr, config.name) == ("rope", 1e-3, "rope_256_lr0.001_seed0")
    assert sweep["metric"]["name"] == "val/loss"
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    assert new_wandb_id() != "abc"  # somebody's environment
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    assert new_wandb_id() == "abc"  # the agent's
