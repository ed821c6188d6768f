"""Checkpoint files of a run folder: written whole or not at all, read without running anything in them.

`checkpoint/step_000100.safetensors` holds the weights, and the GPTConfig as JSON in its header;
`checkpoint/step_000100.pt` the rest of the training state (of a sharded run, much of it is in the files of
`checkpoint/step_000100.shards/`); `checkpoint/step_000100.sha256` the digests of them all, in the format of the command
sha256sum. Each is written under a temporary name and renamed, the weights last, so a checkpoint
exists if and only if its weights do. `checkpoint/best.json` names the one with the lowest validation loss.
"""

import contextlib
import hashlib
import json
import logging
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
from model.safety import check_folder, check_header, check_tensors, load_pickled, read_text

log = logging.getLogger("ropewalk")

_NAME = re.compile(r"\.?step_(\d+)\..+")  # of a checkpoint's files, unfinished ones too


def write_file(path: Path, write: Callable[[Path], Any], new: bool = False) -> None:
    """Let `write` fill a temporary file, and put it in the place of `path` once it is safely on the disk.

    new: FileExistsError where there is one already, even if it came this moment. OSError, naming the file, where it
    cannot be written; what was there before stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # safetensors makes files that only their owner may read
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        except (OSError, RuntimeError, SafetensorError) as error:  # the last two: how torch and safetensors say it
            free = shutil.disk_usage(path.parent).free  # torch does not say that a disk is full
            raise OSError(f"{path}: cannot be written ({error}); {free:,} bytes are free there") from error
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


def save_checkpoint(
    run: Path,
    step: int,
    model: GPT,
    state: dict | None,
    weights_of: dict[str, torch.Tensor] | None = None,
    shards: dict[str, str] | None = None,
) -> Path:
    """Write the model and `state` (plain values and tensors; None: there is none) as the run's checkpoint of a step.

    weights_of: the model's state dict, where it is not at hand in the model itself. shards: digests of more files of
    the checkpoint, by names in its folder, that were written before.
    """
    folder = Path(run) / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / f"step_{step:06d}.safetensors"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (weights_of or model.state_dict()).items()}
    header = {"step": str(step), "config": json.dumps(asdict(model.config))}
    digests = dict(shards or {})
    if state is not None:
        write_file(rest := weights.with_suffix(".pt"), lambda path: torch.save(state, path))
        digests[rest.name] = file_digest(rest)

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, metadata=header)
        digests[weights.name] = file_digest(temporary)
        write_text(weights.with_suffix(".sha256"), "".join(f"{value}  {name}\n" for name, value in digests.items()))

    write_file(weights, write)
    return weights


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_of(path: Path) -> int:
    """The step of a checkpoint's file, from its name."""
    return int(_NAME.fullmatch(path.name)[1])


def checkpoints(run: str | Path) -> list[Path]:
    """The weights files of a run's checkpoints by step. FileNotFoundError, saying what is missing, if none.

    ValueError where something in the folder leads out of it (model.safety).
    """
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such run folder")
    found = [path for path in (run / "checkpoint").glob("*") if re.fullmatch(r"step_\d+\.safetensors", path.name)]
    if not found:
        raise FileNotFoundError(f"{run}: holds no checkpoint (checkpoint/step_*.safetensors); was it a training run?")
    check_folder(run)
    return sorted(found, key=step_of)


def latest_checkpoint(run: str | Path, resumable: bool = False) -> Path:
    """The weights file of the run's last checkpoint that is whole; resumable: its training state as well.

    A damaged one is left out with a warning. FileNotFoundError if there is none, ValueError if none is whole.
    """
    for path in reversed(found := checkpoints(run)):
        try:
            check_digest(path)
            if resumable:
                for part in (path.with_suffix(".pt"), *_shards(path)):
                    check_digest(part)
            return path
        except ValueError as error:
            if path is found[0]:
                raise
            log.warning("%s; the checkpoint before it is used", error)
    raise AssertionError("checkpoints() is never empty")


def best_checkpoint(run: str | Path) -> Path:
    """The weights file of the checkpoint with the lowest validation loss. FileNotFoundError if it is not known."""
    check_folder(run)
    best = read_best(run)
    if best is None:
        raise FileNotFoundError(f"{run}: its best checkpoint is not known (checkpoint/best.json); use the last one")
    path = Path(run) / "checkpoint" / f"step_{best[0]:06d}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: checkpoint/best.json names it, and it is not there")
    check_digest(path)
    return path


