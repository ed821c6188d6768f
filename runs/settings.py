"""Settings of a training: what there is, of what type, and what is refused before any work is done."""

import itertools
import logging
import math
import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from hydra.experimental.callback import Callback
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data import DataConfig, TokenFiles, get_tokenizer
from model import GPTConfig
from model.checks import check_whole
from runs.tracking import MODES

CONFIGS = Path(__file__).parents[1] / "configs"

log = logging.getLogger("ropewalk")


@dataclass
class WandbSettings:
    mode: str = "auto"
    project: str = "ropewalk"
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class TrainSettings:
    max_steps: int = MISSING
    batch_size: int = MISSING
    micro_batch_size: int | None = None
    lr: float = MISSING
    min_lr_ratio: float = MISSING
    warmup_steps: int = MISSING
    weight_decay: float = MISSING
    beta1: float = MISSING
    beta2: float = MISSING
    grad_clip: float = MISSING
    position_range: float = 1.0
    compile: Any = "auto"
    tf32: bool = True
    peak_flops: float | None = None
    eval_every: int = MISSING
    checkpoint_every: int = MISSING
    log_every: int = MISSING
    keep: int = 2


@dataclass
class ValSettings:
    multiples: list[float] = MISSING
    stride: int | None = None
    max_targets: int | None = None


@dataclass
class TokenizerSettings:
    name: str = MISSING
    vocab_size: int | None = None


@dataclass
class TrainConfig:
    """Types of train.py's settings; the files in configs/ have the values and say what they mean."""

    name: str = MISSING
    preset: str = MISSING
    seed: int = MISSING
    device: str = "auto"
    precision: str = "auto"
    resume: str | None = None
    init_from: str | None = None
    deterministic: bool = False
    sharding: str = "none"
    profile: bool = False
    model: dict[str, Any] = MISSING  # this and the next two are checked by GPTConfig
    pos: dict[str, Any] = MISSING
    scaling: dict[str, Any] | None = None
    data: DataConfig = MISSING
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    val: ValSettings = field(default_factory=ValSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)


