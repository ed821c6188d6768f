"""Settings of the two commands: what there is, of what type, and what is refused before any work is done."""

import contextlib
import itertools
import math
import os
import re
from dataclasses import make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data import DataConfig, Task, get_tokenizer
from data.tasks import TASKS
from model import GPTConfig
from model.checkpoint import latest_checkpoint, read_config
from model.positions import SCHEMES
from runs.tracking import MODES

CONFIGS = Path(__file__).parents[1] / "configs"

COUNTS = ("max_steps", "batch_size", "micro_batch_size", "eval_every", "checkpoint_every", "log_every", "keep")
LIMITS = {"seed": (0, 2**63), "train.warmup_steps": (0, math.inf)}  # a number's least, and what it must be below
LIMITS |= dict.fromkeys([*(f"train.{key}" for key in COUNTS), "val.stride", "val.max_windows"], (1, math.inf))
LIMITS |= dict.fromkeys(("train.lr", "train.pos_lr_ratio", "train.grad_clip", "train.peak_flops"), (1e-30, math.inf))
LIMITS |= dict.fromkeys(("train.weight_decay", "train.min_lr_ratio"), (0, math.inf))
LIMITS |= {"train.position_range": (1, math.inf), "val.multiples": (1e-30, math.inf)}
LIMITS |= dict.fromkeys(("train.beta1", "train.beta2"), (0, 1))
CHOICES = {"train.compile": (True, False, "auto"), "train.schedule": ("cosine", "linear"), "wandb.mode": MODES}
CHOICES |= {"sharding": ("none", "fsdp")}


def schema(name: str, types: dict[Any, tuple[str, ...]], **defaults: Any) -> type:
    """A dataclass of settings by their types; the files in configs/ have the values and say what they mean."""
    fields = [(key, kind, defaults.get(key, MISSING)) for kind, keys in types.items() for key in keys]
    return make_dataclass(name, fields)


TRAIN_TYPES = {
    str: ("schedule",),
    bool: ("tf32",),
    int: ("max_steps", "batch_size", "warmup_steps", "eval_every", "checkpoint_every", "log_every", "keep"),
    int | None: ("micro_batch_size",),
    float: ("lr", "pos_lr_ratio", "min_lr_ratio", "weight_decay", "beta1", "beta2", "grad_clip", "position_range"),
    float | None: ("peak_flops",),
    Any: ("compile",),
}
VAL_TYPES = {list[float]: ("multiples",), int | None: ("stride", "max_windows")}
WANDB_TYPES = {str: ("mode", "project"), str | None: ("group",), list[str]: ("tags",)}
TYPES = {
    str: ("name", "preset", "device", "precision", "sharding"),
    str | None: ("resume", "init_from"),
    int: ("seed",),
    bool: ("deterministic",),
    dict[str, Any]: ("model", "pos"),  # checked by GPTConfig, as scaling is
    dict[str, Any] | None: ("scaling",),
    DataConfig: ("data",),
    Task | None: ("task",),
    schema("TokenizerSettings", {str: ("name",), int | None: ("vocab_size",)}, vocab_size=None): ("tokenizer",),
    schema("TrainSettings", TRAIN_TYPES): ("train",),
    schema("ValSettings", VAL_TYPES): ("val",),
    schema("WandbSettings", WANDB_TYPES): ("wandb",),
}
TrainConfig = schema("TrainConfig", TYPES, scaling=None, task=None)  # groups: without a choice, there is no value
ConfigStore.instance().store(name="train_schema", node=TrainConfig)

EVAL_TYPES = {
    str: ("root", "protocol", "device", "precision"),
    str | None: ("documents", "reference", "out", "cache"),
    bool: ("by_position", "truncated", "recall", "shift", "attention"),
    int: ("tokens", "seed"),
    int | None: ("checkpoint", "stride", "max_windows", "top_k"),
    float: ("temperature",),
    float | None: ("top_p",),
    list[int] | None: ("lengths",),
    list[Any] | None: ("scalings",),
    dict[str, Any] | None: ("scaling",),
    dict[str, str]: ("wandb",),
    Any: ("runs", "prompt"),
}
EvalConfig = schema("EvalConfig", EVAL_TYPES, scaling=None)


def machine() -> str:
    return "gpu" if torch.cuda.is_available() else "cpu"


