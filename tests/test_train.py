"""Training: the arithmetic of a step, resuming bit for bit, and the commands as a user types them."""

import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

import train
from data import draw_batch
from model import GPT, GPTConfig, load_run
from model.checkpoint import checkpoints, read_best
from model.positions import SCHEMES
from runs import MetricsFile, Ranks, check_settings, from_source, read_run, resumed_config
from tests.trained import TINY, composed, measure, metrics, run, same, weights
from train import Trainer, lr_at


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_four_steps_are_two_and_two_more_bit_for_bit(pos, precision, corpus, tmp_path, monkeypatch):
    settings = [*TINY, *corpus, f"pos={pos}", f"precision={precision}", "model.dropout=0.2", "train.micro_batch_size=2"]
    run(tmp_path / "whole", *settings)
    real = Trainer._checkpoint

    def killed(self):
        real(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", *settings)
    assert load_run(tmp_path / "parts") is not None
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    torch.manual_seed(99)  # whatever generator state the new process has must not matter
    run(tmp_path / "parts", *settings, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    steps = [row["step"] for row in metrics(tmp_path / "parts") if "train/loss" in row]
    assert steps == [1, 2, 3, 4]


def test_a_step_is_adamw_on_the_mean_loss_of_the_batch(corpus, tmp_path):
    """Two steps against the same arithmetic written out: one batch, one mean, clipping, decay on matrices."""
    trainer = run(tmp_path, *TINY, *corpus, "train.max_steps=2", "train.micro_batch_size=1", "train.weight_decay=0.5")
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, n_layer=1, n_head=2, head_dim=8, train_length=16))
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    t = trainer.config.train
    for step in range(2):
        inputs, targets = map(torch.from_numpy, draw_batch(trainer.files.train, 16, 4, 0, step))
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        lr = t.lr * (step + 1) / 2  # warm-up of two steps
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad * min(1.0, t.grad_clip / (norm + 1e-6))
                m, v = moments[name]
                m.mul_(t.beta1).add_(g, alpha=1 - t.beta1)
                v.mul_(t.beta2).addcmul_(g, g, value=1 - t.beta2)
                if p.ndim == 2:
                    p.mul_(1 - lr * 0.5)
                m_hat, v_hat = m / (1 - t.beta1 ** (step + 1)), v / (1 - t.beta2 ** (step + 1))
                p.sub_(lr * m_hat / (v_hat.sqrt() + 1e-8))
        assert metrics(tmp_path)[step]["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics(tmp_path)[step]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=2e-5, msg=name)


def test_accumulation_equals_one_big_batch(corpus, tmp_path):
    for micro in (1, 2, 4):
        run(tmp_path / str(micro), *TINY, *corpus, f"train.micro_batch_size={micro}")
    for micro in (1, 2):
        for row, whole in zip(metrics(tmp_path / str(micro)), metrics(tmp_path / "4"), strict=True):
            assert row == pytest.approx(whole, rel=1e-4)


def test_learning_rate_has_the_known_points():
    t = OmegaConf.create({"lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 10, "max_steps": 111})
    assert [lr_at(step, t) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert lr_at(60, t) == pytest.approx(0.55)  # half-way down the cosine
    assert lr_at(35, t) == pytest.approx(0.1 + 0.9 * (0.5 + math.sqrt(0.5) / 2))
    assert lr_at(110, t) == pytest.approx(0.1)
    assert all(lr_at(step, t) >= lr_at(step + 1, t) for step in range(10, 110))
    t.warmup_steps = 0
    t.max_steps = 1
    assert lr_at(0, t) == 1.0


def test_the_text_is_learned(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus, "train.max_steps=60", "train.eval_every=60", "train.lr=1e-2")
    losses = [row["train/loss"] for row in metrics(tmp_path) if "train/loss" in row]
    assert losses[0] == pytest.approx(math.log(257), abs=0.2)
    assert losses[-1] < 3.0
    final = [row for row in metrics(tmp_path) if "val/loss" in row][-1]
    assert final["val/perplexity"] == pytest.approx(math.exp(final["val/loss"]))
    assert final["val/perplexity_16"] == final["val/perplexity"]
    assert {"val/perplexity_20", "val/perplexity_24", "val/perplexity_32", "val/perplexity_64"} <= final.keys()


@pytest.fixture
def poison(monkeypatch):
    """A function that takes steps, from 1, and has the loss of each be nan, or only its gradient."""

    def poison(steps: dict[int, str]):
        def forward(self, *args, targets=None, **kwargs):
            nll = real(self, *args, targets=targets, **kwargs)
            if self.training and targets is not None:
                calls.append(None)
                kind = steps.get(len(calls))
                nll = nll * math.nan if kind == "loss" else nll + (nll * 0).sqrt() if kind == "gradient" else nll
            return nll

        calls = []
        monkeypatch.setattr(GPT, "forward", forward)

    real = GPT.forward
    return poison


def noted(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("kind", "what"), [("loss", "loss is nan"), ("gradient", "gradient's norm is nan")])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_noted(kind, what, corpus, tmp_path, poison):
    poison({3: kind})
    settings = [*TINY, *corpus, "train.log_every=100"]  # found at the checkpoint's step, named by its own
    with pytest.raises(ValueError, match=rf"step 3: the {what}.*step_000002\.safetensors.*bad_steps\.jsonl"):
        run(tmp_path, *settings)
    assert [path.stem for path in checkpoints(tmp_path)] == ["step_000002"]
    assert all(math.isfinite(tensor.sum()) for tensor in weights(tmp_path).values())
    (row,) = noted(tmp_path)
    assert (row["step"], what in row["found"]) == (3, True)
    # what is noted is the batch: the tokens from there on are those of the step
    tokens = Trainer(config := composed(*settings), check_settings(config, Ranks()), tmp_path, Ranks()).files.train
    inputs, _ = draw_batch(tokens, 16, 4, 0, 2)
    assert np.array_equal(tokens[np.array(row["window_starts"])[:, None] + np.arange(16)], inputs)


def test_bad_steps_are_left_out_up_to_a_number(corpus, tmp_path, poison):
    settings = [*TINY, *corpus, "train.skip_bad_steps=1", "train.max_steps=6", "train.eval_every=6"]
    poison({2: "loss"})
    run(tmp_path / "one", *settings)
    rows = [row for row in metrics(tmp_path / "one") if "train/loss" in row]
    assert [row["train/loss"] is None for row in rows] == [False, True, False, False, False, False]
    assert [row["train/skipped_steps"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert [row["step"] for row in noted(tmp_path / "one")] == [2]
    assert all(math.isfinite(tensor.sum()) for tensor in weights(tmp_path / "one").values())
    poison({2: "gradient", 5: "loss"})
    with pytest.raises(ValueError, match=r"step 5: the .*step_000004\.safetensors"):
        run(tmp_path / "two", *settings)
    assert [row["step"] for row in noted(tmp_path / "two")] == [2, 5]
    # what was left out counts after an interruption too
    poison({1: "loss"})
    with pytest.raises(ValueError, match="step 5: the"):
        run(tmp_path / "two", *settings, resume=True)
    assert [row["step"] for row in noted(tmp_path / "two")] == [2, 5]


def test_a_step_left_out_changes_no_weight_and_no_moment(corpus, tmp_path, poison):
    poison({2: "loss"})
    trainer = run(tmp_path, *TINY, *corpus, "train.skip_bad_steps=3", "train.max_steps=2", "train.checkpoint_every=1")
    first, second = (load_file(path) for path in checkpoints(tmp_path))
    assert same(first, second)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {1}


def test_the_last_checkpoints_and_the_best_one_are_kept(corpus, tmp_path, monkeypatch):
    real = Trainer._measure

    def measured(self):
        measurement = real(self)
        measurement.row(16)["nll"] = next(losses)
        return measurement

    monkeypatch.setattr(Trainer, "_measure", measured)
    losses = iter([5.0, 3.0, 4.0, 4.5, 4.25, 4.75])
    settings = ["train.max_steps=6", "train.eval_every=1", "train.checkpoint_every=3", "train.keep=1"]
    run(tmp_path, *TINY, *corpus, *settings)
    assert [path.stem for path in checkpoints(tmp_path)] == ["step_000002", "step_000006"]
    assert read_best(tmp_path) == (2, 3.0)
    losses = iter([4.75, 2.0])
    run(tmp_path, *TINY, *corpus, *settings[1:], "train.max_steps=7", resume=True)
    assert [path.stem for path in checkpoints(tmp_path)] == ["step_000007"]
    assert read_best(tmp_path) == (7, 2.0)


def test_a_report_that_fails_costs_no_steps_and_can_be_made_up(corpus, tmp_path, monkeypatch):
    run(tmp_path / "whole", *TINY, *corpus)
    with monkeypatch.context() as patch:
        patch.setattr(train.Report, "write", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "parts", *TINY, *corpus, "train.checkpoint_every=3")
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    run(tmp_path / "parts", *TINY, *corpus, resume=True)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    reports = [json.loads((tmp_path / name / "extrapolation.json").read_text())["rows"] for name in ("parts", "whole")]
    assert reports[0] == reports[1]


def test_a_run_named_by_an_interpolation_can_be_read_again(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "name=${pos.name}_x"])
    run(tmp_path, *TINY, *corpus, "name=${pos.name}_x")
    config, origin = read_run(tmp_path)
    assert config.name == "rope_x"
    assert origin["command"] == "train.py 'name=${pos.name}_x'"


@pytest.mark.parametrize("damage", ["", "text", "a: 1", "name: x\nprovenance: {}", "{", "a: &a [*a]"])
def test_a_damaged_config_is_named(damage, two_runs, tmp_path):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    (tmp_path / "copy" / "config.yaml").write_text(damage)
    with pytest.raises(ValueError, match=r"config\.yaml: not a configuration written by train\.py"):
        measure(f"runs={tmp_path / 'copy'}")


def test_the_training_length_is_always_measured(corpus, tmp_path):
    trainer = run(tmp_path, *TINY, *corpus, "val.multiples=[2]")
    assert trainer.lengths == [16, 32]
    final = [row for row in metrics(tmp_path) if "val/loss" in row][-1]
    assert final["val/perplexity"] == final["val/perplexity_16"]


def test_a_folder_that_holds_a_run_is_not_overwritten(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus)
    before = weights(tmp_path)
    with pytest.raises(ValueError, match="holds a run already"):
        run(tmp_path, *TINY, *corpus, "seed=1")
    assert same(weights(tmp_path), before)


def test_gpt2_cut_short_from_the_settings_to_the_report(corpus, tmp_path):
    for size in (300, 400):
        trainer = run(tmp_path / str(size), *TINY, *corpus, "tokenizer=gpt2", f"tokenizer.vocab_size={size}")
        assert trainer.model.config.vocab_size == size
        assert trainer.files.folder.name.startswith(f"files-gpt2-{size}-")
    measure(f"runs=[{tmp_path / '300'},{tmp_path / '400'}]", f"out={tmp_path / 'out'}")
    for size in (300, 400):
        measure(f"runs=[{tmp_path / str(size)}]")
        result = json.loads((tmp_path / str(size) / "extrapolation.json").read_text())
        assert result["tokenizer"] == f"gpt2-{size}"
    assert "bits per byte only" in (tmp_path / "out" / "report.html").read_text()


def test_resuming_refuses_what_would_not_be_the_same_run(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus)
    with pytest.raises(ValueError, match="its 4 steps are done"):
        run(tmp_path, *TINY, *corpus, resume=True)
    config = composed(*TINY, *corpus, f"resume='{tmp_path}'")
    with pytest.raises(ValueError, match=r"pos: cannot change when a run is resumed"):
        resumed_config(config, ["pos=learned", f"resume={tmp_path}"])
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        resumed_config(composed(*TINY, *corpus, "resume=nowhere"), ["resume=nowhere"])
    run(tmp_path, *TINY, *corpus, "train.max_steps=6", resume=True)
    assert [row["step"] for row in metrics(tmp_path) if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    (tmp_path / "extrapolation.json").unlink()
    with pytest.raises(ValueError, match=r"its 6 steps are done; raise train\.max_steps=5"):
        run(tmp_path, *TINY, *corpus, "train.max_steps=5", resume=True)


def test_a_run_made_longer_and_killed_at_its_end_is_still_measured(corpus, tmp_path, monkeypatch):
    run(tmp_path, *TINY, *corpus)
    longer = [*TINY, *corpus, "train.max_steps=6", "train.eval_every=6"]

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "_measure", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, *longer, resume=True)
    run(tmp_path, *longer, resume=True)
    assert json.loads((tmp_path / "extrapolation.json").read_text())["checkpoint"] == "step_000006"


def test_resuming_on_other_data_is_refused(corpus, tmp_path, monkeypatch):
    run(tmp_path, *TINY, *corpus)
    monkeypatch.setattr(train.TokenFiles, "fingerprint", "another")
    with pytest.raises(ValueError, match=r"was trained on data .* is another here"):
        run(tmp_path, *TINY, *corpus, "train.max_steps=6", resume=True)


def test_a_run_can_start_from_anothers_weights(corpus, tmp_path):
    run(tmp_path / "first", *TINY, *corpus)
    run(tmp_path / "second", *TINY, *corpus, f"init_from={tmp_path / 'first'}", "train.lr=1e-12")
    for name, tensor in weights(tmp_path / "second").items():
        torch.testing.assert_close(tensor, weights(tmp_path / "first")[name], rtol=0, atol=1e-9)
    # shapes that fit are not enough: the other layout would scramble every head
    for change in ("model.n_layer=2", "pos.layout=interleaved", "pos=none", "model.attention=linear"):
        with pytest.raises(ValueError, match="its weights are those of another model"):
            run(tmp_path / "third", *TINY, *corpus, f"init_from={tmp_path / 'first'}", change)


@pytest.mark.parametrize("pos", SCHEMES)
def test_every_scheme_trains_and_is_measured_past_its_training_length(pos, corpus, tmp_path):
    for attention in ("softmax", "linear"):
        if attention == "linear" and SCHEMES[pos].biased:
            continue
        folder = tmp_path / attention
        run(folder, *TINY, *corpus, f"pos={pos}", f"model.attention={attention}", "train.lr=1e-2", "train.max_steps=8")
        losses = [row["train/loss"] for row in metrics(folder) if "train/loss" in row]
        assert losses[-1] < losses[0]
        rows = {row["length"]: row["perplexity"] for row in measure(f"runs={folder}", "lengths=[16,64]")[0]["rows"]}
        assert math.isfinite(rows[16])
        assert (rows[64] is None) == (pos == "learned")


@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic", "yarn", "llama3"])
def test_trained_weights_are_stretched_at_evaluation(scaling, two_runs):
    settings = [f"runs={two_runs / 'rope'}", "lengths=[16,64]", f"out={two_runs.parent / scaling}"]
    plain, scaled = measure(*settings)[0], measure(*settings, f"scaling={scaling}")[0]
    assert scaled["scaling"]["name"] == scaling
    # an open factor is length / training length: 1 at the first length, 4 at the second
    assert scaled["rows"][0]["nll"] == plain["rows"][0]["nll"]
    assert scaled["rows"][1]["nll"] != plain["rows"][1]["nll"]
    fixed = measure(*settings, f"scaling={scaling}", "scaling.factor=4")[0]
    if scaling != "dynamic":  # whose factor is another one
        assert fixed["rows"][1]["nll"] == scaled["rows"][1]["nll"]
        assert fixed["rows"][0]["nll"] != plain["rows"][0]["nll"]
    with pytest.raises(ValueError, match=r"on pos=learned: it has no frequencies to scale"):
        measure(f"runs={two_runs / 'learned'}", f"scaling={scaling}")


def test_a_run_goes_on_under_a_scaling_at_a_longer_length(corpus, tmp_path):
    run(tmp_path / "short", *TINY, *corpus)
    start = [f"init_from={tmp_path / 'short'}", "model.train_length=64", "scaling=yarn"]
    config = from_source(composed(*TINY, *corpus, *start))
    assert config.model.original_length == 16
    assert from_source(composed(*TINY, *corpus, *start, "scaling=none")).model.original_length is None
    trainer = Trainer(config, check_settings(config, Ranks()), tmp_path / "long", Ranks())
    plain = GPTConfig(vocab_size=257, n_layer=1, n_head=2, head_dim=8, train_length=16, scaling={"name": "yarn"})
    assert torch.equal(trainer.model.pos.frequencies(64)[0], GPT(plain).pos.frequencies(64)[0])
    (tmp_path / "long").mkdir()
    trainer.train()
    result = measure(f"runs={tmp_path / 'long'}", "lengths=[16,64]")[0]
    assert (result["train_length"], result["scaling"]["name"]) == (64, "yarn")


def test_a_learned_table_of_another_length_is_refused_or_stretched_by_name(corpus, tmp_path):
    run(tmp_path / "short", *TINY, *corpus, "pos=learned")
    longer = [
        *TINY,
        *corpus,
        "pos=learned",
        f"init_from={tmp_path / 'short'}",
        "model.train_length=31",
        "train.lr=1e-12",
    ]
    with pytest.raises(ValueError, match="init_table=interpolate stretches a learned table"):
        run(tmp_path / "refused", *longer)
    run(tmp_path / "long", *longer, "init_table=interpolate")
    short, long = weights(tmp_path / "short")["pos.table"], weights(tmp_path / "long")["pos.table"]
    torch.testing.assert_close(long[::2], short)  # 16 rows to 31: every other row is an old one
    torch.testing.assert_close(long[1::2], (short[1:] + short[:-1]) / 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.train_length=5000"], "train_length=5000.*do not fit into the training split"),
        (["model.train_length=400"], "train_length=400.*do not fit into the validation split"),
        (["val.stride=17"], "val.stride=17: must be at most the shortest length, 16"),
        (["data.path=nowhere.txt"], "no such file"),
    ],
    ids=str,
)
def test_data_that_do_not_fit_are_refused_before_any_work(settings, words, corpus, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, *TINY, *corpus, *settings)
    assert list(tmp_path.iterdir()) == []


def test_lengths_past_the_validation_split_are_left_out(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus, "val.multiples=[1,2,1000]")
    assert [row["length"] for row in json.loads((tmp_path / "extrapolation.json").read_text())["rows"]] == [16, 32]


def test_metrics_of_steps_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": 3}\n{"step": 4, "x')
    file = MetricsFile(path, lambda row: row["step"] <= 2)
    file.write({"step": 3, "x": math.nan})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "x": 1},
        {"step": 2, "x": 2},
        {"step": 3, "x": None},
    ]
