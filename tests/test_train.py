"""Training: the arithmetic of a step, what a run starts from, and what stops it."""

import json
import logging
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from data import draw_batch
from model import GPT, GPTConfig
from model.checkpoint import checkpoints, latest_checkpoint, load_state
from model.positions import SCHEMES, Kerple
from runs import devices
from runs.devices import PEAK_FLOPS, compare_compiled, peak_flops
from runs.folder import MetricsFile, read_run
from tests.trained import REPOSITORY, TINY, assert_near, composed, metrics, run, same, weights
from train import lr_at


@pytest.mark.parametrize(("pos", "pos_lr_ratio"), [("rope", 1), ("t5", 1), ("t5", 5)])
def test_a_step_is_adamw_on_the_mean_loss_of_the_batch(pos, pos_lr_ratio, corpus, tmp_path):
    """Two steps against the same arithmetic written out: one batch, one mean, clipping, decay on matrices."""
    settings = (f"pos={pos}", f"train.pos_lr_ratio={pos_lr_ratio}", "train.weight_decay=0.5")
    trainer = run(tmp_path, *TINY, *corpus, "train.max_steps=2", "train.micro_batch_size=1", *settings)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, n_layer=1, n_head=2, head_dim=8, train_length=16, pos={"name": pos}))
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
                of_scheme = name.startswith("pos.")
                if p.ndim == 2 and not of_scheme:
                    p.mul_(1 - lr * 0.5)
                m_hat, v_hat = m / (1 - t.beta1 ** (step + 1)), v / (1 - t.beta2 ** (step + 1))
                p.sub_(lr * (pos_lr_ratio if of_scheme else 1) * m_hat / (v_hat.sqrt() + 1e-8))
        assert metrics(tmp_path)[step]["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics(tmp_path)[step]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, tensor in weights(tmp_path).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=2e-5, msg=name)


def test_the_optimiser_imports_no_compiler():
    """Its import takes over a second, which every launch would wait for."""
    source = """if True:
        import sys
        import torch
        from train import AdamW
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = AdamW([weight], fused=True)
        (2 * weight).sum().backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        assert "torch._dynamo" not in sys.modules
        assert weight.requires_grad and weight.max() < 1
    """
    subprocess.run([sys.executable, "-c", source], check=True, cwd=REPOSITORY)


def test_schemes_are_constrained_after_each_step(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Kerple, "reset_parameters", lambda pos: [torch.nn.init.zeros_(own) for own in pos.parameters()])
    pos = run(tmp_path, *TINY, *corpus, "pos=kerple", "train.max_steps=1").model.pos
    assert torch.cat([pos.strength, pos.rate]).tolist() == pytest.approx([0.01] * 4)


def test_accumulation_equals_one_big_batch(corpus, tmp_path):
    for micro in (1, 3, 4):  # 3: the last part is smaller
        run(tmp_path / str(micro), *TINY, *corpus, f"train.micro_batch_size={micro}")
    for micro in (1, 3):
        assert_near(tmp_path / str(micro), tmp_path / "4", rel=1e-4)


def test_learning_rate_has_the_known_points():
    t = OmegaConf.create({"schedule": "cosine", "lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 10, "max_steps": 111})
    assert [lr_at(step, t) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert lr_at(60, t) == pytest.approx(0.55)  # half-way down the cosine
    assert lr_at(35, t) == pytest.approx(0.1 + 0.9 * (0.5 + math.sqrt(0.5) / 2))
    assert lr_at(110, t) == pytest.approx(0.1)
    assert all(lr_at(step, t) >= lr_at(step + 1, t) for step in range(10, 110))
    t.schedule = "linear"
    assert [lr_at(step, t) for step in (0, 10, 35, 60, 110)] == pytest.approx([0.1, 1, 0.775, 0.55, 0.1])
    t.warmup_steps = 0
    t.max_steps = 1
    assert lr_at(0, t) == 1.0


@pytest.mark.parametrize("pos", SCHEMES)
def test_every_scheme_learns_the_text(pos, corpus, tmp_path):
    run(tmp_path, *TINY, *corpus, f"pos={pos}", "train.max_steps=40", "train.eval_every=40", "train.lr=1e-2")
    losses = [row["train/loss"] for row in metrics(tmp_path) if "train/loss" in row]
    assert losses[0] == pytest.approx(math.log(257), abs=0.2)
    assert losses[-1] < 3.5
    final = [row for row in metrics(tmp_path) if "val/loss" in row][-1]
    assert final["val/perplexity"] == pytest.approx(math.exp(final["val/loss"]))
    assert final["val/perplexity_16"] == final["val/perplexity"]
    lengths = {int(key.rpartition("_")[2]) for key in final if key.startswith("val/perplexity_")}
    assert lengths == ({16} if pos == "learned" else {16, 20, 24, 32, 64})


def test_the_training_length_is_always_measured(corpus, tmp_path):
    trainer = run(tmp_path, *TINY, *corpus, "val.multiples=[2]")
    assert trainer.scoring.lengths == (16, 32)
    with pytest.raises(ValueError, match="stride=17"):
        run(tmp_path / "refused", *TINY, *corpus, "val.stride=17")


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run(kind, corpus, tmp_path, monkeypatch):
    calls, real = [], GPT.forward

    def forward(self, *args, targets=None, **kwargs):
        nll = real(self, *args, targets=targets, **kwargs)
        if self.training:
            calls.append(None)
        if len(calls) < 3 or not self.training:
            return nll
        return nll * math.nan if kind == "loss" else nll + (nll * 0).sqrt()

    monkeypatch.setattr(GPT, "forward", forward)
    # found at the checkpoint's step, and named by its own
    with pytest.raises(ValueError, match=r"step 3: .*nan.*last good checkpoint: \S+step_000002\.safetensors"):
        run(tmp_path, *TINY, *corpus, "train.log_every=100")
    assert [path.stem for path in checkpoints(tmp_path)] == ["step_000002"]
    assert all(math.isfinite(tensor.sum()) for tensor in weights(tmp_path).values())


def test_the_last_checkpoints_are_kept(corpus, tmp_path):
    settings = ["train.max_steps=5", "train.checkpoint_every=1", "train.keep=3"]
    run(tmp_path, *TINY, *corpus, *settings)
    assert [path.stem for path in checkpoints(tmp_path)] == ["step_000003", "step_000004", "step_000005"]


def test_a_folder_that_holds_a_run_is_not_overwritten(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus)
    before = weights(tmp_path)
    with pytest.raises(ValueError, match="holds a run already"):
        run(tmp_path, *TINY, *corpus, "seed=1")
    assert same(weights(tmp_path), before)


def test_a_run_can_start_from_anothers_weights(corpus, tmp_path):
    run(tmp_path / "first", *TINY, *corpus)
    start = f"init_from={tmp_path / 'first'}"
    run(tmp_path / "second", *TINY, *corpus, start, "train.lr=1e-12")
    for name, tensor in weights(tmp_path / "second").items():
        torch.testing.assert_close(tensor, weights(tmp_path / "first")[name], rtol=0, atol=1e-9)
    # shapes that fit are not enough: the other layout would scramble every head
    for change in ("model.n_layer=2", "pos.layout=interleaved", "pos=t5", "model.attention=linear"):
        with pytest.raises(ValueError, match="its weights are those of another model"):
            run(tmp_path / change, *TINY, *corpus, start, change)
    run(tmp_path / "dropped", *TINY, *corpus, start, "pos=none", "train.lr=1e-12")  # as in DroPE: neither has weights
    for name, tensor in weights(tmp_path / "dropped").items():
        torch.testing.assert_close(tensor, weights(tmp_path / "first")[name], rtol=0, atol=1e-9)
    run(tmp_path / "table", *TINY, *corpus, "pos=learned")
    start = f"init_from={tmp_path / 'table'}"
    with pytest.raises(ValueError, match="train_length=16 there, 32 here"):
        run(tmp_path / "longer", *TINY, *corpus, "pos=learned", start, "model.train_length=32")


@pytest.mark.parametrize("setting", ["pos=fire", "model.query_scale=log"])
def test_what_counts_in_training_lengths_starts_at_the_same_length(setting, corpus, tmp_path):
    run(tmp_path / "first", *TINY, *corpus, setting)
    start = [*TINY, *corpus, setting, f"init_from={tmp_path / 'first'}"]
    run(tmp_path / "same", *start)
    with pytest.raises(ValueError, match="train_length=16 there, 32 here"):
        run(tmp_path / "longer", *start, "model.train_length=32")


def test_what_differs_from_the_run_that_gave_the_weights_is_said(corpus, tmp_path, caplog):
    run(tmp_path / "first", *TINY, *corpus)
    with caplog.at_level("INFO"):
        run(tmp_path / "second", *TINY, *corpus, f"init_from={tmp_path / 'first'}", "pos.base=500", "model.dropout=0.1")
    assert "first; dropout=0.0 there, 0.1 here; base=10000.0 there, 500.0 here" in caplog.text


def test_a_fine_tune_under_a_scaling_fixes_its_factor(corpus, tmp_path, monkeypatch):
    run(tmp_path / "first", *TINY, *corpus)
    settings = [*TINY, *corpus, f"init_from={tmp_path / 'first'}", "model.train_length=32", "scaling=yarn"]
    trainer = run(tmp_path / "longer", *settings)
    assert trainer.model.config.original_length == 16
    assert read_run(tmp_path / "longer")[0].scaling.factor == trainer.model.config.scaling["factor"] == 2.0
    assert run(tmp_path / "given", *settings, "scaling.factor=4").model.config.scaling["factor"] == 4.0
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(tmp_path / "home", *settings, "init_from='~/first'").model.config.scaling["factor"] == 2.0


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.01, True), (1.05, False)])
def test_a_compiled_model_that_computes_something_else_is_noticed(factor, agrees, caplog):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=61, n_layer=1, n_head=2, head_dim=8, train_length=16))
    inputs, targets = torch.randint(61, (2, 4, 16))
    context = torch.autocast("cpu", enabled=False)
    compiled = lambda x, targets: model(x, targets=targets) * factor  # noqa: E731
    with caplog.at_level(logging.WARNING):
        assert compare_compiled(model, compiled, inputs, targets, context) == agrees
    assert ("goes on without torch.compile" in caplog.text) != agrees
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_differs_or_a_compiler_that_fails_is_noticed(caplog):
    model = GPT(GPTConfig(vocab_size=61, n_layer=1, n_head=2, head_dim=8, train_length=16))
    inputs, targets = torch.randint(61, (2, 4, 16))
    context = torch.autocast("cpu", enabled=False)

    def stopped(x, targets):
        nll = model(x, targets=targets)
        return nll.detach() + 0.5 * (nll - nll.detach())  # the same loss, half the gradient

    def broken(x, targets):
        raise RuntimeError("no compiler here")

    assert not compare_compiled(model, stopped, inputs, targets, context)
    assert not compare_compiled(model, broken, inputs, targets, context)
    assert "no compiler here" in caplog.text