def machine() -> str:
    """The preset for this machine."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def run_dir(resume: str | None, name: str) -> str:
    """The folder of the run to resume, or a new one under outputs/, made here: two runs never share a folder.

    Its name needs no quotes on a command line. The processes of a torchrun job other than the first make none.
    """
    if int(os.environ.get("RANK", "0")) > 0 and "WORLD_SIZE" in os.environ:
        return "."
    if resume and (Path(resume).expanduser() / "config.yaml").is_file():
        return str(Path(resume).expanduser())
    plain_name = re.sub(r"[^\w.+-]+", "_", name)
    stem = Path("outputs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{plain_name}"
    for count in itertools.count(1):
        folder = stem if count == 1 else stem.with_name(f"{stem.name}_{count}")
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            continue


def scheme_name(config: DictConfig) -> str:
    """The position scheme, and what its layers have beside it: `rope[3·window,nope]+sinks`."""
    model, pos = config.model, config.pos
    turning = pos.get("turning", 1)
    name = pos.name + (f"{turning:g}" if turning < 1 else "") + ("_linear" if model.attention == "linear" else "")
    kinds = [(kind, len(list(same))) for kind, same in itertools.groupby(model.get("layers", ["full"]))]
    if kinds != [("full", 1)]:
        name += f"[{','.join(kind if count == 1 else f'{count}·{kind}' for kind, count in kinds)}]"
    return "+".join([name, *filter(None, [model.get("query_scale"), "sinks" if model.get("sinks") else None])])


RESOLVERS = {  # the functions that the YAML files call by name; the only ones
    "machine": machine,
    "choices": lambda group: ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))),
    "by_preset": lambda cpu, gpu, *, _root_: {"cpu": cpu, "gpu": gpu}[_root_.get("preset") or machine()],
    "scheme": lambda *, _root_: scheme_name(_root_),
    "run_dir": run_dir,
    "run_subdir": lambda *run: os.path.relpath(run_dir(*run), "outputs"),
}
for _name, _resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


class Sweep(Callback):
    """What a sweep by optuna needs: a trial that fails does not end it, and a later sweep leaves its results alone."""

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        if "max_failure_rate" in config.hydra.sweeper:
            config.hydra.sweeper.max_failure_rate = 1.0

    def on_multirun_end(self, config: DictConfig, **_) -> None:
        path = Path(config.hydra.sweep.dir) / "optimization_results.yaml"
        if path.exists():
            path.rename(path.with_name(f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{path.name}"))


def checked(config: DictConfig, schema: type) -> DictConfig:
    """The configuration, resolved, against its schema. ValueError for unknown keys and for types that do not fit.

    Hydra checks all but what is added with a plus sign, and what is read from a run folder.
    """
    try:
        return OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0] + f" (setting {error.full_key})") from error


def check_settings(config: DictConfig, world_size: int = 1) -> GPTConfig:
    """The model that the settings describe. ValueError, naming the setting, for what is wrong with any of them."""
    t, micro = config.train, config.train.micro_batch_size or 1
    for key in ("max_steps", "batch_size", "eval_every", "checkpoint_every", "log_every", "keep"):
        check_whole(f"train.{key}", t[key])
    for key in ("train.micro_batch_size", "val.stride", "val.max_targets"):
        check_whole(key, OmegaConf.select(config, key), optional=True)
    check_whole("train.warmup_steps", t.warmup_steps, 0)
    check_whole("seed", config.seed, 0, 2**63 - 1)
    for key in ("lr", "grad_clip", "peak_flops"):
        if t[key] is not None and not 0 < t[key] < math.inf:
            raise ValueError(f"train.{key}={t[key]}: must be a finite number above 0")
    for key, below in {"weight_decay": math.inf, "min_lr_ratio": math.inf, "beta1": 1, "beta2": 1}.items():
        if not 0 <= t[key] < below:
            raise ValueError(f"train.{key}={t[key]}: must be at least 0, and below {below}")
    known = {"train.compile": (True, False, "auto"), "sharding": ("none", "fsdp"), "wandb.mode": MODES}
    for key, values in known.items():
        if (found := OmegaConf.select(config, key)) not in values:
            raise ValueError(f"{key}={found!r}: use {', '.join(map(str, values))}")
    if config.sharding == "fsdp" and t.compile is True:
        raise ValueError("sharding=fsdp: not with train.compile=true; use false, or sharding=none")
    if not config.val.multiples or not all(0 < multiple < math.inf for multiple in config.val.multiples):
        raise ValueError(f"val.multiples={list(config.val.multiples)}: at least one, all finite and above 0")
    if t.batch_size % (world_size * micro):
        raise ValueError(
            f"train.batch_size={t.batch_size}: must be a multiple of train.micro_batch_size={micro} times the number "
            f"of processes, {world_size}"
        )
    plain, vocab_size = OmegaConf.to_container(config), get_tokenizer(**config.tokenizer).vocab_size
    return GPTConfig.from_dict(plain["model"], vocab_size=vocab_size, pos=plain["pos"], scaling=plain["scaling"])


def fitting_lengths(lengths: list[int], train_length: int, files: TokenFiles) -> list[int]:
    """The lengths that the validation text holds. ValueError where a split is shorter than a training window."""
    if min(len(files.train), len(files.val)) <= train_length:
        raise ValueError(
            f"model.train_length={train_length}: a window and its target do not fit into the {len(files.train)} "
            f"training and the {len(files.val)} validation tokens of {files.meta['corpus']}; use a shorter one or more "
            "text"
        )
    fitting = [length for length in lengths if length < len(files.val)]
    if left_out := lengths[len(fitting) :]:
        log.warning("validation split of %d tokens: lengths %s are left out", len(files.val), left_out)
    return fitting
