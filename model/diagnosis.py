"""What a RoPE setting does, in numbers: its planes, its precision, its decay with distance.

usage: python -m model.rope head_dim=64 train_length=256 [key=value ...]

  head_dim      rotary width of a head, even; two dimensions form a plane
  train_length  tokens of the longest window seen in training
  base          θ_i = base^(-2i / head_dim) radians a token; default 10000
  scaling       a frequency scaling, such as yarn; its keys are words too: factor=4 beta_fast=32 short=1,1,2,4
  length        tokens of the sequence it is to be used on; default 4 · train_length
  positions     of keys in the table of precision, their queries 4 tokens later; default 3,103,1000003
  plot          a .png file for the bound on the decay
"""

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.checkpoint import write_file
from model.registry import lookup
from model.rope import rope_frequencies, rotate
from model.scaling import SCALINGS


class Plane(NamedTuple):
    theta: float  # radians a token, as trained
    period: float  # tokens, as trained
    turns: float  # within the training length
    slowdown: float  # θ as trained, over θ as used
    new_from: int | None  # the first position of the sequence at an angle past the trained ones; None: there is none


def planes(trained: Tensor, used: Tensor, train_length: int, length: int) -> list[Plane]:
    """Each plane's turns in training, and whether a sequence of `length` tokens takes it to angles it has not seen.

    trained, used: θ in training and at length, float64 (planes,), radians a token. A plane that turns at least once
    within train_length has seen every angle, any other those below train_length · θ (so what lies between two trained
    positions counts as seen). turns is the ratio r of Peng et al. 2023, section 3.2.
    """
    rows = []
    for theta, new_theta in zip(trained.tolist(), used.tolist(), strict=True):
        turns, slowdown = train_length * theta / (2 * math.pi), theta / new_theta
        end = train_length * slowdown * (1 - 1e-12)  # the factor: rounding must not lift a whole number past itself
        new_from = math.ceil(end) if turns < 1 and end <= length - 1 else None
        rows.append(Plane(theta, 2 * math.pi / theta, turns, slowdown, new_from))
    return rows


def complete_planes(rows: list[Plane]) -> int:
    """How many planes turn at least once within the training length, and so have seen every angle."""
    return sum(plane.turns >= 1 for plane in rows)


def _all_in(dtype: torch.dtype, q: Tensor, k: Tensor, m: int, n: int, inv_freq: Tensor) -> tuple[float, float]:
    turned, error = [], 0.0
    for x, position in ((q.to(dtype), m), (k.to(dtype), n)):
        angles = (position * inv_freq.to(dtype).double()).to(dtype)
        error = max(error, (angles.double() - position * inv_freq).abs().max().item())
        cos, sin = angles.cos(), angles.sin()
        turned.append(torch.stack((x[::2] * cos - x[1::2] * sin, x[1::2] * cos + x[::2] * sin), dim=-1))
    return error, (turned[0] * turned[1]).sum().item()


def precision(q: Tensor, k: Tensor, m: int, n: int, inv_freq: Tensor) -> dict[str, tuple[float, float, float]]:
    """The score of q at position m with k at n (Su et al. 2021, equation 34, interleaved), computed in several ways.

    q, k: float64 (2 · planes,). inv_freq: float64 (planes,), radians a token. Returns for each way the largest error of
    an angle (radians; inf where the dtype cannot hold it), the score (nan there), and its error against float64.

    "all <dtype>" rounds to dtype, each once: θ, position · θ, cos, sin, q, k, every product and sum of the rotation,
    the products of the score and their sum (added in float32, as torch does). "Ropewalk" is model/rope.py on q and k of
    that dtype: angles in float64, the rotation in float32; the products of the score are added in float32. (At a
    million tokens all bfloat16 angles of positions 4 apart may be equal: it then gives the score at distance 0.)
    """
    ways = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        ways[f"all {str(dtype)[6:]}"] = _all_in(dtype, q, k, m, n, inv_freq)
    for dtype in (torch.float32, torch.bfloat16):
        turned = [rotate(x.to(dtype)[None], torch.tensor([p]), inv_freq, "interleaved") for x, p in ((q, m), (k, n))]
        ways[f"Ropewalk, {str(dtype)[6:]} q and k"] = 0.0, (turned[0].float() * turned[1].float()).sum().item()
    return {way: (error, score, abs(score - ways["all float64"][1])) for way, (error, score) in ways.items()}


def decay_bound(distances: Tensor, inv_freq: Tensor) -> Tensor:
    """The mean over i of |S_{i+1}|, S_j the sum over l < j of e^(√-1 · distance · θ_l): float64 (N,), no unit.

    Times the largest step between the products of neighbouring planes it bounds the score, up to the number of planes
    (Su et al. 2021, section 3.4.3, equation 37). distances: (N,), tokens. inv_freq: θ, float64 (planes,), radians a
    token. At distance 0 it is (planes + 1) / 2.
    """
    angles = distances.double()[:, None] * inv_freq
    return torch.polar(torch.ones_like(angles), angles).cumsum(dim=1).abs().mean(dim=1)


