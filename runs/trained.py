"""Trained runs to be measured: found, read, and checked before hours of work."""

import glob
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from data import DataConfig, TokenFiles, Tokenizer, get_tokenizer, prepare
from model import GPTConfig
from model.checkpoint import (
    best_checkpoint,
    check_digest,
    checkpoints,
    latest_checkpoint,
    load_weights,
    read_config,
    step_of,
)
from runs.folder import latest_run
from runs.processes import Ranks
from runs.settings import named, read_run
from runs.trust import check_source

log = logging.getLogger("ropewalk")


@dataclass(frozen=True)
class Run:
    """A run folder, read and found whole."""

    folder: Path
    settings: DictConfig
    origin: dict
    checkpoint: Path
    config: GPTConfig
    name: str
    tokenizer: Tokenizer
    files: TokenFiles


def chosen_checkpoint(run: Path, which: str | int) -> Path:
    """The weights file of a run's last or best checkpoint, or of the one of a step.

    Raises FileNotFoundError where there is none, ValueError for anything else.
    """
    if which in ("last", "best"):
        return latest_checkpoint(run) if which == "last" else best_checkpoint(run)
    if type(which) is not int:
        raise ValueError(f"checkpoint={which!r}: use last, best, or the number of a step")
    steps = {step_of(path): path for path in checkpoints(run)}
    if which not in steps:
        there = ", ".join(map(str, steps))
        raise FileNotFoundError(f"checkpoint={which}: {run} has no checkpoint of that step, but those of {there}")
    check_digest(steps[which])
    return steps[which]


def read_runs(config: DictConfig, ranks: Ranks) -> list[Run]:
    """All runs of the configuration. ValueErrors and FileNotFoundErrors name the folder or file that is wrong."""
    # The first process chooses: a moment later another run may be the latest, and another checkpoint a run's last.
    folders = ranks.share(run_folders(config) if ranks.first else None)
    settings_of = [read_run(folder) for folder in folders]
    paths = ranks.share([chosen_checkpoint(folder, config.checkpoint) for folder in folders] if ranks.first else None)
    read = [(folder, *of_run, path) for folder, of_run, path in zip(folders, settings_of, paths, strict=True)]
    configs = [read_config(path) for *_, path in read]
    for *_, path in read:
        load_weights(path)  # a damaged one must be known before hours of measuring
    names = [settings.name.encode("utf-8", "replace").decode() for _, settings, *_ in read]  # YAML can hold half a pair
    if len(set(names)) < len(names):
        names = [
            name if names.count(name) == 1 else path[0].resolve().name for name, path in zip(names, read, strict=True)
        ]
    if len(set(names)) < len(names):
        names = [str(folder) for folder, *_ in read]
    for name, (_, settings, _, path) in zip(names, read, strict=True):
        if config.checkpoint == "last" and 0 < step_of(path) < settings.train.max_steps:  # 0: weights from elsewhere
            log.warning("%s: step %d of %d, not trained to its end", name, step_of(path), settings.train.max_steps)
    tokenizers, texts = [], []
    for (folder, settings, *_), gpt_config in zip(read, configs, strict=True):
        with named(folder / "config.yaml"):
            tokenizers.append(get_tokenizer(**settings.tokenizer))
        _check_header(folder, settings, tokenizers[-1], gpt_config)
        data = replace(DataConfig(**settings.data), cache=config.cache or DataConfig.cache)  # never the run's wish
        check_source(folder, data, config.trust, "cache")
        texts.append((data, tokenizers[-1]))
    files = ranks.in_turn(lambda: [prepare(*text, say=log.info) for text in texts])
    return [Run(*of_run, *others) for of_run, *others in zip(read, configs, names, tokenizers, files, strict=True)]


def _check_header(folder: Path, settings: DictConfig, tokenizer: Tokenizer, found: GPTConfig) -> None:
    """ValueError unless a checkpoint is of the model that config.yaml describes."""
    plain = OmegaConf.to_container(settings)
    described = {"vocab_size": tokenizer.vocab_size, "pos": plain["pos"], "scaling": plain["scaling"]}
    with named(folder / "config.yaml"):
        expected = asdict(GPTConfig.from_dict(plain["model"], **described))
    for key, value in asdict(found).items():
        if value != expected[key]:
            raise ValueError(
                f"{folder}: config.yaml says {key}={expected[key]}, its checkpoint {value}; not of one run"
            )


def run_folders(config: DictConfig) -> list[Path]:
    if config.runs is None:
        return [latest_run(Path(config.root))]
    plain = OmegaConf.to_container(config)["runs"]
    given = plain if isinstance(plain, list) else [plain]
    if not all(isinstance(name, str) and name for name in given):
        raise ValueError(f"runs={plain}: must be a run folder, a pattern, or a list of them")
    if not given:
        raise ValueError("runs=[]: give at least one run folder, or leave it out for the latest run")
    found = []
    for name in given:
        path = Path(str(name)).expanduser()
        if path.exists() or not glob.has_magic(str(path)):
            found.append(path)
            continue
        matching = [Path(match) for match in sorted(glob.glob(str(path))) if (Path(match) / "config.yaml").is_file()]
        if not matching:
            raise FileNotFoundError(f"runs={name}: no run folder matches it")
        found += matching
    return list({path.resolve(): path for path in found}.values())
