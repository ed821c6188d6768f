"""What a RoPE setting does, in numbers: its planes, its precision, its decay with distance.

    python -m model.rope_report 64 256 --scaling '{"name": "yarn", "factor": 4}' --length 2048 --plot decay.png

takes the rotary width of a head and the training length; --length is that of the sequence it is to be used on.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import write_file
from model.checks import check_whole
from model.rope import rope_frequencies, rotate


def planes(trained: Tensor, used: Tensor, train_length: int, length: int) -> list[tuple]:
    """For each plane: θ, period, turns, θ / θ used, and the first position at an angle not seen in training, or None.

    trained, used: θ in training and at length, float64 (planes,), radians per token. A plane that turns at least once
    in train_length tokens has seen every angle, any other those below train_length · θ. Turns: Peng et al. 2023, 3.2.
    """
    rows = []
    for theta, new_theta in zip(trained.tolist(), used.tolist(), strict=True):
        turns, slowdown = train_length * theta / (2 * math.pi), theta / new_theta
        end = train_length * slowdown * (1 - 1e-12)  # the factor: rounding must not lift a whole number past itself
        new_from = math.ceil(end) if turns < 1 and end <= length - 1 else None
        rows.append((theta, 2 * math.pi / theta, turns, slowdown, new_from))
    return rows


def precision(q: Tensor, k: Tensor, m: int, n: int, inv_freq: Tensor) -> dict[str, tuple[float, float, float]]:
    """The score of q at position m with k at n (Su et al. 2021, equation 34, interleaved), computed in several ways.

    q, k: float64 (2 · planes,). inv_freq: float64 (planes,). Returns the largest error of an angle, the score and its
    error against float64. "all <dtype>" rounds every number and result to dtype. "Ropewalk" is model/rope.py.
    """
    ways = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        turned, errors = [], []
        for x, position in ((q, m), (k, n)):
            angle = (position * inv_freq.to(dtype).double()).to(dtype)
            errors.append((angle.double() - position * inv_freq).abs().max().item())
            cos, sin, first, second = angle.cos(), angle.sin(), x.to(dtype)[::2], x.to(dtype)[1::2]
            turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin)))
        ways[f"all {str(dtype)[6:]}"] = max(errors), (turned[0] * turned[1]).sum().item()
    for dtype in (torch.float32, torch.bfloat16):
        turned = [rotate(x.to(dtype)[None], torch.tensor([p]), inv_freq, "interleaved") for x, p in ((q, m), (k, n))]
        ways[f"Ropewalk, {str(dtype)[6:]} q and k"] = 0.0, (turned[0].float() * turned[1].float()).sum().item()
    return {way: (error, score, abs(score - ways["all float64"][1])) for way, (error, score) in ways.items()}


def decay_bound(distances: Tensor, inv_freq: Tensor) -> Tensor:
    """The mean over i of |S_{i+1}|, S_j the sum over l < j of e^(√-1 · distance · θ_l): (N,) for distances (N,).

    It bounds the score up to a factor (Su et al. 2021, section 3.4.3, equation 37). At distance 0: (planes + 1) / 2.
    """
    angles = distances.double()[:, None] * inv_freq
    return torch.polar(torch.ones_like(angles), angles).cumsum(dim=1).abs().mean(dim=1)


def plot_decay(path: Path, trained: Tensor, used: Tensor, train_length: int) -> None:
    from matplotlib.figure import Figure

    axes = Figure(layout="constrained").subplots()
    distances = torch.logspace(0, math.log10(4 * train_length), 1500, dtype=torch.float64)
    axes.semilogx(distances, decay_bound(distances, trained), linewidth=1, label="trained")
    axes.semilogx(distances, decay_bound(distances, used), linewidth=1, label="used")
    axes.axvline(train_length, linestyle="--", label="training length")
    axes.set(xlabel="distance between query and key, tokens", ylabel="bound on the score, mean of |S|")
    axes.legend()
    write_file(path, lambda temporary: axes.figure.savefig(temporary, format="png"))


def main(words: list[str] | None = None) -> None:
    """Print planes, precision and decay; exits with status 2 and a message where a user can mend what is wrong."""
    parser = argparse.ArgumentParser("python -m model.rope_report", description=__doc__.partition("\n")[0])
    parser.add_argument("head_dim", type=int)
    parser.add_argument("train_length", type=int)
    parser.add_argument("--base", type=float, default=10000.0)
    parser.add_argument("--scaling", type=json.loads, help="""such as '{"name": "yarn", "factor": 4}'""")
    parser.add_argument("--length", type=int, help="default 4 · train_length")
    parser.add_argument("--plot", type=Path, help="a .png file for the bound on the decay")
    given = parser.parse_args(words)
    train_length, length = given.train_length, 4 * given.train_length if given.length is None else given.length
    try:
        check_whole("train_length", train_length, most=10**15)
        check_whole("length", length, most=10**15)
        trained, _ = rope_frequencies(given.head_dim, given.base)
        used, scale = rope_frequencies(given.head_dim, given.base, given.scaling, train_length, length)
        if given.plot:
            plot_decay(given.plot, trained, used, train_length)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"RoPE, scaling {given.scaling} at length {length:,}, scores times {scale**2:.3g}")
    rows = planes(trained, used, train_length, length)
    print("plane   θ, radians/token  period, tokens  turns in training  times slower  unseen angles")
    for i, (theta, period, turns, slowdown, new_from) in enumerate(rows):
        new = "no" if new_from is None else f"from position {new_from:,}"
        print(f"{i:5}{theta:19.3g}{period:16,.2f}{turns:19,.3f}{slowdown:14.2f}  {new}")
    print(f"{sum(row[2] >= 1 for row in rows)} of {len(rows)} planes complete a turn within {train_length:,} tokens.\n")
    print("score of a random query with a random key       angle error, radians       score  score error")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2 * len(rows), dtype=torch.float64, generator=generator) for _ in range(2))
    for n in (3, 103, 1_000_003):
        for way, (error, score, off) in precision(q, k, n + 4, n, used).items():
            print(f"{n + 4:9,} and {n:9,}, {way:<27}{error:18.3g}{score:12.6f}{off:13.3g}")
    print("\ndistance     bound on the score (mean of |S|): trained        used")
    distances = torch.tensor([2**j for j in range((4 * train_length).bit_length())])
    for row in zip(distances.tolist(), decay_bound(distances, trained), decay_bound(distances, used), strict=True):
        print("{:8,}{:46.2f}{:12.2f}".format(*row))


if __name__ == "__main__":
    main()
