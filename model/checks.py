"""Arguments and names, refused with one message each. A name is looked up in a registry, never imported by its path."""

import inspect
import numbers
from collections.abc import Callable
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
    return type(value) in (int, float) and abs(value) < 2**1023


def check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    """Raise ValueError unless value is a tensor of one of the dtypes."""
    if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
        found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        kind = "integers (int64)" if dtypes is INTEGERS else "floating point numbers"
        raise ValueError(f"{name} must be a tensor of {kind}, found {found}")


def check_ids(name: str, ids: Any, model: torch.nn.Module) -> None:
    """Raise ValueError unless ids are integers (B, T), B and T at least 1, on the model's device, in its vocabulary."""
    check_tensor(name, ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"{name} must be (B, T) with B and T of at least 1, found {tuple(ids.shape)}")
    if ids.device != model.embedding.weight.device:
        raise ValueError(f"{name} are on {ids.device}, the model is on {model.embedding.weight.device}")
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        for found in map(int, ids.aminmax()):
            if not 0 <= found < model.config.vocab_size:
                raise ValueError(f"token id {found} is outside the vocabulary (0 to {model.config.vocab_size - 1})")


def check_positions(positions: Any, tokens: torch.Tensor, gaps: bool) -> None:
    """Raise ValueError unless positions are integers (T,) that grow from at least 0, by one each if not `gaps`."""
    check_tensor("positions", positions)
    if positions.shape != tokens.shape[1:]:
        raise ValueError(f"positions {tuple(positions.shape)} must be (T,) for tokens {tuple(tokens.shape)}")
    if positions.device.type == "cpu" and not torch.compiler.is_compiling():
        steps = positions.diff(prepend=positions[:1] - 1)
        if positions[0] < 0 or (steps < 1).any():
            raise ValueError(f"positions must grow from at least 0, found {positions.tolist()}")
        if not gaps and (steps > 1).any():
            raise ValueError("positions must grow one by one for a scheme with a bias, and for windows")


def lookup(group: str, registry: dict[str, Callable], given: dict) -> tuple[str, dict]:
    """The name in `given`, and the configuration keys of what it names, with their defaults.

    The keys are the keyword-only arguments of the registered class or function; one without a default has
    inspect.Parameter.empty. Raises ValueError, listing what is known, for a name or a key that is not.
    """
    if not isinstance(given, dict) or "name" not in given:
        raise ValueError(f"{group}={given!r}: must be a mapping with a name out of {', '.join(registry)}")
    name = given["name"]
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f"{group}={name!r}: known names are {', '.join(registry)}")
    parameters = inspect.signature(registry[name]).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for key in given:
        if key != "name" and key not in known:
            raise ValueError(f"{group}.{key}: {name} has no such key; it knows {', '.join(known) or 'none'}")
    return name, known


def complete(group: str, registry: dict[str, Callable], given: dict) -> dict:
    """The name in `given` and all keys of what it names, defaults filled in.

    Raises ValueError as `lookup` does, and for a value whose type is not its default's.
    """
    name, known = lookup(group, registry, given)
    done = {"name": name}
    for key, default in known.items():
        value, kind = given.get(key, default), type(default)
        if kind is int:
            check_whole(f"{group}.{key}", value)
        elif kind is float and is_number(value):
            value = float(value)
        elif kind is float or type(value) is not kind:
            raise ValueError(f"{group}.{key}={value!r}: must be of type {kind.__name__}, as {default!r} is")
        done[key] = value
    return done
