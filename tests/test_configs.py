"""Every choice of every group composes, passes its schema, and builds what it describes."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

import data.corpora
import runs
from data import DataConfig
from eval import EvalConfig, default_lengths
from model import GPT, GPTConfig
from model.positions import SCHEMES
from model.scaling import SCALINGS, complete_scaling
from runs import Ranks, TrainConfig, check_flex, check_settings, checked

CONFIGS = Path(__file__).parents[1] / "configs"
GROUPS = ("preset", "model", "pos", "scaling", "data", "tokenizer", "experiment")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]


def composed(*overrides, name="train"):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose(
            name,
            overrides=[*overrides, *(["data.path=x"] if {"data=files", "data=hub", "data=bin"} & {*overrides} else [])],
        )
    return checked(config, TrainConfig if name == "train" else EvalConfig)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_builds(group, choice, monkeypatch):
    # GPT-2's vocabulary needs a download; its size is all that is needed here
    sizes = {"bytes": 257, "gpt2": 50257}
    monkeypatch.setattr("train.get_tokenizer", lambda name, vocab_size: type("T", (), {"vocab_size": sizes[name]}))
    # LongRoPE's divisors come from a search: there are no defaults to build with
    needed = [f"scaling.{side}={[1.0] * 32}" for side in ("short", "long")] if choice == "longrope" else []
    config = composed(f"{group}={choice}", *needed)
    gpt_config = check_settings(config, Ranks())
    DataConfig(**config.data)
    with torch.device("meta"):
        model = GPT(gpt_config)
    assert model.pos.__class__ is SCHEMES[config.pos.name]
    if group != "experiment" and group != "preset":
        chosen = OmegaConf.load(CONFIGS / group / f"{choice}.yaml")
        for key, value in chosen.items():
            assert config[group][key] == value or needed  # a chosen group wins over the primary file


def test_every_scheme_has_a_file_that_lists_its_keys():
    files = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONFIGS / "pos").glob("*.yaml")}
    assert set(files) == set(SCHEMES)
    for name, keys in files.items():
        assert keys == GPTConfig(vocab_size=2, pos={"name": name}).pos


def test_every_scaling_has_a_file_that_lists_its_keys():
    files = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (CONFIGS / "scaling").glob("*.yaml")}
    assert set(files) == {"none", *SCALINGS}
    for name, keys in files.items():
        if name not in ("none", "longrope"):
            assert keys == complete_scaling({"name": name}, 32)
    assert set(files["longrope"]) == {"name", "factor", "short", "long"}


def test_every_corpus_kind_has_a_file():
    kinds = {OmegaConf.load(path).kind for path in (CONFIGS / "data").glob("*.yaml")}
    assert kinds == set(data.corpora.KINDS)


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


def test_presets_are_the_documented_sizes():
    cpu, gpu = composed("preset=cpu"), composed("preset=gpu")
    tokens = [c.train.max_steps * c.train.batch_size * c.model.train_length for c in (cpu, gpu)]
    assert tokens[0] == pytest.approx(3e6, rel=0.15)
    assert tokens[1] == pytest.approx(350e6, rel=0.05)
    assert (cpu.model.n_head * cpu.model.head_dim, gpu.model.n_head * gpu.model.head_dim) == (256, 768)
    assert (cpu.model.train_length, gpu.model.train_length) == (256, 512)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pos=rop", "Could not find 'pos/rop'"),
        ("train.max_step=3", "max_step"),
        ("+train.max_step=3", "max_step"),
        ("+extra=3", "extra"),
        ("train.max_steps=many", "many"),
        ("train.max_steps=1.5", "1.5"),
        ("seed=-1", "seed=-1"),
        ("train.max_steps=0", r"train\.max_steps=0: must be at least 1"),
        ("train.lr=0", r"train\.lr=0"),
        ("train.lr=nan", r"train\.lr=nan"),
        ("train.lr=inf", r"train\.lr=inf"),
        ("train.beta2=1", r"train\.beta2=1"),
        ("train.weight_decay=-1", r"train\.weight_decay=-1"),
        ("train.grad_clip=0", r"train\.grad_clip=0"),
        ("train.compile=maybe", r"train\.compile"),
        ("train.micro_batch_size=3", r"train\.batch_size=16.*multiple"),
        ("val.multiples=[]", r"val\.multiples"),
        ("val.stride=0", r"val\.stride=0"),
        ("model.width=100", r"model\.width=100"),
        ("model.head_dim=63", r"model\.head_dim=63"),
        ("model.n_kv_head=3", r"model\.n_kv_head=3"),
        ("model.dropout=2", r"model\.dropout=2"),
        ("model.attention=fast", r"model\.attention='fast'"),
        ("scaling=yar", "Could not find 'scaling/yar'"),
        ("scaling=longrope", r"scaling\.short=None"),
        ("+scaling={name: yarn, beta: 3}", r"scaling\.beta"),
        ("init_table=stretch", r"init_table='stretch'"),
        ("+pos.bas=3", r"pos\.bas"),
        ("pos.base=-3", r"pos\.base=-3"),
        ("tokenizer.name=gpt9", r"tokenizer\.name='gpt9'"),
        ("tokenizer.vocab_size=300", r"tokenizer\.vocab_size=300: only tokenizer=gpt2"),
        ("data.streaming=true", r"data\.streaming=true"),
        ("data.max_documents=0", r"data\.max_documents=0"),
        ("data.val_fraction=2", r"data\.val_fraction=2"),
        ("data.kind=web", r"data\.kind='web'"),
    ],
)
def test_wrong_settings_are_refused_by_name(override, words):
    with pytest.raises((ValueError, HydraException), match=words):  # noqa: PT012 (either step may refuse)
        config = composed("preset=cpu", override)
        check_settings(config, Ranks())
        DataConfig(**config.data)


@pytest.mark.parametrize(
    ("device", "shape", "deterministic", "words"),
    [
        ("cpu", {}, False, r"flex_attention=true: not on device=cpu; use device=cuda"),
        ("cuda", {"train_length": 100}, False, r"model\.train_length=100; use a multiple of 128"),
        ("cuda", {"dropout": 0.1}, False, r"model\.dropout=0\.1; use 0"),
        ("cuda", {}, True, r"deterministic=false"),
        ("cuda", {}, False, None),
    ],
)
def test_flex_attention_is_refused_where_it_does_not_go(device, shape, deterministic, words):
    config = GPTConfig(vocab_size=257, **{"train_length": 256, **shape})
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        check_flex(torch.device(device), config, deterministic)


def test_evaluation_settings_are_checked():
    assert composed(name="eval").protocol == "sliding"
    for override in ("lengths=[a]", "stride=x", "+strid=3"):
        with pytest.raises((ValueError, HydraException)):
            composed(override, name="eval")


def test_new_runs_never_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:  # started in the same second
        first, second, *others = pool.map(lambda _: runs.run_dir(None, None, "a/b"), range(40))
    assert len({first, second, *others}) == 40
    assert Path(first).parent == Path(second).parent == Path("outputs")
    assert runs.run_dir(first, None, "x") != first  # no run to resume: the error about it must not need its folder
    (Path(first) / "config.yaml").touch()
    assert runs.run_dir(first, None, "x") == first
    monkeypatch.setenv("RANK", "1")  # by itself it is somebody else's variable
    assert Path(runs.run_dir(None, None, "a")).is_relative_to("outputs")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not Path(runs.run_dir(None, None, "a")).is_relative_to("outputs")


def test_the_study_sweeps_every_scheme():
    swept = OmegaConf.load(CONFIGS / "experiment" / "train_short_test_long.yaml").hydra.sweeper.params
    assert set(swept.pos.split(",")) == set(SCHEMES)
    assert swept.seed == "0,1,2"


def test_the_comparison_with_press_et_al_has_their_lengths():
    config = composed("experiment=press2021")
    assert default_lengths(config.model.train_length, config.val.multiples) == [512, 612, 712, 1012, 1512, 2512, 5512]
    assert (config.model.n_layer, config.model.n_head, config.data.name, config.tokenizer.name) == (
        12,
        12,
        "wikitext103",
        "gpt2",
    )
