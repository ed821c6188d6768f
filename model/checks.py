"""Arguments of public functions, refused with one message each."""

import math
import numbers
from typing import Any

import torch

INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_whole(name: str, value: Any, least: int = 1, most: int = 2**31 - 1, optional: bool = False) -> None:
    """Raise ValueError unless value is a whole number (Python's or numpy's) from least to most, or None if optional."""
    if optional and value is None:
        return
    or_none = ", or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}{or_none}")
    if value > most:
        raise ValueError(f"{name}={value}: must be at most {most:,}{or_none}")


def is_number(value: Any) -> bool:
    """An int or float, neither nan nor infinite, nor too large for a float."""
    return type(value) in (int, float) and (type(value) is int or math.isfinite(value)) and abs(value) < 2**1023


def check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    """Raise ValueError unless value is a tensor of one of the dtypes."""
    if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
        found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        kind = "integers (int64)" if dtypes is INTEGERS else "floating point numbers"
        raise ValueError(f"{name} must be a tensor of {kind}, found {found}")
