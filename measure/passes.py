"""The losses of windows, from as few forward passes as a causal model needs."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from measure.windows import Windows
from model import GPT
from model.positions import PositionScheme
from model.sampling import evaluating

BATCH_TOKENS = 16384


def token_bar(total: int, shown: bool) -> tqdm:
    """A bar over all tokens to pass; where the output is no terminal, it is printed every 30 seconds."""
    every = 0.1 if sys.stderr.isatty() else 30
    return tqdm(total=total, unit="token", unit_scale=True, leave=False, disable=not shown, mininterval=every)


def plan_passes(windows: Sequence[Windows], scheme: PositionScheme) -> tuple[np.ndarray, np.ndarray]:
    """The passes that score all windows, int64 (passes, 3): start, number of inputs, scaling length; and the pass of
    each window, int64 (windows,), all lists of windows one after the other.

    A causal model's losses at the start of a long window are those of a shorter window that starts there, so each start
    is passed once, to the furthest target. Windows whose lengths have other frequencies (regimes) are passed apart.
    """
    spans = np.concatenate([w.spans for w in windows])
    regimes = {}  # of equal ones, the first length stands for all
    lengths = [regimes.setdefault(scheme.regime(w.length), w.length) for w in windows]
    of_length = np.repeat(np.array(lengths, dtype=np.int64), [len(w.spans) for w in windows])
    keys, of_pass = np.unique(np.stack((of_length, spans[:, 0]), axis=1), axis=0, return_inverse=True)
    of_pass, sizes = of_pass.ravel(), np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(sizes, of_pass, spans[:, 2] - 1 - spans[:, 0])
    return np.stack((keys[:, 1], sizes, keys[:, 0]), axis=1), of_pass


@torch.no_grad()  # not inference_mode: weights that a sharded model gathers in it could not be trained on afterwards
def score(
    model: GPT,
    tokens: np.ndarray,
    windows: Sequence[Windows],
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,
    ranks: Any = None,
) -> list[np.ndarray]:
    """Of each list of windows the losses, float64 (windows,), in nats summed over each window's targets.

    The processes of a job (ranks) take turns with the batches, and then all have all losses. progress: called after
    each round with the tokens passed in it. Dropout is off.
    """
    if not windows:  # a learned table shorter than all lengths
        return []
    rank, world_size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
    passes, of_pass = plan_passes(windows, model.pos)
    spans = np.concatenate([w.spans for w in windows])
    order = np.argsort(of_pass, kind="stable")
    bounds = np.searchsorted(of_pass[order], np.arange(len(passes) + 1))
    losses, batches = np.zeros(len(spans)), list(_batches(passes, batch_tokens))
    with evaluating(model):
        for first in range(0, len(batches), world_size):
            around = batches[first : first + world_size]
            # Where the last round has too few batches for all, the others pass its first one too, for nothing: the
            # passes of a sharded model need every process.
            batch = around[rank if rank < len(around) else 0]
            wanted = [order[bounds[i] : bounds[i + 1]] for i in batch]
            row = np.repeat(np.arange(len(batch)), [len(w) for w in wanted])
            wanted = np.concatenate(wanted)
            found = _batch_losses(model, tokens, passes[batch], spans[wanted], row)
            if rank < len(around):
                losses[wanted] = found
            if progress is not None:
                progress(int(sum(passes[batch, 1].sum() for batch in around)))
    if ranks:
        ranks.add_up(torch.from_numpy(losses))  # in place
    return np.split(losses, np.cumsum([len(w.spans) for w in windows])[:-1])


def _batches(passes: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Indices of passes that share their frequencies, about batch_tokens tokens at a time."""
    for length in np.unique(passes[:, 2]):
        same = np.flatnonzero(passes[:, 2] == length)
        same = same[np.argsort(-passes[same, 1], kind="stable")]  # like sizes together: the shorter ones are padded
        while len(same):
            size = max(1, batch_tokens // int(passes[same[0], 1]))
            yield same[:size]
            same = same[size:]


def _batch_losses(model: GPT, tokens: np.ndarray, passes: np.ndarray, spans: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Summed losses of the spans (n, 3), each in its row (n,) of a batch of passes (B, 3): float64 (n,)."""
    device = next(model.parameters()).device
    starts, sizes, lengths = passes.T
    width = int(sizes.max())
    index = np.minimum(starts[:, None] + np.arange(width + 1), len(tokens) - 1)
    ids = torch.from_numpy(tokens[index].astype(np.int64))  # (B, T + 1), padded with whatever follows
    low, high = (spans[:, 1:] - 1 - starts[row, None]).T
    # Only targets that somebody wants have a loss: +1 where a span begins, -1 after it.
    scored = np.zeros((len(passes), width + 1), dtype=np.int64)
    np.add.at(scored, (row, low), 1)
    np.add.at(scored, (row, high), -1)
    targets = ids[:, 1:].masked_fill(torch.from_numpy(scored.cumsum(axis=1)[:, :-1] == 0), -100)
    nll = model(ids[:, :-1].to(device), targets=targets.to(device), scaling_length=int(lengths[0]))
    sums = np.zeros((len(passes), width + 1))
    sums[:, 1:] = nll.cpu().double().cumsum(dim=1).numpy()
    return sums[row, high] - sums[row, low]
