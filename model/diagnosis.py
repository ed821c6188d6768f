"""What a RoPE setting does, in numbers: its planes, its precision, its decay with distance.

usage: python -m model.rope head_dim=64 train_length=256 [key=value ...]

  head_dim      rotary width of a head, even; two dimensions form a plane
  train_length  tokens of the longest window seen in training
  base          θ_i = base^(-2i / head_dim) radians a token; default 10000
  scaling       a frequency scaling, such as yarn; its keys are words too: factor=4 beta_fast=32 short=1,1,2,4
  length        tokens of the sequence it is to be used on; default 4 · train_length
  positions     keys for the precision table, their queries 4 tokens later; default 3,103,1000003
  plot          a .png file for the bound on the decay
"""

import inspect
import math
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.registry import lookup
from model.rope import rope_frequencies, rotate
from model.scaling import SCALINGS


class Plane(NamedTuple):
    theta: float  # radians a token, as trained
    period: float  # tokens, as trained
    turns: float  # within the training length
    slowed: float  # as trained, over scaled
    new_from: int | None  # the first position at an angle past all that were trained; None: none in the sequence


class Precision(NamedTuple):
    computed: str  # in what, or by whom
    angle_error: float  # radians, the largest of all planes and both positions; inf: overflows
    score: float  # nan where the angle overflows
    score_error: float  # against float64


def planes(inv_freq: Tensor, scaled: Tensor, train_length: int, length: int) -> list[Plane]:
    """Each plane's turns in training, and whether a sequence of `length` tokens takes it to angles it has not seen.

    inv_freq, scaled: float64 (planes,), radians a token, as trained and as used at length (rope_frequencies). A plane
    that turns at least once within train_length has seen every angle, and any other those below train_length · θ: what
    lies between two trained positions counts as seen (Peng et al. 2023, section 3.2, has the same r = length / period).
    """
    turns = (train_length * inv_freq / (2 * math.pi)).tolist()
    # In units of the new positions; the last factor keeps 3.3 · 10 at 33 where θ / scaled is 3.3000000000000003.
    ends = (train_length * inv_freq / scaled * (1 - 1e-12)).tolist()
    news = [math.ceil(end) if t < 1 and end <= length - 1 else None for t, end in zip(turns, ends, strict=True)]
    columns = inv_freq.tolist(), (2 * math.pi / inv_freq).tolist(), turns, (inv_freq / scaled).tolist(), news
    return [Plane(*row) for row in zip(*columns, strict=True)]


def complete_planes(inv_freq: Tensor, train_length: int) -> int:
    """How many planes turn at least once within train_length positions. inv_freq: (planes,), radians a token."""
    return int((train_length * inv_freq / (2 * math.pi) >= 1).sum())


def _score_in(dtype: torch.dtype, q: Tensor, k: Tensor, m: int, n: int, inv_freq: Tensor) -> tuple[float, float]:
    turned, error = [], 0.0
    for x, position in ((q, m), (k, n)):
        angles = (position * inv_freq.to(dtype).double()).to(dtype)
        error = max(error, (angles.double() - position * inv_freq).abs().max().item())
        cos, sin, x = angles.cos(), angles.sin(), x.to(dtype)
        turned.append(torch.stack((x[::2] * cos - x[1::2] * sin, x[1::2] * cos + x[::2] * sin), dim=-1))
    return error, (turned[0] * turned[1]).sum().item()


def precision(q: Tensor, k: Tensor, m: int, n: int, inv_freq: Tensor) -> list[Precision]:
    """The score of q at position m with k at n (Su et al. 2021, equation 34, interleaved), computed in several ways.

    q, k: float64 (2 · planes,). inv_freq: float64 (planes,), radians a token. Named by a dtype: θ, position · θ (exact,
    then rounded once), cos, sin, q, k, all products and sums of the rotation, the products of the score and its sum
    (torch adds in float32) are each rounded to it. By Ropewalk: model/rope.py on float64 angles, the reference's own,
    for q and k in the model's dtype, products added in float32 as attention does.
    """
    ways = {str(d)[6:]: _score_in(d, q, k, m, n, inv_freq) for d in (torch.float64, torch.float32)}
    ways |= {str(d)[6:]: _score_in(d, q, k, m, n, inv_freq) for d in (torch.bfloat16, torch.float16)}
    for dtype in (torch.float32, torch.bfloat16):
        turned = [rotate(x.to(dtype)[None], torch.tensor([p]), inv_freq, "interleaved") for x, p in ((q, m), (k, n))]
        ways[f"Ropewalk, {str(dtype)[6:]} model"] = 0.0, (turned[0].float() * turned[1].float()).sum().item()
    exact = ways["float64"][1]
    return [Precision(name, error, score, abs(score - exact)) for name, (error, score) in ways.items()]


