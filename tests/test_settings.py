"""Every choice of every group composes, passes its schema, and builds what it describes; wrong settings are refused."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from data import DataConfig
from eval import default_lengths
from model import GPT, GPTConfig
from model.positions import SCHEMES
from model.scaling import SCALINGS
from runs.devices import pick_device, pick_precision
from runs.settings import CONFIGS, TrainConfig, check_settings, checked, run_dir
from runs.tracking import new_wandb_id

GROUPS = ("preset", "model", "layers", "pos", "scaling", "data", "task", "tokenizer", "experiment")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]


def composed(*overrides):
    path = ["data.path=x"] if {"data=files", "data=hub", "data=bin"} & {*overrides} else []
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return checked(compose("train", overrides=[*overrides, *path]), TrainConfig)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_builds(group, choice, monkeypatch):
    # GPT-2's vocabulary needs a download; its size is all that is needed here
    sizes = {"bytes": 257, "gpt2": 50257}
    found = lambda name, vocab_size: type("T", (), {"vocab_size": vocab_size or sizes[name]})  # noqa: E731
    monkeypatch.setattr("runs.settings.get_tokenizer", found)
    # LongRoPE's divisors come from a search: there are no defaults to build with
    needed = [f"scaling.{side}={[1.0] * 32}" for side in ("short", "long")] if choice == "longrope" else []
    needed += ["model.n_layer=6"] * (choice == "gemma3")
    needed += {"task": ["data=task"], "data": ["task=copy"] * (choice == "task")}.get(group, [])
    config = composed(f"{group}={choice}", *needed)
    DataConfig(**config.data)
    with torch.device("meta"):
        model = GPT(check_settings(config))
    assert model.pos.__class__ is SCHEMES[config.pos.name]
    if group not in ("experiment", "preset", "task") and choice != "task":  # files of settings all over
        for key, value in OmegaConf.load(CONFIGS / group / f"{choice}.yaml").items():
            block = config["model" if group == "layers" else group]
            assert block[key] == value or needed  # a chosen group wins over the primary file


def test_every_scheme_and_scaling_has_a_file_that_lists_its_keys():
    files = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONFIGS / "pos").glob("*.yaml")}
    assert set(files) == set(SCHEMES)
    for name, keys in files.items():
        assert keys == GPTConfig(vocab_size=2, pos={"name": name}).pos
    files = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONFIGS / "scaling").glob("*.yaml")}
    assert set(files) == {"none", *SCALINGS}
    for name, keys in files.items():
        if name not in ("none", "longrope"):
            assert keys == GPTConfig(vocab_size=2, scaling={"name": name}).scaling
    assert set(files["longrope"]) == {"name", "factor", "short", "long"}


@pytest.mark.parametrize("cuda", [False, True])
def test_the_preset_follows_the_machine_and_the_groups_follow_the_preset(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    config = composed()
    expected = ("gpu", 12, "wikitext103", "gpt2") if cuda else ("cpu", 4, "stdlib", "bytes")
    assert (config.preset, config.model.n_layer, config.data.name, config.tokenizer.name) == expected
    other = composed(f"preset={'cpu' if cuda else 'gpu'}")
    assert other.preset != config.preset
    assert other.model.n_layer != config.model.n_layer
    mixed = composed("preset=gpu", "data=stdlib", "tokenizer=bytes", "model.n_layer=3")
    assert (mixed.data.name, mixed.tokenizer.name) == ("stdlib", "bytes")
    assert (mixed.model.n_layer, mixed.model.n_head) == (3, 12)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pos=rop", "Could not find 'pos/rop'"),
        ("train.max_step=3", "max_step"),
        ("+train.max_step=3", "max_step"),
        ("+extra=3", "extra"),
        ("train.max_steps=many", "many"),
        ("seed=-1", "seed=-1"),
        ("train.max_steps=0", r"train\.max_steps=0: must be .* at least 1"),
        ("train.lr=0", r"train\.lr=0"),
        ("train.lr=nan", r"train\.lr=nan"),
        ("train.beta2=1", r"train\.beta2=1"),
        ("train.weight_decay=-1", r"train\.weight_decay=-1"),
        ("train.grad_clip=0", r"train\.grad_clip=0"),
        ("train.peak_flops=inf", r"train\.peak_flops=inf"),
        ("train.compile=maybe", r"train\.compile"),
        ("train.compile=1", r"train\.compile=1"),
        ("val.multiples=[nan]", r"val\.multiples=\[nan\]"),
        ("pos=t5,train.position_range=4", r"train\.position_range=4\.0: pos=t5 needs positions in a row"),
        ("train.position_range=0.5", r"train\.position_range=0\.5: must be .* at least 1"),
        ("sharding=half", r"sharding='half': use none, fsdp"),
        ("wandb.mode=on", r"wandb\.mode='on'"),
        ("val.stride=0", r"val\.stride=0"),
        ("model.width=100", r"model\.width=100"),
        ("model.n_kv_head=3", r"model\.n_kv_head=3"),
        ("model.attention=fast", r"model\.attention='fast'"),
        ("scaling=yar", "Could not find 'scaling/yar'"),
        ("scaling=longrope", r"scaling\.short=None"),
        ("+pos.bas=3", r"pos\.bas"),
        ("pos.base=-3", r"pos\.base=-3"),
        ("tokenizer.name=gpt9", r"tokenizer\.name='gpt9'"),
        ("train.schedule=step", r"train\.schedule='step': use cosine, linear"),
        ("data=task", "data=task needs task=<name>, out of copy, "),
        ("task=copy", "data=stdlib: data=task needs task=<name>"),
    ],
)
def test_wrong_settings_are_refused_by_name(override, words):
    with pytest.raises((ValueError, HydraException), match=words):
        check_settings(composed("preset=cpu", *override.split(",")))


def test_processes_share_a_batch_evenly():
    with pytest.raises(ValueError, match=r"train\.batch_size=16.*multiple of the 3 processes"):
        check_settings(composed("train.batch_size=16"), 3)


def test_devices_and_precisions_are_refused_by_name():
    for name in ("gpu", "cuda:x", "cuda:99", "mps"):
        if not (name == "mps" and torch.backends.mps.is_available()):
            with pytest.raises(ValueError, match=f"device=.?{name}"):
                pick_device(name)
    for name in ("fp8", "fp16"):
        with pytest.raises(ValueError, match=f"precision=.?{name}"):
            pick_precision(name, torch.device("cpu"))
    assert pick_precision("auto", torch.device("cpu")) in ("bf16", "fp32")


def test_new_runs_never_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:  # started in the same second
        first, second, *others = pool.map(lambda _: run_dir(None, "a/b"), range(40))
    assert len({first, second, *others}) == 40
    assert Path(first).parent == Path(second).parent == Path("outputs")
    assert run_dir(first, "x") != first  # no run to resume: the error about it must not need its folder
    (Path(first) / "config.yaml").touch()
    assert run_dir(first, "x") == first
    assert Path(run_dir(None, "a", "sweep")).is_relative_to("sweep")
    monkeypatch.setenv("RANK", "1")  # by itself it is somebody else's variable
    assert Path(run_dir(None, "a")).is_relative_to("outputs")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_dir(None, "a") == "."


def test_a_folders_name_needs_no_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path(run_dir(None, """lr=0.1, 'a' "b" {c} [d] $e é_1e-3+2""")).name
    assert name.split("_", 2)[2] == "lr_0.1_a_b_c_d_e_é_1e-3+2"


def test_the_experiments_are_the_documented_ones():
    swept = OmegaConf.load(CONFIGS / "experiment" / "train_short_test_long.yaml").hydra.sweeper.params
    assert set(swept.pos.split(",")) == set(SCHEMES)
    study = "experiment=train_short_test_long"
    chosen = {pos: composed(study, f"pos={pos}").train.pos_lr_ratio for pos in ("fire", "rope")}
    assert chosen == {"fire": 10, "rope": 1}
    assert composed(study, "pos=fire", "train.pos_lr_ratio=3").train.pos_lr_ratio == 3
    config = composed("experiment=press2021")
    assert default_lengths(config.model.train_length, config.val.multiples) == [512, 612, 712, 1012, 1512, 2512, 5512]
    assert (config.model.n_layer, config.model.n_head) == (12, 12)
    assert (config.data.name, config.tokenizer.name) == ("wikitext103", "gpt2")


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
