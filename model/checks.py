"""Arguments of public functions, refused with one message each."""

import math
import os
from typing import Any

import torch

INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_whole(name: str, value: Any, least: int = 1, most: int = 2**63 - 1, open_end: str = "") -> None:
    """Raise ValueError unless value is an int from least to most. open_end: ", or None", where that is allowed too."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}{open_end}")
    if value > most:
        raise ValueError(f"{name}={value}: must be at most {most:,}{open_end}")


def is_number(value: Any) -> bool:
    """An int or float, neither nan nor infinite, nor too large for a float."""
    return type(value) in (int, float) and (type(value) is int or math.isfinite(value)) and abs(value) < 2**1023


def check_memory(needed: int, what: str, way_out: str) -> None:
    """Raise ValueError where so many bytes are more than the machine has."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(f"{what} need {needed >> 30:,} GiB, and this machine has {there >> 30:,}; {way_out}")


def check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    """Raise ValueError unless value is a tensor of one of the dtypes."""
    if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
        found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        kind = "integers (int64)" if dtypes is INTEGERS else "floating point numbers"
        raise ValueError(f"{name} must be a tensor of {kind}, found {found}")
