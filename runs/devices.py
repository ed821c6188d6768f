"""Where a run computes, and in what precision."""

import contextlib
import os
import platform
import re
from pathlib import Path

import torch

from model import GPTConfig
from model.flex import BLOCK
from speed import keep_memory


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` or a device by name; under torchrun each process takes the CUDA device of its local rank.

    Sets up the process for it: CUDA's current device, or how a CPU's memory is handled.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if not re.fullmatch(r"cuda(:\d\d?)?|mps|cpu", name):
        raise ValueError(f"device={name!r}: use auto, cuda, cuda:<number>, mps or cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name}: this torch finds no CUDA device; use device=auto or device=cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={name}: this torch finds no Apple GPU; use device=auto or device=cpu")
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if local_rank and device.index is not None:
            raise ValueError(f"device={name}: each process of a machine takes a device of its own; use device=cuda")
        if index >= torch.cuda.device_count():
            raise ValueError(f"device=cuda:{index}: this machine has {torch.cuda.device_count()} CUDA devices")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type == "cpu":
        keep_memory()
    return device


def device_name(device: torch.device) -> str:
    """What the hardware calls itself, as far as it can be known."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if found and device.type == "cpu":
            return found[1]
    return platform.processor() or platform.machine()


def set_numerics(tf32: bool, deterministic: bool) -> None:
    """How this process multiplies, whatever a sweep's job before has set.

    deterministic: on CUDA, operations that give the same bits each time, or an error where there is none.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it loads the compiler, over a second
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def check_flex(device: torch.device, config: GPTConfig, deterministic: bool) -> None:
    """Raise ValueError where train.flex_attention=true does not go, saying what to use."""
    asked = "train.flex_attention=true"
    if device.type != "cuda":
        raise ValueError(f"{asked}: not on device={device.type}; use device=cuda, or false")
    if config.train_length % BLOCK:
        raise ValueError(f"{asked}: model.train_length={config.train_length}; use a multiple of {BLOCK}, or false")
    if config.dropout:
        raise ValueError(f"{asked}: no model.dropout={config.dropout}; use 0, or false")
    if deterministic:
        raise ValueError(f"{asked}: not proven to give the same bits each time; use deterministic=false, or false")


PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_precision(name: str, device: torch.device) -> str:
    """`auto` or one of PRECISIONS. auto: bf16 where the hardware multiplies it, fp16 on older GPUs, else fp32."""
    if name not in ("auto", *PRECISIONS):
        raise ValueError(f"precision={name!r}: use auto, {', '.join(PRECISIONS)}")
    if name == "fp16" and device.type != "cuda":
        raise ValueError(f"precision=fp16 on {device.type}: only on CUDA; use bf16 or fp32")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if device.type == "cpu":
        probes = (getattr(torch.cpu, f"_is_{unit}_supported", bool) for unit in ("avx512_bf16", "amx_tile"))
        return "bf16" if any(probe() for probe in probes) else "fp32"
    return "fp32"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
