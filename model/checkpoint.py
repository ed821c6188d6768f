"""Checkpoint files of a run folder: written whole or not at all, read without running anything in them.

`checkpoint/step_000100.safetensors` holds the weights, and the GPTConfig as JSON in its header.
`checkpoint/step_000100.pt` holds the rest of the training state, and the SHA-256 of the weights file. The weights are
renamed into place last, so a checkpoint exists if and only if its weights do.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from model.config import GPTConfig
from model.gpt import GPT

log = logging.getLogger("ropewalk")

NAME = re.compile(r"step_\d+\.(safetensors|pt)")  # of a file of a checkpoint; a folder may hold others


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`. OSError, naming the file, where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises the second where a disk is full, and does not say so
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path}: cannot be written ({error}); {free:,} bytes are free there") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `out` at the end, else removed. ValueError where `out` exists."""
    out = Path(out).expanduser().absolute()
    if out.exists():
        raise ValueError(f"{out}: exists already; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        (folder := Path(temporary, out.name)).mkdir()
        yield folder
        folder.rename(out)


def save_checkpoint(
    run: Path, step: int, config: GPTConfig, weights: dict[str, Tensor], state: dict | None = None
) -> Path:
    """Write a model's state dict and the training state, of plain values and tensors; returns the weights file."""
    path = Path(run) / "checkpoint" / f"step_{step:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    content = safetensors.torch.save(tensors, {"step": str(step), "config": json.dumps(asdict(config))})
    if state is not None:
        whole = {**state, "weights_sha256": hashlib.sha256(content).hexdigest()}
        write_file(path.with_suffix(".pt"), lambda temporary: torch.save(whole, temporary))
    write_file(path, lambda temporary: temporary.write_bytes(content))
    return path


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def checkpoints(run: str | Path) -> list[Path]:
    """The weights files of a run's checkpoints by step. FileNotFoundError if there is none."""
    files = Path(run).glob("checkpoint/step_*.safetensors")
    found = sorted((path for path in files if NAME.fullmatch(path.name)), key=step_of)
    if not found:
        raise FileNotFoundError(f"{run}: no such run folder, or it holds no checkpoint/step_*.safetensors")
    return found


def latest_checkpoint(run: str | Path) -> Path:
    """The weights file of a run's last whole checkpoint; damaged ones are passed over with a warning."""
    first, *later = checkpoints(run)
    for path in reversed(later):
        try:
            check_checkpoint(path)
            return path
        except ValueError as error:
            log.warning("%s; the checkpoint before it is used", error)
    check_checkpoint(first)
    return first


def check_checkpoint(path: Path) -> None:
    """ValueError, naming the file, where a training state is damaged, or was not written with these weights."""
    rest = path.with_suffix(".pt")
    if rest.exists():  # an imported model, say, has none
        with _reading(rest, "training state"), zipfile.ZipFile(rest) as archive, open(path, "rb") as weights:
            if damaged := archive.testzip():  # torch.load does not look at the CRC-32 of its tensors
                raise ValueError(f"{damaged} is damaged")
            if load_state(path)["weights_sha256"] != hashlib.file_digest(weights, "sha256").hexdigest():
                raise ValueError(f"its SHA-256 is not that of {path.name}")


def prune_checkpoints(run: Path, keep: int, step: int) -> None:
    """Delete all but the last `keep` checkpoints up to `step`, the damaged ones after it, and unfinished files."""
    kept = [number for path in checkpoints(run) if (number := step_of(path)) <= step][-keep:]
    for path in (Path(run) / "checkpoint").iterdir():
        if path.is_file() and (path.name[0] == "." or (NAME.fullmatch(path.name) and step_of(path) not in kept)):
            path.unlink()


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the damage happens to trigger
        raise ValueError(f"{path}: not a whole {what} ({error})") from error


def read_config(path: Path) -> GPTConfig:
    """The GPTConfig in a weights file's header. ValueError, naming the file, if it is damaged or not ours."""
    with _reading(path, "checkpoint of this program"), safe_open(path, "pt") as file:
        return GPTConfig.from_dict(json.loads((file.metadata() or {})["config"]))


def load_weights(path: Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """The model in a weights file, in evaluation mode, under another scaling if given. ValueError, naming the file."""
    config = read_config(path)
    model = GPT(config if scaling is None else replace(config, scaling=scaling))
    with _reading(path, "checkpoint of this program"):
        model.load_state_dict(safetensors.torch.load_file(path))
    return model.to(device).eval()


def load_run(run: str | Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """A run folder's latest checkpoint as a model; arguments as in load_weights, errors as in latest_checkpoint."""
    return load_weights(latest_checkpoint(run), device, scaling)


def load_state(weights: Path) -> dict:
    """The training state beside a weights file, on the CPU. ValueError, naming the file, if missing or damaged."""
    path = weights.with_suffix(".pt")
    with _reading(path, "training state, to resume from"):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
