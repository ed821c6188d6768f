"""Training batches, as a pure function of where the training stands."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2)  # the epoch at hand, and its successor where a batch spans both
def _epoch(seed: int, epoch: int, windows: int, slack: int) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng([seed, epoch])
    return rng.permutation(windows), int(rng.integers(slack + 1))


def draw_batch(
    tokens: np.ndarray, length: int, batch_size: int, seed: int, step: int, rank: int = 0, world_size: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step, int64 (batch_size / world_size, length) each; targets[:, t] follows inputs[:, t].

    Each epoch cuts the tokens into windows that do not overlap, from an offset of its own, and visits every window once
    in a random order. All ranks together draw the same `batch_size` windows per step, whatever the number of ranks.
    """
    windows, slack = divmod(len(tokens) - 1, length)
    share = batch_size // world_size
    first, starts = step * batch_size + rank * share, []
    for place in range(first, first + share):
        epoch, index = divmod(place, windows)
        order, offset = _epoch(seed, epoch, windows, slack)
        starts.append(order[index] * length + offset)
    rows = tokens[np.array(starts)[:, None] + np.arange(length + 1)].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def draw_positions(length: int, stretch: float, seed: int, step: int) -> np.ndarray | None:
    """Randomised positions of a step (Ruoss et al. 2023): int64 (length,), growing, below stretch · length.

    None for a stretch of 1: positions count up from 0.
    """
    if stretch <= 1:
        return None
    rng = np.random.default_rng([seed, step, 1])
    return np.sort(rng.choice(int(stretch * length), length, replace=False))
