"""Training: the arithmetic of a step, resuming bit for bit, and the commands as a user types them."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

import train
from data import draw_batch
from eval import EvalConfig, evaluate_runs
from model import GPT, GPTConfig, load_run
from model.positions import SCHEMES
from runs import MetricsFile, Ranks, TrainConfig, checked, read_run
from train import Trainer, check_settings, from_source, lr_at, resumed_config

REPOSITORY = Path(__file__).parents[1]
TINY = [
    "preset=cpu", "data=files", "model.n_layer=1", "model.n_head=2", "model.head_dim=8", "model.train_length=16",
    "train.batch_size=4", "train.max_steps=4", "train.warmup_steps=2", "train.eval_every=4", "train.checkpoint_every=2",
    "train.log_every=1", "val.max_targets=64", "precision=fp32", "device=cpu", "wandb.mode=disabled",
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Forty small documents, and the settings that read them."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [{"text": f"document {i}: " + " ".join(str(i * j % 97) for j in range(40))} for i in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={folder / 'text.jsonl'}", f"data.cache={folder / 'cache'}"]


def composed(*overrides, name="train", schema=TrainConfig):
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        return checked(compose(name, overrides=list(overrides)), schema)


def run(folder: Path, *overrides, resume: bool = False) -> Trainer:
    """Train in this process, as main does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = composed(*overrides)
    if resume:
        changes = [o for o in overrides if o.split("=")[0] == "train.max_steps"]
        config = resumed_config(composed(*overrides, f"resume='{folder}'"), [*changes, f"resume={folder}"])
    trainer = Trainer(config, check_settings(config, Ranks()), folder, Ranks())
    trainer.train()
    return trainer


def weights(folder: Path) -> dict:
    return load_file(next((folder / "checkpoint").glob("*.safetensors")))


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("speed/")} for row in rows]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_the_run(what, corpus, tmp_path, monkeypatch):
    real = Trainer._update

    def poisoned(self):
        step, loss, norm = real(self)
        bad = torch.tensor(math.nan if what == "loss" else math.inf)
        return (step, bad, norm) if what == "loss" and step == 2 else (step, loss, bad if step == 2 else norm)

    monkeypatch.setattr(Trainer, "_update", poisoned)
    settings = [*TINY, *corpus, "train.log_every=100"]  # found at the checkpoint's step, named by its own
    with pytest.raises(ValueError, match=r"step 3: the (loss|gradient).*step_000002\.safetensors"):
        run(tmp_path, *settings)
    assert [path.name for path in (tmp_path / "checkpoint").glob("*.safetensors")] == ["step_000002.safetensors"]
    assert all(math.isfinite(tensor.sum()) for tensor in weights(tmp_path).values())


def test_a_report_that_fails_costs_no_steps_and_can_be_made_up(corpus, tmp_path, monkeypatch):
    run(tmp_path / "whole", *TINY, *corpus)
    with monkeypatch.context() as patch:
        patch.setattr(train, "write_report", lambda *_: 1 / 0)
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


# ---- eval.py on runs that were trained ------------------------------------------------------------------------------


def measure(*overrides):
    return evaluate_runs(composed("wandb.mode=disabled", "device=cpu", *overrides, name="eval", schema=EvalConfig))