def decay_bound(distances: Tensor, inv_freq: Tensor) -> Tensor:
    """The mean over i of |S_{i+1}|, S_j the sum over l < j of e^(i · distance · θ_l); float64 (N,), without unit.

    Times the largest step between the products of neighbouring planes it bounds the score at that distance (Su et al.
    2021, section 3.4.3, equation 37). distances: (N,), tokens. inv_freq: (planes,). At distance 0: (planes + 1) / 2.
    """
    angles = distances.double()[:, None] * inv_freq
    return torch.polar(torch.ones_like(angles), angles).cumsum(dim=1).abs().mean(dim=1)


def _plot(path: Path, curves: dict[str, Tensor], train_length: int, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    distances = torch.logspace(0, math.log10(4 * train_length), 1500, dtype=torch.float64).round().unique()
    for (label, inv_freq), colour in zip(curves.items(), ("#0072B2", "#D55E00"), strict=False):
        axes.plot(distances, decay_bound(distances, inv_freq), color=colour, linewidth=1.2, label=label)
    axes.axvline(train_length, color="#777777", linestyle="--", linewidth=1, label=f"training length {train_length:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_xlim(1, 4 * train_length)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("distance between query and key, tokens (log scale)")
    axes.set_ylabel("bound on the score: mean of |S|")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=150)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        plt.close(figure)


def _whole(key: str, text: str, least: int, most: int = 2**53) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,15}", text) or not least <= int(text) <= most:
        raise ValueError(f"{key}={text}: must be a whole number from {least} to {most}, without separators")
    return int(text)


def _scaling_value(text: str, default):
    if default is inspect.Parameter.empty or "," in text:
        return [_scaling_value(part, None) for part in text.split(",")]
    try:
        return None if text in ("null", "None") else float(text)
    except ValueError:
        return text  # complete_scaling says what it must be


def _read(words: list[str]) -> dict:
    given = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key in given:
            raise ValueError(f"{word}: must be key=value, each key once; --help lists the keys")
        given[key] = text
    scaling = None
    if given.get("scaling", "none") != "none":
        scaling = {"name": given["scaling"]}
        _, known = lookup("scaling", SCALINGS, scaling)
        scaling |= {key: _scaling_value(given[key], default) for key, default in known.items() if key in given}
    keys = ["head_dim", "train_length", "base", "scaling", "length", "positions", "plot", *(known if scaling else ())]
    for key in given:
        if key not in keys:
            hint = "" if scaling else "; a scaling's own keys need scaling=<name>"
            raise ValueError(f"{key}: unknown key; known keys are {', '.join(keys)}{hint}")
    for key in keys[:2]:
        if key not in given:
            raise ValueError(f"{key} is missing: give at least head_dim=64 train_length=256, say")
    train_length = _whole("train_length", given["train_length"], 1, 2**31)
    try:
        base = float(given.get("base", "10000"))
    except ValueError:
        raise ValueError(f"base={given['base']}: must be a finite number above 1") from None
    plot = Path(given["plot"]) if "plot" in given else None
    if plot and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise ValueError(f"plot={plot}: must be a file name that ends in .png, in a folder that exists")
    return {
        "head_dim": _whole("head_dim", given["head_dim"], 2, 8192),
        "train_length": train_length,
        "base": base,
        "scaling": scaling,
        "length": _whole("length", given["length"], 1) if "length" in given else 4 * train_length,
        "positions": [_whole("positions", p, 0) for p in given.get("positions", "3,103,1000003").split(",")],
        "plot": plot,
    }


def _short(value: float) -> str:
    """Three significant digits, or a whole number."""
    if not math.isfinite(value):
        return "overflows"
    return "0" if value == 0 else f"{value:,.0f}" if 99.95 <= value < 1e9 else f"{value:#.3g}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join("  " + line for line in lines)


def report(
    head_dim: int, train_length: int, base: float, scaling: dict | None, length: int, positions: list[int], plot
): ...