def run_dir(resume: str | None, name: str, root: str = "outputs") -> str:
    """The folder of the run to resume, or a new one under root, made here: two runs never share a folder.

    Its name needs no quotes on a command line. The processes of a torchrun job other than the first make none.
    """
    if int(os.environ.get("RANK", "0")) > 0 and {"WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return "."
    if resume and (Path(resume).expanduser() / "config.yaml").is_file():
        return str(Path(resume).expanduser())
    stem = f"{root}/{datetime.now():%Y-%m-%d_%H-%M-%S}_" + re.sub(r"[^\w.+-]+", "_", name)
    for count in itertools.count(1):
        folder = stem if count == 1 else f"{stem}_{count}"
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder)
            return folder


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
    "by_scheme": lambda values, *, _root_: values.get(_root_.pos.name, values["other"]),
    "scheme": lambda *, _root_: scheme_name(_root_),
    "run_dir": run_dir,
    "run_subdir": lambda resume, name, root: os.path.relpath(run_dir(resume, name, root), root),
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
    """The configuration, resolved. ValueError for keys and types that do not fit the schema, as Hydra itself checks."""
    try:
        return OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0] + f" (setting {error.full_key})") from error


def lr_at(step: int, t: DictConfig) -> float:
    """Learning rate of update number `step`, from 0: linear warm-up, then down to min_lr_ratio · lr."""
    if step < t.warmup_steps:
        return t.lr * (step + 1) / t.warmup_steps
    progress = min(1.0, (step - t.warmup_steps) / max(1, t.max_steps - 1 - t.warmup_steps))
    left = 1 - progress if t.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return t.lr * (t.min_lr_ratio + (1 - t.min_lr_ratio) * left)


def task_of(config: DictConfig) -> Task | None:
    """The task of a run of data=task. ValueError for a task without it, and for a training length of one's own."""
    if (config.data.kind == "task") != (config.task is not None):
        known = ", ".join(TASKS)
        raise ValueError(f"data={config.data.name}: data=task needs task=<name>, out of {known}; other data has none")
    if config.task is None:
        return None
    task, given = Task(**OmegaConf.to_container(config.task)), config.model.get("train_length")
    if given not in (None, task.train_length):
        raise ValueError(f"model.train_length={given}: leave it out, the task's own is {task.train_length}")
    if task.random_offset and config.train.position_range > 1:
        raise ValueError(f"train.position_range={config.train.position_range}: not with task.random_offset=true")
    return task


def model_config(config: DictConfig) -> GPTConfig:
    """The model that the settings describe."""
    plain, source = OmegaConf.to_container(config), task_of(config) or get_tokenizer(**config.tokenizer)
    others = {"vocab_size": source.vocab_size, "pos": plain["pos"], "scaling": plain["scaling"]}
    return GPTConfig.from_dict(plain["model"], **others)


def _fix_scaling(config: DictConfig) -> None:
    """Fill in what a run's frequency scaling leaves open: where it starts from, and its factor."""
    model, scaling = config.model, config.scaling
    if scaling is None or scaling.name == "none":
        return
    if config.init_from and model.get("original_length") is None:
        model.original_length = read_config(latest_checkpoint(Path(config.init_from).expanduser())).original_length
    if scaling.get("factor", 1) is None and scaling.name != "dynamic" and model.get("original_length"):
        scaling.factor = model.train_length / model.original_length


def check_settings(config: DictConfig, world_size: int = 1) -> GPTConfig:
    """The model that the settings describe, after filling in what they leave open. ValueError, naming a wrong one."""
    for key, (least, below) in LIMITS.items():
        value = OmegaConf.select(config, key)
        if value is not None and not all(least <= one < below for one in np.atleast_1d(value)):
            end = "" if below == math.inf else f" and below {below}"
            raise ValueError(f"{key}={value}: must be a finite number of at least {least}{end}")
    for key, values in CHOICES.items():
        if repr(value := OmegaConf.select(config, key)) not in map(repr, values):
            raise ValueError(f"{key}={value!r}: use {', '.join(map(str, values))}")
    t = config.train
    if config.sharding == "fsdp" and t.compile is True:
        raise ValueError("sharding=fsdp: not with train.compile=true; use false, or sharding=none")
    if t.batch_size % world_size:
        raise ValueError(f"train.batch_size={t.batch_size}: must be a multiple of the {world_size} processes")
    if task := task_of(config):
        config.model.train_length = task.train_length
    _fix_scaling(config)
    model = model_config(config)
    scheme = SCHEMES[model.pos["name"]]
    if t.position_range > 1 and (scheme.biased or model.window or scheme is SCHEMES["learned"]):
        needs = "positions in a row, within the training length"
        raise ValueError(f"train.position_range={t.position_range}: pos={config.pos.name} needs {needs}; use 1")
    return model
