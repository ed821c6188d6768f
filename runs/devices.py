"""Where a run computes, in what precision, and how fast that could be."""

import contextlib
import ctypes
import logging
import math
import os
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from model import GPT

log = logging.getLogger("ropewalk")

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILED = ("cuda",)  # devices on which train.compile=auto compiles

# Dense bfloat16 operations per second, by the vendors' data sheets; the first of these words in a device's name counts.
PEAK_FLOPS = {
    "B200": 2.25e15, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` or a device by name (`cuda`: that of the local rank), made current. ValueError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either where it has no such device
        found = str(error).splitlines()[0]
        raise ValueError(f"device={name!r}: use auto, cuda, cuda:<number>, mps or cpu ({found})") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "cpu":
        # glibc keeps what is freed: a training step else spends up to a third of its time on new pages.
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-4, 0)  # M_MMAP_MAX: nothing in mappings of its own
            libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back
    return device


def set_numerics(tf32: bool, deterministic: bool) -> None:
    """How this process multiplies. deterministic: on CUDA, operations that give the same bits, or an error."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it loads the compiler, over a second
        torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


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
    probes = (getattr(torch.cpu, f"_is_{unit}_supported", bool) for unit in ("avx512_bf16", "amx_tile"))
    return "bf16" if device.type == "cpu" and any(probe() for probe in probes) else "fp32"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context whose matrix products are in one of PRECISIONS."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def peak_flops(device: torch.device, given: float | None) -> float | None:
    """What the device could do a second at most: as given (train.peak_flops), else by its name, else not known."""
    if given is not None or device.type != "cuda":
        return given
    name = torch.cuda.get_device_name(device)
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def compare_compiled(
    model: GPT, compiled: Callable, inputs: Tensor, targets: Tensor, context: contextlib.AbstractContextManager
) -> bool:
    """Whether loss and gradient norm of a batch, ids (B, T), agree within 2 % between a model and its compiled form.

    If not, or where compiling fails, there is a warning. Dropout is off meanwhile: compiled, it draws other numbers.
    """
    found = []
    model.train(not model.config.dropout)
    try:
        for forward in (model, compiled):
            with context:
                loss = forward(inputs, targets=targets).mean()
            loss.backward()
            found.append((loss.item(), clip_grad_norm_(model.parameters(), math.inf).item()))
            model.zero_grad()
        if all(math.isclose(*pair, rel_tol=0.02) for pair in zip(*found, strict=True)):
            return True
        problem = "loss and gradient norm of the first batch are {}, of the compiled model {}".format(*found)
    except Exception as error:  # whatever a compiler or its tools happen to raise
        problem = f"torch.compile failed ({error})"
    finally:
        model.zero_grad()
        model.train()
    log.warning("train.compile=auto: %s; training goes on without torch.compile", problem)
    return False
