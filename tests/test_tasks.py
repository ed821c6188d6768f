"""Runs of data=task: training, exact match by length, resuming, decoding, and what eval.py makes of them."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import train
from data import Task
from data.tasks import PAD, SEPARATOR, TASKS, padded
from eval import EvalConfig, evaluate_task, sample_text
from measure.answers import measure_task, wilson
from model import GPT, load_run
from model.positions import SCHEMES
from runs.settings import check_settings
from tests.helpers import small_model
from tests.trained import assert_near, command, composed, measure, metrics, run, same, weights

SMALL = [
    "data=task", "task=copy", "model.n_layer=1", "model.n_head=2", "model.head_dim=8", "task.train_max=6",
    "task.test=[[1,6],[7,9]]", "task.strings=40", "train.batch_size=8", "train.max_steps=6", "train.eval_every=3",
    "train.checkpoint_every=2", "train.log_every=1", "device=cpu", "wandb.mode=disabled",
]  # fmt: skip


@pytest.mark.parametrize("pos", SCHEMES)
def test_every_scheme_trains_and_answers(pos, tmp_path):
    run(tmp_path, *SMALL, f"pos={pos}", "task.random_offset=true", "train.max_steps=3")
    found = json.loads((tmp_path / "extrapolation.json").read_text())
    assert [row["range"] for row in found["rows"]] == ["1-6", "7-9"]
    assert all(row["low"] <= row["exact_match"] <= row["high"] for row in found["rows"])


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains(name, tmp_path):
    run(tmp_path, *SMALL, f"task={name}", "task.random_offset=true", "train.max_steps=3", "model.n_layer=1")
    rows = metrics(tmp_path)
    assert all(0 < row["train/loss"] < 9 for row in rows if "train/loss" in row)
    assert {"val/exact_match_1-6", "val/exact_match_7-9"} <= set().union(*rows)


def test_a_step_is_the_mean_loss_of_the_answers(tmp_path):
    trainer = run(tmp_path, *SMALL, "task=majority", "pos=learned", "train.max_steps=1", "task.random_offset=true")
    torch.manual_seed(0)
    model, task = GPT(trainer.model.config), trainer.task
    inputs, targets = map(torch.from_numpy, task.batch(8, 0, 0))
    logits = model(inputs, positions=torch.from_numpy(task.positions(0, 0))).flatten(0, 1)
    assert (targets != -100).sum() == 16  # eight answers and their ends
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
    assert metrics(tmp_path)[0]["train/loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_micro_batches_are_the_same_batch(tmp_path, monkeypatch):
    forward, widths = GPT.forward, set()

    def noted(model, tokens, **how):
        widths.update({tokens.shape[1]} if model.training else ())
        return forward(model, tokens, **how)

    monkeypatch.setattr(GPT, "forward", noted)
    for micro in (2, 8):  # parts of similar lengths leave out their padding
        run(tmp_path / str(micro), *SMALL, "task.random_offset=true", f"train.micro_batch_size={micro}")
    first, second = ([r["train/loss"] for r in metrics(tmp_path / m) if "train/loss" in r] for m in "28")
    assert first == pytest.approx(second, rel=1e-4)
    assert len(widths) > 4


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    settings = [*SMALL, "pos=learned", "task.random_offset=true"]
    run(tmp_path / "whole", *settings)
    update = train.Trainer._update

    def killed(trainer):
        if trainer.step == 5:
            raise KeyboardInterrupt
        update(trainer)

    monkeypatch.setattr("train.Trainer._update", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", *settings)
    monkeypatch.setattr("train.Trainer._update", update)
    run(tmp_path / "parts", *settings, resume=True)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path):
    """Answers of the two shares of a batch differ in length: the mean is over all of them."""
    settings = [*SMALL, "task=addition", "task.train_max=9", "pos=learned", "task.random_offset=true"]
    run(tmp_path / "one", *settings)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = command("train.py", *settings, "hydra.run.dir=two", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert_near(tmp_path / "two", tmp_path / "one", rel=1e-3)


def test_training_stops_at_an_exact_match(tmp_path):
    settings = [*SMALL, "task=majority", "task.stop_at=0.01", "train.max_steps=30"]
    trainer = run(tmp_path, *settings)
    found = [row["val/exact_match_1-6"] for row in metrics(tmp_path) if "val/exact_match_1-6" in row]
    assert [value >= 0.01 for value in found] == [False] * (len(found) - 1) + [True]
    assert 3 * len(found) == trainer.step < 30
    report = json.loads((tmp_path / "extrapolation.json").read_text())
    assert (report["checkpoint"], report["rows"][0]["exact_match"]) == (f"step_{trainer.step:06d}", found[-1])
    assert run(tmp_path, *settings, resume=True).step == trainer.step


@pytest.mark.parametrize("name", ["copy", "majority", "mqar"])
def test_decoded_and_teacher_forced_exact_match_agree(name):
    """On a model that is right now and then: answers decoded one by one with the cache, each fed back."""
    task = Task(name, train_max=8, test=[[4, 8]], strings=60)
    model = small_model({"name": "rope"}, torch.float32, vocab_size=task.vocab_size, train_length=task.train_length)
    fit(model, task)
    right = 0
    for ids, targets in task.test_strings(4, 8):
        text = []
        for i, wanted in zip(ids, targets, strict=True):
            text.append(model.generate(torch.tensor([text]), 1)[0, -1].item() if wanted else i)
        right += text == ids
    (row,) = evaluate_task(model, task)
    assert row["exact_match"] == right / 60
    assert 0 < right < 60 or name == "majority"
    assert name == "mqar" or all(SEPARATOR in ids for ids, _ in task.test_strings(4, 8))


def fit(model, task):
    """Train until the first twenty test strings are right: of all of them, neither all nor none will be."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    strings = task.test_strings(4, 8)[:20]
    inputs, targets = map(torch.from_numpy, padded(strings, max(len(ids) for ids, _ in strings) - 1))
    model.train()
    while True:
        wrong = (model(inputs).argmax(-1) != targets) & (targets != -100)
        if not wrong.any():
            break
        loss = model(inputs, targets=targets).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def test_padding_and_batches_change_no_answer():
    task = Task("copy", train_max=8, test=[[1, 8]], strings=50)
    model = small_model({"name": "alibi"}, torch.float64, vocab_size=task.vocab_size)
    fit(model, Task("copy", train_max=8, test=[[4, 8]], strings=20))
    right = 0
    for ids, wanted in task.test_strings(1, 8):
        inputs, targets = (torch.from_numpy(part) for part in padded([(ids, wanted)], len(ids) - 1))
        assert PAD not in inputs
        right += bool(((model(inputs).argmax(-1) == targets) | (targets == -100)).all())
    assert evaluate_task(model, task)[0]["exact_match"] == right / 50