def test_a_wrong_compiled_model_is_not_trained_with(corpus, tmp_path, monkeypatch):
    """As on CUDA, with a stand-in for the compiler."""
    run(tmp_path / "eager", *TINY, *corpus)
    monkeypatch.setattr(
        torch, "compile", lambda model: lambda x, targets, **more: model(x, targets=targets, **more) * 2
    )
    monkeypatch.setattr(devices, "COMPILED", ("cpu",))
    run(tmp_path / "auto", *TINY, *corpus)
    assert same(weights(tmp_path / "auto"), weights(tmp_path / "eager"))
    run(tmp_path / "forced", *TINY, *corpus, "train.compile=true")
    assert not same(weights(tmp_path / "forced"), weights(tmp_path / "eager"))


def test_rows_that_json_cannot_hold_are_null_and_half_a_line_is_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1, "train/loss": math.nan, "b": 2.0})
    file.write({"step": 1, "val/loss": 1.0})
    file.write({"step": 2, "train/loss": 1.0})
    with open(path, "a") as end:
        end.write('{"step": 3, "a"')
    MetricsFile(path, 1)
    assert path.read_text() == '{"step": 1, "train/loss": null, "b": 2.0}\n'


def test_mfu_is_recorded_where_the_peak_is_known(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus, "train.peak_flops=1e12")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["speed/mfu"] < 1 for row in rows if "train/loss" in row)


def test_peaks_are_found_by_the_devices_name(monkeypatch):
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-40GB": 312e12, "T4": None}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(SimpleNamespace(type="cuda"), None) == peak
    assert peak_flops(torch.device("cpu"), None) is None
    assert peak_flops(torch.device("cpu"), 1e12) == 1e12
    assert min(PEAK_FLOPS.values()) > 1e13


def test_an_older_run_can_be_read(corpus, tmp_path):
    run(tmp_path, *TINY, *corpus)
    path = tmp_path / "config.yaml"
    text = path.read_text().replace("seed: 0\n", "seed: 0\nrepeat: null\ntrust: false\nprofile: false\n", 1)
    text = text.replace("train:\n", "train:\n  flex_attention: false\n  skip_bad_steps: 0\n", 1)
    path.write_text(re.sub(r"max_windows: \d+", "max_targets: 64", text))
    assert read_run(tmp_path)[0].seed == 0
    assert load_state(latest_checkpoint(tmp_path))["step"] == 4
    assert composed(*TINY).train.compile == "auto"