@pytest.fixture(scope="module")
def two_runs(corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "outputs"
    for pos in ("learned", "rope"):
        run(root / pos, *TINY, *corpus, f"pos={pos}")
    return root


def test_evaluation_takes_the_latest_run_and_agrees_with_training(two_runs, capsys):
    trained = json.loads((two_runs / "rope" / "extrapolation.json").read_text())
    (result,) = measure(f"root={two_runs}", "max_targets=64", "precision=fp32")
    assert result["pos"]["name"] == "rope"
    assert result["rows"] == trained["rows"]
    assert trained.keys() == result.keys()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["length", "perplexity", "bits/byte", "÷", "at", "16"]
    assert [line.split()[0] for line in lines[1:]] == ["16", "20", "24", "32", "64"]


def test_evaluation_of_two_runs_side_by_side(two_runs, capsys):
    results = measure(f"runs=[{two_runs / 'learned'},{two_runs / 'rope'}]", f"root={two_runs}", "lengths=[16,32]")
    assert [row["perplexity"] is None for row in results[0]["rows"]] == [False, True]
    assert results[0]["rows"][0]["scored"] == results[1]["rows"][0]["scored"]  # the same tokens
    assert "table ends at 16" in capsys.readouterr().out
    (comparison,) = two_runs.glob("*_comparison")
    assert len(json.loads((comparison / "extrapolation.json").read_text())) == 2
    assert (comparison / "extrapolation.png").stat().st_size > 5000
    assert json.loads((two_runs / "learned" / "extrapolation.json").read_text())["rows"][1]["perplexity"] is None
    shutil.rmtree(comparison)


def test_evaluation_on_other_data_says_so(two_runs, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(two_runs / "rope", copy)
    config = OmegaConf.load(copy / "config.yaml")
    config.provenance.fingerprint = "another"
    OmegaConf.save(config, copy / "config.yaml")
    measure(f"runs={copy}")
    assert "was trained on data another" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["runs=[]"], r"runs=\[\]"),
        (["runs=nowhere"], "nowhere: not a run folder"),
        (["root=nowhere"], "no run with a checkpoint under nowhere"),
        (["lengths=[]"], r"lengths=\[\]"),
        (["lengths=[100000]"], "do not fit into"),
        (["stride=17"], "stride=17"),
        (["stride=0"], "stride=0"),
        (["protocol=slide"], "sliding or nonoverlapping"),
        (["max_targets=0"], "max_targets=0"),
        (["device=tpu"], "device='tpu'"),
        (["precision=fp8"], "precision='fp8'"),
        (["wandb.mode=loud"], "'loud'"),
        (["out=pyproject.toml"], r"out=pyproject\.toml: is a file"),
    ],
    ids=str,
)
def test_evaluation_refuses_and_writes_nothing(settings, words, two_runs):
    before = {path: path.stat().st_mtime_ns for path in two_runs.rglob("*")}
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        measure(f"root={two_runs}", *settings)
    assert {path: path.stat().st_mtime_ns for path in two_runs.rglob("*")} == before


def test_a_config_with_interpolations_is_not_read(two_runs, tmp_path):
    shutil.copytree(two_runs / "rope", tmp_path / "copy")
    path = tmp_path / "copy" / "config.yaml"
    path.write_text(path.read_text().replace("name: rope_16_seed0", "name: ${oc.env:HOME}"))
    with pytest.raises(ValueError, match="not a configuration written by"):
        measure(f"runs={tmp_path / 'copy'}")


# ---- the commands, as a user types them -----------------------------------------------------------------------------


def command(script: str, *arguments, cwd: Path, launcher=(sys.executable,)) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*launcher, str(REPOSITORY / script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=240
    )


def records(wandb_folder: Path) -> list[dict]:
    """An offline run's log, read back by wandb's own reader."""
    text = subprocess.run(
        [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", wandb_folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return [json.loads(line) for line in text.splitlines()]


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
    assert [line[:6].strip() for line in measured.stdout.splitlines()[1:4]] == ["length", "16", "40"]

    first, second = sorted(tmp_path.glob("outputs/wandb/offline-run-*"))
    run_id = OmegaConf.load(folder / "config.yaml").provenance.wandb_id
    assert first.name.endswith(run_id)
    assert second.name.endswith(run_id)  # the same run, not a new one
    text = json.dumps(records(first))
    for name in ("train/loss", "val/perplexity_64", "speed/tokens_per_second", "extrapolation/final/perplexity"):
        assert name in text
    text = json.dumps(records(second))
    assert "extrapolation/nonoverlapping/perplexity" in text
    assert str(rows[1]["perplexity"]) in text


def test_a_failed_run_is_a_failed_run_in_wandb_and_the_next_one_is_not(corpus, tmp_path, monkeypatch):
    settings = [*TINY, *corpus, "wandb.mode=offline"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", lambda self, last: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "failed", *settings)
    run(tmp_path / "whole", *settings)
    exits = {}
    for name in ("failed", "whole"):
        run_id = OmegaConf.load(tmp_path / name / "config.yaml").provenance.wandb_id
        (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}")
        text = json.dumps(records(folder))
        exits[name] = re.findall(r'"exit_?[cC]ode": *\\*"?(\d+)', text) or text[-2000:]
    assert exits == {"failed": ["1"], "whole": ["0"]}


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
    assert "together with resume=" in done.stderr
    done = command("eval.py", "runs=nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere: not a run folder" in done.stderr
    assert "Traceback" not in done.stderr


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
