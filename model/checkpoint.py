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
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import GPTConfig
from model.gpt import GPT

log = logging.getLogger("ropewalk")


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`. OSError, naming the file, where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors makes files that only their owner may read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise the last two
        free = shutil.disk_usage(path.parent).free  # torch does not say that a disk is full
        raise OSError(f"{path}: cannot be written ({error}); {free:,} bytes are free there") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """write_file for a text, in UTF-8."""
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `out` at the end, else removed. ValueError where `out` exists."""
    out = Path(out).expanduser().absolute()
    if out.exists():
        raise ValueError(f"{out}: exists already; choose another folder")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_checkpoint(
    run: Path, step: int, config: GPTConfig, weights: dict[str, Tensor], state: dict | None = None
) -> Path:
    """Write a model's state dict and the training state, of plain values and tensors, of a step."""
    folder = Path(run) / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.safetensors"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    header = {"step": str(step), "config": json.dumps(asdict(config))}

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, metadata=header)
        if state is not None:
            whole = {**state, "weights_sha256": _digest(temporary)}
            write_file(path.with_suffix(".pt"), lambda rest: torch.save(whole, rest))

    write_file(path, write)
    return path


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_of(path: Path) -> int:
    """The step of a checkpoint's file, from its name."""
    return int(path.stem.removeprefix("step_"))


def checkpoints(run: str | Path) -> list[Path]:
    """The weights files of a run's checkpoints by step. FileNotFoundError, saying what is missing, if none."""
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such run folder")
    found = list((run / "checkpoint").glob("step_*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{run}: holds no checkpoint (checkpoint/step_*.safetensors); was it a training run?")
    return sorted(found, key=step_of)


def latest_checkpoint(run: str | Path) -> Path:
    """The weights file of the run's last checkpoint that is whole. Damaged ones are passed over with a warning.

    FileNotFoundError if there is no checkpoint, ValueError if none is whole.
    """
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
    """ValueError, naming the file, where the training state's CRC-32 or the digest of the weights in it is another.

    Weights without a training state (an imported model, say) are not checked.
    """
    rest = path.with_suffix(".pt")
    if not rest.exists():
        return
    try:
        with zipfile.ZipFile(rest) as archive:
            damage = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        damage = error
    if damage:
        raise ValueError(f"{rest}: is damaged ({damage})")
    if _digest(path) != load_state(path).get("weights_sha256", _digest(path)):  # older versions kept it elsewhere
        raise ValueError(f"{path}: is damaged (its SHA-256 is not the one in {rest.name})")


def prune_checkpoints(run: Path, keep: int, step: int) -> None:
    """Delete all but the last `keep` checkpoints up to `step`, the damaged ones after it, and unfinished files."""
    kept = [number for path in checkpoints(run) if (number := step_of(path)) <= step][-keep:]
    for path in (Path(run) / "checkpoint").iterdir():
        if path.is_file() and (path.name[0] == "." or (path.name.startswith("step_") and step_of(path) not in kept)):
            path.unlink()


def read_config(path: Path) -> GPTConfig:
    """The GPTConfig in a weights file's header. ValueError, naming the file, if it is damaged or not ours."""
    with _naming(path), safe_open(path, "pt") as file:
        return GPTConfig.from_dict(json.loads((file.metadata() or {})["config"]))


def load_weights(path: Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """The model in a weights file, in evaluation mode.

    scaling: another than it was trained with ({"name": "none"} for plain RoPE). ValueError, naming the file, if it is
    damaged or not ours, and for a scaling that does not fit the model.
    """
    config = read_config(path)
    model = GPT(config if scaling is None else replace(config, scaling=scaling))
    with _naming(path):
        model.load_state_dict(load_file(path))
    return model.to(device).eval()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: not a whole checkpoint of this program ({error})") from error


def load_run(run: str | Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """A run folder's latest checkpoint as a model; arguments as in load_weights, errors as in latest_checkpoint."""
    return load_weights(latest_checkpoint(run), device, scaling)


def load_state(weights: Path) -> dict:
    """The training state beside a weights file, on the CPU. ValueError, naming the file, if missing or damaged."""
    path = weights.with_suffix(".pt")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises whatever the damage happens to trigger
        raise ValueError(f"{path}: not a whole training state ({error}); it cannot be resumed from") from error
