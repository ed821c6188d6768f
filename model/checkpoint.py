"""Checkpoint files of a run folder: written whole or not at all, read without running anything in them.

`checkpoint/step_000100.safetensors` holds the weights, and the GPTConfig as JSON in its header;
`checkpoint/step_000100.pt` the rest of the training state. Each is written under a temporary name and renamed, the
weights last, so a checkpoint exists if and only if its weights do.
"""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model.config import GPTConfig
from model.gpt import GPT

_NAME = re.compile(r"step_(\d+)\.safetensors")


def _replace(path: Path, write) -> None:
    """Let `write` fill a temporary file, and put it in the place of `path` once it is safely on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(run: Path, step: int, model: GPT, state: dict) -> Path:
    """Write the model and `state` (plain values and tensors), then delete the run's older checkpoints."""
    folder = Path(run) / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    older = [*folder.iterdir()]
    weights = folder / f"step_{step:06d}.safetensors"
    _replace(weights.with_suffix(".pt"), lambda path: torch.save(state, path))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    header = {"step": str(step), "config": json.dumps(asdict(model.config))}
    _replace(weights, lambda path: save_file(tensors, path, metadata=header))
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


def load_weights(path: Path, device: str | torch.device = "cpu") -> GPT:
    """The model in a weights file, in evaluation mode. ValueError, naming the file, if it is damaged or not ours."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            config = GPTConfig.from_dict(json.loads(header["config"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        model = GPT(config)
        model.load_state_dict(tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: not a whole checkpoint of this program ({error})") from error
    return model.to(device).eval()


def load_run(run: str | Path, device: str | torch.device = "cpu") -> GPT:
    """A run folder's latest checkpoint as a model in evaluation mode.

    Raises FileNotFoundError where there is no folder or checkpoint, ValueError where the checkpoint is damaged.
    """
    return load_weights(latest_checkpoint(run), device)


def load_state(weights: Path, device: str | torch.device = "cpu") -> dict:
    """The training state saved beside a weights file. ValueError, naming the file, if it is missing or damaged."""
    path = weights.with_suffix(".pt")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load raises whatever the damage happens to trigger
        raise ValueError(f"{path}: not a whole training state ({error}); it cannot be resumed from") from error
