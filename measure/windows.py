"""Which tokens are scored in which context, and their losses, from as few forward passes as a causal model needs.

Two protocols, since they answer different questions (Press et al. 2021, "Train Short, Test Long", section 2.2): longer
windows of `nonoverlapping` also have fewer tokens with little context; under `sliding` only the context differs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from model import GPT
from model.positions import PositionScheme
from model.sampling import evaluating

PROTOCOLS = ("sliding", "nonoverlapping")
Windows = tuple[int, np.ndarray]  # a length and its windows, as cut returns them
BATCH_TOKENS = 16384  # passed at once
MULTIPLES = (1, 1.25, 1.5, 2, 4)  # of the training length: the lengths that are measured by default


def default_lengths(train_length: int, multiples: Sequence[float] = MULTIPLES) -> list[int]:
    return sorted({max(1, round(multiple * train_length)) for multiple in multiples})


def default_stride(train_length: int, lengths: Sequence[int]) -> int:
    """Half the training length, but no more than the shortest length; 1 for no lengths, which are refused later."""
    return max(1, min(train_length // 2, min(lengths, default=1)))


def cut(
    pieces: np.ndarray, length: int, longest: int, protocol: str, stride: int, max_windows: int | None = None
) -> np.ndarray:
    """The windows of one length, int64 (windows, 3). Whatever the length, the same tokens are scored, in their order.

    start, first, end: tokens start ... end - 2 are passed, the targets first ... end - 1 are scored.
    nonoverlapping: windows of `length` side by side, the last one of a piece what is left; all tokens but the first of
    each piece are scored. sliding: the targets are cut into blocks of `stride` from the first in each piece that has a
    full context at the longest length; a window of `length` inputs ends with its block. max_windows keeps at most so
    many windows of the longest length, spread evenly, and of shorter windows those that score the same tokens.
    """
    if max_windows is not None and protocol == "nonoverlapping":
        spans = cut(pieces, longest, longest, protocol, stride)
        pieces = _spread(spans[spans[:, 2] - spans[:, 1] == longest], max_windows)[:, [0, 2]]
    parts = []
    for begin, end in pieces.tolist():
        if protocol == "nonoverlapping":
            starts = np.arange(begin, end - 1, length)
            firsts, ends = starts + 1, np.minimum(starts + length + 1, end)
        else:
            firsts = np.arange(begin + longest - stride + 1, end, stride)
            ends = np.minimum(firsts + stride, end)
            starts = ends - 1 - length
        parts.append(np.stack((starts, firsts, ends), axis=1))
    spans = np.concatenate(parts)
    return _spread(spans, max_windows) if max_windows is not None and protocol == "sliding" else spans


def _spread(spans: np.ndarray, keep: int) -> np.ndarray:
    """At most `keep` of the spans, evenly from the first to the last."""
    n = len(spans)
    return spans if keep >= n else spans[np.arange(keep) * (n - 1) // max(1, keep - 1)]


def targets_of(spans: np.ndarray) -> np.ndarray:
    """The tokens that windows score, window by window: int64 (targets,)."""
    return np.concatenate([np.arange(first, end) for _, first, end in spans.tolist()])


def widening_edges(length: int) -> list[int]:
    """Edges of bins that widen: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 ... below `length`, and `length`."""
    powers = [2**k for k in range(1, length.bit_length())]
    return [edge for edge in sorted({0, 1, *powers, *(3 * power // 2 for power in powers)}) if edge < length] + [length]


def plan_passes(windows: Sequence[Windows], scheme: PositionScheme) -> list[tuple]:
    """A tuple per pass: scaling length, start, number of inputs, and the windows that it scores.

    Each of these is a tuple: first target, end, and where its losses begin in the array of all windows' losses.

    A causal model's losses at the start of a long window are those of a shorter window that starts there, so each start
    is passed once, to the furthest target. Windows whose lengths have other frequencies (regimes) are passed apart.
    """
    regimes, passes, place = {}, {}, 0
    for length, spans in windows:
        of_regime = regimes.setdefault(scheme.regime(length), length)  # of equal ones, the first length stands for all
        for start, first, end in spans.tolist():
            passes.setdefault((of_regime, start), []).append((first, end, place))
            place += end - first
    return [(*key, max(end for _, end, _ in scored) - 1 - key[1], scored) for key, scored in passes.items()]


@torch.no_grad()  # not inference_mode: weights that a sharded model gathers in it could not be trained on afterwards
def score(
    model: GPT,
    tokens: np.ndarray,
    windows: Sequence[Windows],
    progress: Callable | None = None,
    ranks: Any = None,
    first_position: int = 0,
) -> list[np.ndarray]:
    """Of each length the losses of its windows' targets, one window after the other, in nats: float64 (targets,).

    The processes of a job (ranks) take turns with the batches, and then all have all losses. progress: called after
    each round with the tokens passed in it. first_position: of each window's first token. Dropout is off.
    """
    if not windows:  # a learned table shorter than all lengths
        return []
    rank, world_size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
    sizes = [int((spans[:, 2] - spans[:, 1]).sum()) for _, spans in windows]
    losses, batches = np.zeros(sum(sizes)), list(_batches(plan_passes(windows, model.pos)))
    with evaluating(model):
        for first in range(0, len(batches), world_size):
            around = batches[first : first + world_size]
            # Where the last round has too few batches for all, the others pass its first one too, for nothing: the
            # passes of a sharded model need every process.
            mine = rank < len(around)
            batch = around[rank if mine else 0]
            nll = _batch_losses(model, tokens, batch, first_position)
            for row, (_, start, _, scored) in zip(nll, batch, strict=True):
                for target, end, place in scored if mine else ():
                    losses[place : place + end - target] = row[target - start - 1 : end - start - 1]
            if progress is not None:
                progress(sum(size for batch in around for _, _, size, _ in batch))
    if ranks:
        ranks.add_up(torch.from_numpy(losses))  # in place
    return np.split(losses, np.cumsum(sizes)[:-1])


def _batches(passes: list[tuple]) -> Iterator[list[tuple]]:
    """Passes that share their frequencies, about BATCH_TOKENS tokens at a time."""
    batch = []
    for one in sorted(passes, key=lambda one: (one[0], -one[2])):  # like sizes together: the shorter ones are padded
        if batch and (one[0] != batch[0][0] or (len(batch) + 1) * batch[0][2] > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(one)
    yield batch


def _batch_losses(model: GPT, tokens: np.ndarray, batch: list[tuple], first_position: int) -> np.ndarray:
    """Losses of a batch of passes, in nats: float64 (B, T), 0 where no window has a target."""
    device = next(model.parameters()).device
    lengths, starts, sizes, _ = zip(*batch, strict=True)
    index = np.minimum(np.array(starts)[:, None] + np.arange(max(sizes)), len(tokens) - 1)
    ids = tokens[index].astype(np.int64)  # (B, T), padded with whatever follows
    targets = np.full_like(ids, -100)  # only targets of a window have a loss
    for row, (_, start, _, scored) in zip(targets, batch, strict=True):
        for first, end, _ in scored:
            row[first - start - 1 : end - start - 1] = tokens[first:end]
    inputs, wanted = (torch.from_numpy(array).to(device) for array in (ids, targets))
    positions = first_position + torch.arange(ids.shape[1])
    return model(inputs, targets=wanted, scaling_length=lengths[0], positions=positions).cpu().double().numpy()