def _plot(path: Path, curves: dict[str, Tensor], train_length: int, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    distances = torch.logspace(0, math.log10(4 * train_length), 1500, dtype=torch.float64).round().unique()
    for (label, inv_freq), colour in zip(curves.items(), ("#0072B2", "#D55E00"), strict=False):
        axes.plot(distances, decay_bound(distances, inv_freq), color=colour, linewidth=1, label=label)
    axes.axvline(train_length, color="#777777", linestyle="--", linewidth=1, label=f"training length {train_length:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda distance, _: f"{distance:,.0f}")
    axes.set(xlim=(1, 4 * train_length), ylim=(0, None), ylabel="bound on the score, mean of |S|")
    axes.set_xlabel("distance between query and key, tokens (log scale)")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def _value(text: str):
    """A number or null as in JSON, a list of them where there are commas, or else the text."""
    try:
        values = json.loads(f"[{text}]")
    except ValueError:
        return text
    return values[0] if len(values) == 1 else values or text


def _read(words: list[str]) -> dict:
    """The arguments of report. Raises ValueError, but leaves the range of base and the scaling's values to report."""
    given = {"head_dim": "missing", "train_length": "missing", "base": 10000.0, "scaling": "none", "length": None}
    given |= {"positions": [3, 103, 1_000_003], "plot": None}
    known = [*given]
    given |= {key: _value(text) for key, _, text in (word.partition("=") for word in words)}
    name, base, plot = given["scaling"], given["base"], given["plot"]
    its_keys = [] if name == "none" else lookup("scaling", SCALINGS, {"name": name})[1]
    if unknown := [key for key in given if key not in (*known, *its_keys)]:
        raise ValueError(f"{unknown[0]!r}: no such key; with scaling={name} there are {', '.join((*known, *its_keys))}")
    if given["length"] is None:
        given["length"] = 4 * given["train_length"]
    if not isinstance(given["positions"], list):
        given["positions"] = [given["positions"]]
    wholes = [(key, given[key], *ends) for key, *ends in (("head_dim", 2, 8192), ("train_length", 1, 10**12))]
    wholes += [("length", given["length"], 1, 10**13), *(("positions", n, 0, 10**15) for n in given["positions"])]
    for key, value, least, most in wholes:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{key}={value}: must be a whole number from {least} to {most:,}")
    if type(base) not in (int, float):
        raise ValueError(f"base={base}: must be a finite number above 1")
    if plot is not None and not str(plot).endswith(".png"):
        raise ValueError(f"plot={plot}: must be the name of a .png file")
    return given | {"scaling": {"name": name} | {key: given.pop(key) for key in its_keys if key in given}}


def _short(value: float) -> str:
    """Three significant digits, and all of those before the point."""
    if not math.isfinite(value):
        return "overflows"
    return "0" if value == 0 else f"{value:,.0f}" if 99.95 <= value < 1e9 else f"{value:#.3g}"


def _table(head: list[str], rows: list[list[str]], left: int | None = None) -> list[str]:
    """Lines of columns aligned to the right, but for column `left`."""
    columns = []
    for i, column in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if i == left else cell.rjust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def report(
    head_dim: int, train_length: int, base: float, scaling: dict, length: int, positions: list[int], plot: str | None
) -> str:
    """What main prints; draws the plot as well. Raises ValueError for a base and a scaling out of range."""
    trained, _ = rope_frequencies(head_dim, base)
    used, scale = rope_frequencies(head_dim, base, scaling, train_length, length)
    title, curves = f"RoPE, head width {head_dim}, base {base:,g}, training length {train_length:,}", {"RoPE": trained}
    lines = [title]
    if scaling["name"] != "none":
        curves[f"{scaling['name']} at length {length:,}"] = used
        lines = [f"{title}; {scaling['name']} at length {length:,}, scores times {scale**2:.3g}"]

    rows, cells = planes(trained, used, train_length, length), []
    shown = 2 + len(curves)  # times slower: with a scaling only
    for i, row in enumerate(rows):
        new = "no" if row.new_from is None else f"new angles from position {row.new_from:,}"
        cells.append([str(i), *map(_short, row[:shown]), new])
    head = ["plane", "θ, radians/token", "period, tokens", f"turns in {train_length:,}", "times slower"][: 1 + shown]
    lines += ["", *_table([*head, f"unseen angles up to length {length:,}"], cells, left=len(head)), ""]
    lines += [f"{complete_planes(rows)} of {len(rows)} planes complete a turn within {train_length:,} tokens.", ""]

    generator, cells = torch.Generator().manual_seed(0), []
    q, k = (torch.randn(head_dim, dtype=torch.float64, generator=generator) for _ in range(2))
    for n in positions:
        pair = f"{n + 4:,} and {n:,}"
        for way, (error, score, off) in precision(q, k, n + 4, n, used).items():
            cells.append([pair, way, _short(error), f"{score:.6f}".replace("nan", "overflows"), _short(off)])
            pair = ""
    head = ["positions", "computed in, by", "angle error, radians", "score", "score error"]
    lines += ["Precision: score of a random query with a random key", *_table(head, cells, left=1), ""]

    distances = sorted({2**j for j in range((4 * train_length).bit_length())} | {train_length, 4 * train_length})
    bounds = [decay_bound(torch.tensor(distances), inv_freq).tolist() for inv_freq in curves.values()]
    cells = [[f"{distance:,}", *(f"{b:.2f}" for b in row)] for distance, *row in zip(distances, *bounds, strict=True)]
    lines += [f"Decay: bound on the score at a distance, mean of |S| ({(len(rows) + 1) / 2:g} at distance 0)"]
    lines += _table(["distance", *curves], cells)
    if plot:
        _plot(Path(plot), curves, train_length, title)
        lines += ["", f"plot: {plot}"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Print the report on words key=value (default: the command line's), or what is wrong and exit with status 2."""
    words = sys.argv[1:] if argv is None else argv
    if not words or "--help" in words or "-h" in words:
        print(__doc__)
        return
    try:
        print(report(**_read(words)))
    except (ValueError, ArithmeticError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
