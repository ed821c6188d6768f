"""What a RoPE setting does, in numbers: its planes, its precision, its decay with distance.

    python -m model.rope 64 256                                   # rotary width of a head, training length
    python -m model.rope 64 256 --scaling yarn factor=4 beta_fast=16 --length 2048 --plot decay.png

Two dimensions of a head form a plane. `--length`: tokens of the sequence that the setting is to be used on.
`--positions`: of the keys in the table of precision; each query stands 4 tokens later.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.checkpoint import write_file
from model.checks import check_whole
from model.rope import rope_frequencies, rotate


class Plane(NamedTuple):
    theta: float  # radians a token, as trained
    period: float  # tokens, as trained
    turns: float  # within the training length
    slowdown: float  # θ as trained, over θ as used
    new_from: int | None  # the first position of the sequence at an angle past the trained ones; None: there is none


def planes(trained: Tensor, used: Tensor, train_length: int, length: int) -> list[Plane]:
    """Each plane's turns in training, and whether a sequence of `length` tokens takes it to angles it has not seen.

    trained, used: θ in training and at length, float64 (planes,), radians a token. A plane that turns at least once
    within train_length has seen every angle, any other those below train_length · θ. turns is the ratio r of Peng et
    al. 2023, section 3.2.
    """
    rows = []
    for theta, new_theta in zip(trained.tolist(), used.tolist(), strict=True):
        turns, slowdown = train_length * theta / (2 * math.pi), theta / new_theta
        end = train_length * slowdown * (1 - 1e-12)  # the factor: rounding must not lift a whole number past itself
        new_from = math.ceil(end) if turns < 1 and end <= length - 1 else None
        rows.append(Plane(theta, 2 * math.pi / theta, turns, slowdown, new_from))
    return rows


def precision(q: Tensor, k: Tensor, m: int, n: int, inv_freq: Tensor) -> dict[str, tuple[float, float, float]]:
    """The score of q at position m with k at n (Su et al. 2021, equation 34, interleaved), computed in several ways.

    q, k: float64 (2 · planes,). inv_freq: float64 (planes,), radians a token. Returns for each way the largest error of
    an angle (radians; inf where the dtype cannot hold it), the score (nan there), and its error against float64.
    "all <dtype>" rounds every number and result to dtype. "Ropewalk" is model/rope.py on q and k of that dtype.
    """
    ways, pair = {}, ((q, m), (k, n))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        angles = [(position * inv_freq.to(dtype).double()).to(dtype) for _, position in pair]
        errors = [(a.double() - position * inv_freq).abs().max() for a, (_, position) in zip(angles, pair, strict=True)]
        turned = []
        for angle, (x, _) in zip(angles, pair, strict=True):
            cos, sin, first, second = angle.cos(), angle.sin(), x.to(dtype)[::2], x.to(dtype)[1::2]
            turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin)))
        ways[f"all {str(dtype)[6:]}"] = max(errors).item(), (turned[0] * turned[1]).sum().item()
    for dtype in (torch.float32, torch.bfloat16):
        turned = [rotate(x.to(dtype)[None], torch.tensor([p]), inv_freq, "interleaved") for x, p in pair]
        ways[f"Ropewalk, {str(dtype)[6:]} q and k"] = 0.0, (turned[0].float() * turned[1].float()).sum().item()
    return {way: (error, score, abs(score - ways["all float64"][1])) for way, (error, score) in ways.items()}


def decay_bound(distances: Tensor, inv_freq: Tensor) -> Tensor:
    """The mean over i of |S_{i+1}|, S_j the sum over l < j of e^(√-1 · distance · θ_l): float64 (N,), no unit.

    It bounds the score up to a factor (Su et al. 2021, section 3.4.3, equation 37). At distance 0: (planes + 1) / 2.
    distances: (N,), tokens. inv_freq: θ, float64 (planes,), radians a token.
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
    axes.set(title=title, xlabel="distance between query and key, tokens", ylabel="bound on the score, mean of |S|")
    axes.legend(frameon=False)
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def report(
    head_dim: int, train_length: int, base: float, scaling: dict | None, length: int, positions: list[int]
) -> tuple[list[str], dict[str, Tensor]]:
    """Lines of text, and θ by name for a plot. ValueError for what is out of range."""
    check_whole("train_length", train_length, most=10**15)
    check_whole("length", length, most=10**15)
    check_whole("positions", min(positions), least=0)
    trained, _ = rope_frequencies(head_dim, base)
    used, scale = rope_frequencies(head_dim, base, scaling, train_length, length)
    lines = [f"RoPE, head width {head_dim}, base {base:,g}, training length {train_length:,}"]
    curves = {"RoPE": trained}
    if scaling:
        curves[scaling["name"]] = used
        lines[0] += f"; {scaling['name']} at length {length:,}, scores times {scale**2:.3g}"

    rows, turns = planes(trained, used, train_length, length), f"turns in {train_length:,}"
    lines += ["", f"plane  θ, radians/token  period, tokens  {turns:>16}  times slower  unseen angles up to {length:,}"]
    for i, row in enumerate(rows):
        new = "no" if row.new_from is None else f"from position {row.new_from:,}"
        lines.append(f"{i:5}{row.theta:18.3g}{row.period:16,.2f}{row.turns:18,.3f}{row.slowdown:14.2f}  {new}")
    complete = sum(row.turns >= 1 for row in rows)
    lines += ["", f"{complete} of {len(rows)} planes complete a turn within {train_length:,} tokens.", ""]

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(head_dim, dtype=torch.float64, generator=generator) for _ in range(2))
    lines.append("Precision: score of a random query with a random key; inf and nan: too large for the dtype")
    lines.append(f"{'positions':>24}  {'computed in, by':<27}  angle error, radians       score  score error")
    for n in positions:
        for way, (error, score, off) in precision(q, k, n + 4, n, used).items():
            lines.append(f"{f'{n + 4:,} and {n:,}':>24}  {way:<27}{error:22.3g}{score:12.6f}{off:13.3g}")

    distances = sorted({2**j for j in range((4 * train_length).bit_length())} | {train_length, 4 * train_length})
    bounds = [decay_bound(torch.tensor(distances), inv_freq).tolist() for inv_freq in curves.values()]
    lines += ["", f"Decay: bound on the score at a distance, mean of |S| ({(len(rows) + 1) / 2:g} at distance 0)"]
    lines.append(f"{'distance':>12}" + "".join(f"{name:>12}" for name in curves))
    for distance, *bound in zip(distances, *bounds, strict=True):
        lines.append(f"{distance:12,}" + "".join(f"{value:12.2f}" for value in bound))
    return lines, curves