def test_batches_change_no_answer_under_a_scaling_that_follows_the_length(monkeypatch):
    """Each batch is as wide as its longest string; the frequencies go by the longest of the range instead."""
    task = Task("copy", train_max=8, test=[[4, 8]], strings=60)
    model = small_model({"name": "rope"}, torch.float32, vocab_size=task.vocab_size, train_length=16)
    fit(model, task)
    scaled = GPT(replace(model.config, scaling={"name": "linear"})).eval()
    scaled.load_state_dict(model.state_dict())
    rows = []
    for batch in (1, 7, 60):
        monkeypatch.setattr("measure.answers.BATCH", batch)
        rows.append(evaluate_task(scaled, task))
    assert rows[0] == rows[1] == rows[2]
    assert 0 < rows[0][0]["exact_match"] < 1


def test_wilson_has_the_known_values():
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I, method 3
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert wilson(29, 29) == pytest.approx((0.8830, 1), abs=1e-4)


def test_evaluation_puts_seeds_together(tmp_path, capsys, caplog, monkeypatch):
    def solved(*given):
        found = measure_task(*given)
        found["rows"][0]["exact_match"] = 1.0
        return found

    for pos, seed in (("none", 0), ("none", 1), ("rope", 0)):
        # So that seed ends at half of the steps.
        monkeypatch.setattr(train, "measure_task", solved if seed else measure_task)
        run(tmp_path / f"{pos}{seed}", *SMALL, f"pos={pos}", f"seed={seed}", "task.stop_at=1.0")
    results = measure(f"runs={tmp_path}/*", f"out={tmp_path / 'out'}")
    assert [one["checkpoint"] for one in results] == ["step_000006", "step_000003", "step_000006"]
    assert f"{tmp_path / 'none1'}: step 3 of 6, not trained to its end" in caplog.text  # measured, it is not right
    rows = json.loads((tmp_path / "none0" / "extrapolation.json").read_text())["rows"]
    assert results[0]["rows"] == rows  # as in training
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "exact match by length"
    assert [line.split()[:2] for line in shown[1:3]] == [["model", "seeds"], ["copy_none", "2"]]
    assert {"report.html", "extrapolation.svg", "extrapolation.json"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert "data:image/svg+xml" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "extrapolation.png").stat().st_size > 1000
    monkeypatch.setattr(train, "measure_task", solved)
    run(tmp_path / "rope1", *SMALL, "pos=rope", "seed=1", "task.stop_at=1.0")
    caplog.clear()
    measure(f"runs={tmp_path / 'rope1'}", "scalings=[linear]", f"out={tmp_path / 'scaled'}")
    assert "not trained to its end" not in caplog.text  # what a scaling answers does not say


