"""Checkpoint files of a run folder: written whole or not at all, read without running anything in them.

`checkpoint/step_000100.safetensors` holds the weights, and the GPTConfig as JSON in its header;
`checkpoint/step_000100.pt` the rest of the training state. Each is written under a temporary name and renamed, the
weights last, so a checkpoint exists if and only if its weights do.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from model.config import GPTConfig
from model.gpt import GPT

_NAME = re.compile(r"step_(\d+)\.safetensors")


def write_file(path: Path, write: Callable[[Path], Any], new: bool = False) -> None:
    """Let `write` fill a temporary file, and put it in the place of `path` once it is safely on the disk.

    new: FileExistsError where there is one already, even if it came this moment.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        (os.link if new else os.replace)(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, new: bool = False) -> None:
    """write_file for a text, in UTF-8."""
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), new)


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `out` at the end, or removed where that is not reached.

    ValueError where `out` exists.
    """
    out = Path(os.path.abspath(Path(out).expanduser()))
    if os.path.lexists(out):
        raise ValueError(f"out={out}: exists already; choose another folder")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well


def save_checkpoint(run: Path, step: int, model: GPT, state: dict) -> Path:
    """Write the model and `state` (plain values and tensors), then delete the run's older checkpoints."""
    folder = Path(run) / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    older = [*folder.iterdir()]
    weights = folder / f"step_{step:06d}.safetensors"
    write_file(weights.with_suffix(".pt"), lambda path: torch.save(state, path))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    header = {"step": str(step), "config": json.dumps(asdict(model.config))}
    write_file(weights, lambda path: save_file(tensors, path, metadata=header))
    for path in older:
        if path not in (weights, weights.with_suffix(".pt")):
            path.unlink(missing_ok=True)
    return weights


def latest_checkpoint(run: str | Path) -> Path:
    """The weights file of the run's last complete checkpoint. FileNotFoundError, saying what is missing, if none."""
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such run folder")
    found = [path for path in (run / "checkpoint").glob("step_*.safetensors") if _NAME.fullmatch(path.name)]
    if not found:
        raise FileNotFoundError(f"{run}: holds no checkpoint (checkpoint/step_*.safetensors); was it a training run?")
    return max(found, key=lambda path: int(_NAME.fullmatch(path.name)[1]))


def read_config(path: Path) -> GPTConfig:
    """The GPTConfig in a weights file's header. ValueError, naming the file, if it is damaged or not ours."""
    with _damage(path), safe_open(path, "pt") as file:
        return GPTConfig.from_dict(json.loads((file.metadata() or {})["config"]))


def load_weights(path: Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """The model in a weights file, in evaluation mode.

    scaling: another frequency scaling than it was trained with ({"name": "none"} for plain RoPE); it has no weights.
    ValueError, naming the file, if it is damaged or not ours, and for a scaling that does not fit the model.
    """
    config = read_config(path)
    if scaling is not None:
        config = replace(config, scaling=scaling)
    with _damage(path):
        model = GPT(config)
        model.load_state_dict(load_file(path))
    return model.to(device).eval()


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: not a whole checkpoint of this program ({error})") from error


def load_run(run: str | Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """A run folder's latest checkpoint as a model in evaluation mode; scaling as in load_weights.

    Raises FileNotFoundError where there is no folder or checkpoint, ValueError where the checkpoint is damaged.
    """
    return load_weights(latest_checkpoint(run), device, scaling)


def load_state(weights: Path, device: str | torch.device = "cpu") -> dict:
    """The training state saved beside a weights file. ValueError, naming the file, if it is missing or damaged."""
    path = weights.with_suffix(".pt")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load raises whatever the damage happens to trigger
        raise ValueError(f"{path}: not a whole training state ({error}); it cannot be resumed from") from error