def main(words: list[str] | None = None) -> None:
    """Print the report; exits with status 2 and a message where a user can mend what is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m model.rope", description=__doc__, formatter_class=raw)
    parser.add_argument("head_dim", type=int, help="rotary width of a head, even")
    parser.add_argument("train_length", type=int, help="tokens of the longest window seen in training")
    parser.add_argument("--base", type=float, default=10000.0, help="θ_i = base^(-2i / head_dim) radians a token")
    parser.add_argument("--scaling", nargs="+", metavar=("NAME", "KEY=VALUE"), help="values as in JSON")
    parser.add_argument("--length", type=int, help="default 4 · train_length")
    parser.add_argument("--positions", type=int, nargs="+", default=[3, 103, 1_000_003])
    parser.add_argument("--plot", help="a .png file for the bound on the decay")
    given = vars(parser.parse_args(words))
    plot, given["length"] = given.pop("plot"), given["length"] or 4 * given["train_length"]
    try:
        if given["scaling"]:
            name, *keys = given["scaling"]
            pairs = (word.partition("=") for word in keys)
            given["scaling"] = {"name": name, **{key: json.loads(value) for key, _, value in pairs}}
        lines, curves = report(**given)
        print("\n".join(lines))
        if plot:
            _plot(Path(plot), curves, given["train_length"], lines[0])
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