def read_best(run: str | Path) -> tuple[int, float] | None:
    """Step and validation loss (nats a token) of the best checkpoint; None where it is not known."""
    try:
        best = json.loads(read_text(Path(run) / "checkpoint" / "best.json"))
        return int(best["step"]), float(best["nll"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def mark_best(run: Path, step: int, nll: float) -> None:
    """Note that the checkpoint of this step has the lowest validation loss so far."""
    write_text(Path(run) / "checkpoint" / "best.json", json.dumps({"step": step, "nll": nll}) + "\n")


def prune_checkpoints(run: Path, keep: int, step: int) -> None:
    """Delete all but the last `keep` checkpoints and the best one, and what killed processes left unfinished.

    step: where the training is. Checkpoints of later steps are damaged, and it went on from one before them.
    """
    best = read_best(run)
    steps = [number for path in checkpoints(run) if (number := step_of(path)) <= step]
    kept = {*steps[-keep:], *([best[0]] if best else [])}
    for path in (Path(run) / "checkpoint").iterdir():
        of_step = _NAME.fullmatch(path.name)
        unfinished = path.name.startswith(".") and (of_step or path.name.startswith(".best.json."))
        if unfinished or (of_step and step_of(path) not in kept):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def check_digest(path: Path) -> None:
    """ValueError, naming the file, where it is not what was written, by its digest in the .sha256 file beside it.

    Without one (an imported model, say) nothing is known, and nothing checked.
    """
    of = path.parent if path.parent.suffix == ".shards" else path
    digests = _digests(of)
    if digests is None:
        return
    try:
        if file_digest(path) != digests.get(path.relative_to(of.parent).as_posix()):
            raise ValueError(f"{path}: is damaged (its SHA-256 is not the one in {of.stem}.sha256)")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error


def _digests(path: Path) -> dict[str, str] | None:
    """SHA-256 of a checkpoint's files by name, from the list beside any of them; None where there is no list."""
    try:
        lines = read_text(path.with_suffix(".sha256")).splitlines()
        return dict(line.split("  ", 1)[::-1] for line in lines)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.with_suffix('.sha256')}: cannot be read ({error})") from error


def _shards(weights: Path) -> list[Path]:
    """The files of a checkpoint in its folder of shards (runs/sharding.py), by the list of its digests."""
    name = re.compile(rf"{weights.stem}\.shards/[\w-]+\.safetensors")
    return [weights.parent / found for found in _digests(weights) or {} if name.fullmatch(found)]


def read_config(path: Path) -> GPTConfig:
    """The GPTConfig in a weights file's header. ValueError, naming the file, if it is damaged or not ours."""
    with _damage(path), safe_open(path, "pt") as file:
        check_header(config := json.loads((file.metadata() or {})["config"]), file)
        return GPTConfig.from_dict(config)


def load_weights(path: Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """The model in a weights file, in evaluation mode.

    scaling: another frequency scaling than it was trained with ({"name": "none"} for plain RoPE); it has no weights.
    ValueError, naming the file, if it is damaged or not ours, and for a scaling that does not fit the model.
    """
    config = read_config(path)
    if scaling is not None:
        config = replace(config, scaling=scaling)
    with _damage(path):
        with torch.device("meta"), safe_open(path, "pt") as file:
            check_tensors(GPT(replace(config, n_layer=1)).state_dict(), config.n_layer, file)
        model = GPT(config)
        model.load_state_dict(load_file(path))
    return model.to(device).eval()


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{path}: not a whole checkpoint of this program ({error})") from error


def load_run(run: str | Path, device: str | torch.device = "cpu", scaling: dict | None = None) -> GPT:
    """A run folder's latest checkpoint as a model in evaluation mode; scaling as in load_weights.

    Raises FileNotFoundError where there is no folder or checkpoint, ValueError where none is whole.
    """
    return load_weights(latest_checkpoint(run), device, scaling)


def load_state(weights: Path, device: str | torch.device = "cpu") -> dict:
    """The training state saved beside a weights file. ValueError, naming the file, if it is missing or damaged."""
    path = weights.with_suffix(".pt")
    try:
        return load_pickled(path, device)
    except Exception as error:  # torch.load raises whatever the damage happens to trigger
        raise ValueError(f"{path}: not a whole training state ({error}); it cannot be resumed from") from error
