"""The run folder: config.yaml, metrics.jsonl, train.log, and where a run comes from."""

import contextlib
import json
import logging
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from model import GPT, load_run
from model.checkpoint import write_text
from runs.settings import CONFIGS, TrainConfig, checked

log = logging.getLogger("ropewalk")
PACKAGES = ("torch", "numpy", "tiktoken", "datasets", "hydra-core", "wandb", "safetensors")
# Settings that only older runs have; and where they lack some, which are then those of configs/train.yaml.
FORMER = ("max_targets", "repeat", "trust", "init_table", "profile", "flex_attention", "skip_bad_steps")
NEWER = ("deterministic", "sharding", "train", "val", "wandb")
# What may change when a run is resumed; all else is as its config.yaml says.
RESUMABLE = ("resume", "device", "precision", "wandb.mode", "sharding", "data.cache")
RESUMABLE += ("train.max_steps", "train.eval_every", "train.checkpoint_every", "train.keep")


def latest_run(root: Path) -> Path:
    """The run under `root` whose checkpoint is the newest. FileNotFoundError where there is none."""
    found = [path for path in root.glob("[!.]*/checkpoint/*.safetensors") if (path.parents[1] / "config.yaml").exists()]
    if not found:
        raise FileNotFoundError(f"no run with a checkpoint under {root}/; train one first, or give runs=[<folder>]")
    return max(found, key=lambda path: path.lstat().st_mtime_ns).parents[1]


def write_run(run: Path, settings: DictConfig, provenance: dict) -> dict:
    """Write config.yaml: the settings as used, and where they were used. Returns what was written, as plain data."""
    plain = {**OmegaConf.to_container(settings, throw_on_missing=True), "resume": None, "provenance": provenance}
    write_text(run / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain)))
    return plain


def read_run(run: Path) -> tuple[DictConfig, dict]:
    """A run's settings, checked against their schema, and its provenance. No interpolation or tag is followed.

    FileNotFoundError where it is no run folder, ValueError for what train.py has not written.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{run}: not a run folder (it has no config.yaml)")
    try:
        newer = OmegaConf.masked_copy(OmegaConf.load(CONFIGS / "train.yaml"), NEWER)
        plain = OmegaConf.to_container(OmegaConf.merge(newer, OmegaConf.load(path)))
        provenance = plain.pop("provenance")
        if "${" in json.dumps(plain):  # the settings that train.py writes are resolved
            raise ValueError("it holds interpolations")
        for block in (plain, plain["train"], plain["val"]):
            for key in FORMER:
                block.pop(key, None)
        settings = checked(OmegaConf.create(plain), TrainConfig)
        OmegaConf.to_container(settings, throw_on_missing=True)
        return settings, provenance
    except Exception as error:  # whatever a damaged file happens to trigger
        raise ValueError(f"{path}: not a configuration written by train.py ({error!r})") from error


def resumed(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The settings of the run to resume, with those of the command line that may change. ValueError for others."""
    settings, _ = read_run(Path(config.resume).expanduser())
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~")
        if key not in RESUMABLE:
            raise ValueError(f"{key}: cannot change in a resumed run; {', '.join(RESUMABLE)} can, or use init_from=")
        OmegaConf.update(settings, key, OmegaConf.select(config, key))
    return settings


def start_from(model: GPT, source: Path) -> None:
    """Give a model another run's weights. ValueError where they would mean something else, even if their shapes fit."""
    start = load_run(source)
    theirs, ours = asdict(start.config), asdict(model.config)
    free = {"original_length", "scaling", "dropout", "base"}
    # A table has a row for each position of the training length; the two others count in training lengths.
    if ours["pos"]["name"] not in ("learned", "fire") and ours["query_scale"] not in ("log", "log_nope"):
        free.add("train_length")
    if theirs["pos"]["name"] != ours["pos"]["name"] and not [*start.pos.parameters(), *model.pos.parameters()]:
        free.add("pos")  # as in DroPE
    for config in (theirs, ours):
        config["base"] = config["pos"].pop("base", None)
    differing = {key: f"{key}={theirs[key]} there, {ours[key]} here" for key in ours if ours[key] != theirs[key]}
    if fixed := [words for key, words in differing.items() if key not in free]:
        raise ValueError(f"init_from={source}: its weights are those of another model: {', '.join(fixed)}")
    model.load_state_dict(start.state_dict())
    log.info("weights  from %s", "; ".join([str(source), *differing.values()]))


def provenance(device: torch.device) -> dict:
    """Where a number came from: the command, the packages, the machine, and the commit of this checkout, if known."""
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = ""
    with contextlib.suppress(OSError):  # no git
        commit = subprocess.run([*git, "--abbrev=40", "--exclude=*"], capture_output=True, text=True).stdout.strip()
    here = {"command": shlex.join(sys.argv), "commit": commit or None, "python": platform.python_version()}
    here |= {"packages": {name: version(name) for name in PACKAGES}, "machine": platform.platform()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    if device.type == "cpu" and os.path.exists("/proc/cpuinfo"):
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        name = found[1] if found else name
    return here | {"device": str(device), "device_name": name, "threads": torch.get_num_threads()}


def next_commands(folder: Path, config: DictConfig) -> str:
    """What a user may do after a training, as lines to paste."""
    run, of_wandb = (shlex.quote(os.path.relpath(path)) for path in (folder, folder.parent / "wandb"))
    task = f"data=task task={config.task.name} " if config.task else ""
    lines = {}
    if config.data.kind in ("stdlib", "task"):  # what needs no path
        lines |= {f"python train.py {task}pos={'rope' if config.pos.name == 'alibi' else 'alibi'}": "another scheme"}
    lines |= {f"python eval.py runs={run}": "report.html: tables and plots of this run"}
    if (folder.parent / "wandb").exists():
        lines |= {f"wandb leet {of_wandb}": "the curves of all runs"}
    width = max(map(len, lines))
    return "\n".join(["next:", *(f"  {line:{width}}  # {about}" for line, about in lines.items())])


@contextlib.contextmanager
def log_file(folder: Path) -> Iterator[None]:
    """Log to train.log as well. A run that is refused before its config.yaml leaves neither log nor folder behind."""
    logging.raiseExceptions = False  # a full disk is told once, not at every line of the log
    handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk, or a folder that holds other files
            handler.close()
            if not (folder / "config.yaml").exists():
                (folder / "train.log").unlink()
                folder.rmdir()


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with its step, whatever wandb does."""

    def __init__(self, path: Path, step: int = 0):
        """Drop what a run resumed after `step` makes again, and half a line, which a killed process may leave."""
        self.path, rows = path, []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        rows = [row for row in rows if row["step"] < step or (row["step"] == step and "train/loss" in row)]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, row: dict) -> None:
        """Add a row, whole or not at all; null for what is not finite. OSError where the file cannot be written."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        size = self.path.stat().st_size
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            os.truncate(self.path, size)
            raise OSError(f"{self.path}: cannot be written ({error.strerror})") from error
