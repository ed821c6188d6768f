"""RoPE frequency scalings: the planes of a trained model turned more slowly, so that longer windows look familiar.

Every scaling is one plain function, without state, of the same form:

    scaling(plain, *, its keys) -> (inv_freq, attention_scale)

It returns the scaled frequencies, of plain.inv_freq's shape, dtype and device, and a factor on both cos and sin. Keys
are taken as complete_scaling leaves them. factor is the stretch s; s = 1 is plain RoPE, bit for bit (dynamic's up to
train_length, longrope's with divisors of 1).

A new scaling is one function, its name in SCALINGS, one file in configs/scaling/, and a line in `regime` if it looks at
length for more than an open factor. Its keyword-only arguments are its configuration keys: a default of None may stay
open, a number may not, and a key without a default holds one number per plane.
"""

import inspect
import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from model.checks import lookup

Scaled = tuple[Tensor, float]


class Plain(NamedTuple):
    """Plain RoPE, and where it is to be used."""

    inv_freq: Tensor  # float64 (planes,), base^(-2i/d) radians per position; d = 2 · planes, the head's rotary width
    base: float
    train_length: int  # tokens of the longest window seen in training
    length: int  # tokens of the sequence so far, or of the one to come

    def stretch(self, factor: float | None) -> float:
        """The factor; an open one stands for length / train_length, at least 1."""
        return max(1.0, self.length / self.train_length) if factor is None else factor

    def steps(self) -> Tensor:
        """0, 1, 2 ... of the planes, as inv_freq is."""
        return torch.arange(len(self.inv_freq), dtype=self.inv_freq.dtype, device=self.inv_freq.device)


def linear(plain: Plain, *, factor: float | None = None) -> Scaled:
    """Position interpolation (Chen et al. 2023, equation 4): every plane s times as slow."""
    return plain.inv_freq / plain.stretch(factor), 1.0


def ntk(plain: Plain, *, factor: float | None = None) -> Scaled:
    """NTK-aware scaling (bloc97 2023; Peng et al. 2023, section 3.1): RoPE with the base b · s^(d/(d-2)).

    The exponent makes the slowest plane s times as slow and leaves the fastest alone. Raises ValueError for d = 2.
    """
    planes = len(plain.inv_freq)
    if planes < 2:
        raise ValueError(f"scaling=ntk (or dynamic) needs a rotary width of at least 4, found {2 * planes}; use linear")
    # (b · s^(d/(d-2)))^(-2i/d) = b^(-2i/d) · s^(-i/(planes-1)), written so that s = 1 multiplies by exactly 1.
    return plain.inv_freq * plain.stretch(factor) ** -(plain.steps() / (planes - 1)), 1.0


def dynamic(plain: Plain, *, factor: float | None = None) -> Scaled:
    """Dynamic NTK (emozilla 2023): the base b · (s·L/T - (s-1))^(d/(d-2)), L = max(length, T), T = train_length.

    An open factor is 1 here: NTK scaling by L/T. Past T every new token changes all frequencies.
    """
    return ntk(plain, factor=1.0 + (1.0 if factor is None else factor) * (plain.stretch(None) - 1.0))


def yarn(
    plain: Plain,
    *,
    factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_scale: float | None = None,
) -> Scaled:
    """YaRN (Peng et al. 2023, sections 3.2 and 3.3): interpolate the slow planes, leave the fast ones alone.

    Planes that turn at least beta_fast times within train_length stay, those that turn at most beta_slow times are
    divided by s. Between them the paper's ramp is linear in the turns; its authors' code, followed here as everywhere,
    makes it linear in i, between ends rounded outwards. attention_scale: the paper's sqrt(1/t) = 0.1 ln(s) + 1.
    """
    factor = plain.stretch(factor)
    rotary_width = 2 * len(plain.inv_freq)

    def plane_of(turns: float) -> float:
        return rotary_width * math.log(plain.train_length / (turns * 2 * math.pi)) / (2 * math.log(plain.base))

    first = max(math.floor(plane_of(beta_fast)), 0)
    last = min(math.ceil(plane_of(beta_slow)), rotary_width - 1)
    # With first > last (all planes on one side of the ramp) the authors' ramp runs backwards; this one stays a step.
    ramp = (plain.steps() - first) / (max(last, first + 0.001) - first)
    scaled = torch.lerp(plain.inv_freq, plain.inv_freq / factor, ramp.clamp(0, 1))
    return scaled, 0.1 * math.log(factor) + 1.0 if attention_scale is None else attention_scale