def test_mfu_counts_what_is_passed(tmp_path):
    run(tmp_path, *SMALL, "task.random_offset=true", "train.peak_flops=1e12", "train.max_steps=1")
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    operations = 3 * load_run(tmp_path).flops_per_token(Task("copy", 6).width) * row["speed/tokens_per_second"]
    assert row["speed/mfu"] == pytest.approx(operations / 1e12)


def test_evaluation_of_a_table_that_ends(tmp_path, capsys):
    run(tmp_path / "run", *SMALL, "pos=learned")
    (result,) = measure(f"runs={tmp_path / 'run'}")
    assert result["rows"][1]["exact_match"] is None
    assert "table ends at 15" in capsys.readouterr().out


def test_what_does_not_fit_tasks_is_refused_by_name(two_runs, tmp_path):
    run(tmp_path / "run", *SMALL, "train.max_steps=1")
    with pytest.raises(ValueError, match=r"lengths=\[5\]: not with runs of data=task"):
        measure(f"runs={tmp_path / 'run'}", "lengths=[5]")
    with pytest.raises(ValueError, match=r"stride=8: not with runs of data=task"):
        measure(f"runs={tmp_path / 'run'}", "stride=8")
    with pytest.raises(ValueError, match=r"recall=True: not with runs of data=task"):
        measure(f"runs={tmp_path / 'run'}", "recall=true")
    with pytest.raises(ValueError, match=r"prompt=: .* whose strings are no text"):
        sample_text(composed(f"runs={tmp_path / 'run'}", "device=cpu", name="eval", schema=EvalConfig))
    with pytest.raises(ValueError, match=r"runs=\[rope_16_seed0\]: not with runs of data=task"):
        measure(f"runs=[{tmp_path / 'run'},{two_runs / 'rope'}]")
    with pytest.raises(ValueError, match=r"model\.train_length=99: leave it out"):
        check_settings(composed(*SMALL, "model.train_length=99"))
    stretched = composed(*SMALL, "scaling=yarn", "model.original_length=5")
    check_settings(stretched)
    assert stretched.scaling.factor == 3.0  # 15 positions of six symbols, given and answered
    with pytest.raises(ValueError, match=r"train\.position_range=2\.0: not with task\.random_offset=true"):
        check_settings(composed(*SMALL, "train.position_range=2", "task.random_offset=true"))
    with pytest.raises(ValueError, match=r"task\.stop_at=2"):
        check_settings(composed(*SMALL, "task.stop_at=2"))
