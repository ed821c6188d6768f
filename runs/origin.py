"""Where a run comes from: resumed, repeated, or started from another's weights; and whether a repeated one agrees."""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.functional import interpolate

from data import DataConfig
from model import GPT
from model.checkpoint import latest_checkpoint, load_run, load_weights, read_config, step_of
from model.safety import check_folder
from runs.folder import read_metrics
from runs.settings import TrainConfig, checked, read_run
from runs.trust import check_source

log = logging.getLogger("ropewalk")

# What may differ from the run that is resumed, or repeated; all else comes from its config.yaml.
RESUMABLE = {"resume", "device", "wandb.mode", "train.flex_attention", "train.max_steps"}
RESUMABLE |= {"train.eval_every", "train.checkpoint_every"}
RESUMABLE |= {"train.keep", "train.skip_bad_steps", "sharding", "data.cache", "trust"}
REPEATABLE = {"repeat", "device", "wandb.mode", "train.flex_attention", "train.keep", "data.cache", "trust"}


@contextlib.contextmanager
def _named(config: DictConfig, how: str) -> Iterator[Path]:
    """The run that a setting names; where there is none, the error names the setting as well."""
    try:
        yield Path(config[how]).expanduser()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{how}={config[how]}: {error}") from error


def resumed_config(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration of the run to resume, with the few settings that may change taken from the command line."""
    way_out = "To start anew from its weights: init_from=<run folder>"
    return _as_there(config, "resume", overrides, RESUMABLE, way_out)


def repeated_config(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration of the run to repeat, but for where it is computed and logged.

    FileNotFoundError or ValueError where there is nothing to compare with in the end.
    """
    with _named(config, "repeat") as source:
        latest_checkpoint(source)
        read_metrics(source / "metrics.jsonl")
    saved = _as_there(config, "repeat", overrides, REPEATABLE, "To train with another setting, leave repeat= out")
    saved.repeat = str(source.resolve())  # it may be resumed from elsewhere
    return saved


def _as_there(config: DictConfig, how: str, overrides: list[str], free: set[str], way_out: str) -> DictConfig:
    with _named(config, how) as source:
        saved, _ = read_run(source)
    if how == "resume":
        check_folder(source, to_write=True)
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~")
        if key not in free:
            raise ValueError(
                f"{key}: cannot change when a run is {how.rstrip('e')}ed ({how}={config[how]}), its config.yaml "
                f"decides; only {', '.join(sorted(free))} can. {way_out}"
            )
        OmegaConf.update(saved, key, OmegaConf.select(config, key))
    saved.data.cache = config.data.cache  # never a folder that the run names: token files are written there
    check_source(source, DataConfig(**saved.data), config.trust, "data.cache")
    if how == "repeat" and saved.init_from and not config.trust:
        raise ValueError(f"{source}: it starts from the weights in {saved.init_from}; trust=true reads them")
    return checked(saved, TrainConfig)


def from_source(config: DictConfig) -> DictConfig:
    """Where a run starts from another's weights under a scaling, its formulas start from that one's length."""
    scaled = config.scaling is not None and config.scaling.get("name") != "none"
    if config.init_from and not config.resume:
        with _named(config, "init_from") as source:
            weights = latest_checkpoint(source)
        if scaled and config.model.get("original_length") is None:
            config.model.original_length = read_config(weights).original_length
    return config


def start_from(model: GPT, source: Path, init_table: str | None) -> None:
    """Another run's weights. ValueError where they would mean something else here, even if their shapes fit."""
    start = load_run(source)
    other, ours = asdict(start.config), asdict(model.config)
    free = {"train_length", "original_length", "scaling", "dropout"}
    for config in (other, ours):
        config["pos"].pop("base", None)
    differing = [key for key in ours if key not in free and ours[key] != other[key]]
    if differing:
        settings = ", ".join(f"{key}={other[key]} there, {ours[key]} here" for key in differing)
        raise ValueError(f"init_from={source}: its weights are those of another model: {settings}")
    weights, rows, found = start.state_dict(), model.config.train_length, start.config.train_length
    if ours["pos"]["name"] == "learned" and rows != found:  # all other shapes are equal by now
        if init_table != "interpolate":
            way_out = "init_table=interpolate stretches a learned table"
            raise ValueError(f"init_from={source}: its table has {found} rows, not {rows}; {way_out}")
        # The first and last rows stay the ends, those between are linear mixtures of their two neighbours.
        table = weights["pos.table"].T[None]  # (1, D, rows)
        weights["pos.table"] = interpolate(table, size=rows, mode="linear", align_corners=True)[0].T
    model.load_state_dict(weights)
    log.info("weights  from %s", source)


def comparable(row: dict) -> dict:
    """A row of metrics.jsonl without what depends on the clock."""
    return {key: value for key, value in row.items() if not key.startswith("speed/")}


def agreement(there: Path, here: Path) -> tuple[bool, list[str]]:
    """Whether a repeated run's metrics and weights are the other's, bit for bit; and in words, with what differs."""
    lines = [*_differing_places(there, here)]
    rows = [[comparable(row) for row in read_metrics(run / "metrics.jsonl")] for run in (there, here)]
    apart, first = [], None
    for a, b in zip(*rows, strict=False):
        if a != b and first is None:
            first = b.get("step")
        apart += [
            (_relative(a.get(key), b.get(key)), key, b.get("step")) for key in {*a, *b} if a.get(key) != b.get(key)
        ]
    count = min(map(len, rows))
    if len(rows[0]) != len(rows[1]):
        lines.append(f"{len(rows[0])} rows of metrics there, {len(rows[1])} here: the first {count} are compared")
    if apart:
        largest, key, step = max(apart)
        lines.append(
            f"metrics differ from step {first} on, at most by {largest:.1g} of their value ({key}, step {step})"
        )
    else:
        lines.append(f"{count} rows of metrics are equal, bit for bit")
    apart_weights, line = _weights_apart(there, here)
    return not (apart or apart_weights) and len(rows[0]) == len(rows[1]), [*lines, line]


PLACES = ("commit", "dirty", "python", "device", "device_name", "threads", "processes", "precision", "fingerprint")


def _differing_places(there: Path, here: Path) -> Iterator[str]:
    a, b = (read_run(run)[1] for run in (there, here))
    places = [{key: origin.get(key) for key in PLACES} for origin in (a, b)]
    for place, origin in zip(places, (a, b), strict=True):
        packages = origin.get("packages")
        place.update(packages if isinstance(packages, dict) else {})
    for key in dict.fromkeys((*places[0], *places[1])):
        if places[0].get(key) != places[1].get(key):
            yield f"{key}: {places[0].get(key)} there, {places[1].get(key)} here"
    if a.get("resumed"):
        yield "that run was resumed: numbers agree only if its settings were the same throughout"


def _relative(a: object, b: object) -> float:
    numbers = all(isinstance(value, (int, float)) for value in (a, b))
    return abs(a - b) / max(abs(a), abs(b)) if numbers else math.inf


def _weights_apart(there: Path, here: Path) -> tuple[bool, str]:
    """Whether the weights of the last checkpoints differ, and in words."""
    paths = [latest_checkpoint(run) for run in (there, here)]
    if step_of(paths[0]) != step_of(paths[1]):
        return True, f"the last checkpoints are {paths[0].stem} there, {paths[1].stem} here"
    a, b = (load_weights(path).state_dict() for path in paths)
    if a.keys() != b.keys():
        return True, f"weights of {paths[0].stem} are those of different models"
    apart = [float((a[name] - b[name]).abs().max()) for name in a if not torch.equal(a[name], b[name])]
    words = f"differ by up to {max(apart):.1g}" if apart else "are equal, bit for bit"
    return bool(apart), f"weights of {paths[0].stem} {words}"