def longrope(plain: Plain, *, factor: float | None = None, short: list[float], long: list[float]) -> Scaled:
    """LongRoPE (Ding et al. 2024) as Phi-3 has it: a searched divisor for each plane, one set per side of train_length.

    short divides up to train_length, long past it. attention_scale is sqrt(1 + ln(s) / ln(train_length)) on both sides
    (with an open factor, s is 1 up to train_length). Raises ValueError for a train_length of 1, whose logarithm is 0.
    """
    if plain.train_length < 2:
        raise ValueError(f"scaling=longrope needs a train_length of at least 2, found {plain.train_length}; use yarn")
    chosen = long if plain.length > plain.train_length else short
    divisors = torch.tensor(chosen, dtype=plain.inv_freq.dtype, device=plain.inv_freq.device)
    return plain.inv_freq / divisors, math.sqrt(1.0 + math.log(plain.stretch(factor)) / math.log(plain.train_length))


def llama3(plain: Plain, *, factor: float | None = None, low: float = 1.0, high: float = 4.0) -> Scaled:
    """Llama 3.1 (Grattafiori et al. 2024, reference code): by the turns that a plane makes within train_length.

    Fewer than low (a wavelength above train_length / low): divided by s. More than high: left alone. Between: linear
    in the turns.
    """
    turns = plain.train_length * plain.inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(plain.inv_freq / plain.stretch(factor), plain.inv_freq, kept), 1.0


SCALINGS = {scaling.__name__: scaling for scaling in (linear, ntk, dynamic, yarn, longrope, llama3)}


def scaled(inv_freq: Tensor, base: float, scaling: dict, train_length: int, length: int) -> Scaled:
    keys = {key: value for key, value in scaling.items() if key != "name"}
    return SCALINGS[scaling["name"]](Plain(inv_freq, base, train_length, length), **keys)


def regime(scaling: dict, train_length: int, length: int) -> Hashable:
    """Equal for two lengths exactly where a completed scaling returns the same for both; None where it always does."""
    if scaling.get("factor", 1.0) is None or scaling["name"] == "dynamic":
        return max(train_length, length)
    return length > train_length if scaling["name"] == "longrope" else None


LEAST, MOST = 1e-9, 1e9  # beyond them angles or scores would overflow


def complete_scaling(scaling: dict, planes: int) -> dict:
    """The scaling's name and all of its keys, defaults filled in. Raises ValueError, naming what is allowed."""
    name, known = lookup("scaling", SCALINGS, scaling)
    done = {"name": name}
    for key, default in known.items():
        value, listed = scaling.get(key, default), default is inspect.Parameter.empty
        numbers, size = (value, planes) if listed else ([value], 1)
        least = 1 if key == "factor" else LEAST  # a factor of 1 is plain RoPE
        fits = type(numbers) in (list, tuple) and len(numbers) == size
        # The comparison turns down nan and inf; type() turns down True.
        fits = fits and all(type(number) in (int, float) and least <= number <= MOST for number in numbers)
        if not fits and not (value is None and default is None):
            found = f"={value!r}" if key in scaling else " is missing"
            need = f"a list of {planes} finite numbers, one per plane," if listed else "a finite number"
            way_out = "" if listed else f"; or use the default, {'null' if default is None else default}"
            raise ValueError(f"scaling.{key}{found}: must be {need} of at least {least:g}, at most {MOST:g}{way_out}")
        done[key] = [*map(float, value)] if listed else value and float(value)
    for lower, upper in (("beta_slow", "beta_fast"), ("low", "high")):
        if lower in done and done[lower] >= done[upper]:
            defaults = f"the defaults are {known[upper]} and {known[lower]}"
            raise ValueError(f"scaling.{upper}={done[upper]}: must be above scaling.{lower}={done[lower]}; {defaults}")
    return done
