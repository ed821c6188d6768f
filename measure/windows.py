"""Which tokens are scored in which context.

Two protocols, since they answer different questions (Press et al. 2021, "Train Short, Test Long", section 2.2): longer
windows of `nonoverlapping` also have fewer tokens with little context; under `sliding` only the context differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

PROTOCOLS = ("sliding", "nonoverlapping")
MULTIPLES = (1, 1.25, 1.5, 2, 4)  # of the training length: the lengths that are measured by default


def default_lengths(train_length: int, multiples: Sequence[float] = MULTIPLES) -> list[int]:
    return sorted({max(1, round(multiple * train_length)) for multiple in multiples})


def default_stride(train_length: int, lengths: Sequence[int]) -> int:
    """Half the training length, but no more than the shortest length; 1 for no lengths, which are refused later."""
    return max(1, min(train_length // 2, min(lengths, default=1)))


@dataclass(frozen=True)
class Windows:
    """What one context length scores: of a pass that starts at token `start`, the targets first ... end - 1.

    The inputs of that pass are tokens start ... end - 2.
    """

    length: int
    spans: np.ndarray  # int64 (windows, 3): start, first, end

    @property
    def counts(self) -> np.ndarray:
        return self.spans[:, 2] - self.spans[:, 1]

    def split(self, borders: np.ndarray) -> "Windows":
        """Each window once for every document that its targets lie in: targets, not windows, belong to documents.

        borders: int64 (documents + 1,), where each document begins, and the end.
        """
        low, high = (np.searchsorted(borders, at, side="right") - 1 for at in (self.spans[:, 1], self.spans[:, 2] - 1))
        copies = high - low + 1
        of_window = np.repeat(np.arange(len(low)), copies)
        document = low[of_window] + np.arange(len(of_window)) - np.repeat(np.cumsum(copies) - copies, copies)
        start, first, end = self.spans[of_window].T
        first, end = np.maximum(first, borders[document]), np.minimum(end, borders[document + 1])
        return Windows(self.length, np.stack((start, first, end), axis=1)[end > first])

    def sums(self, values: np.ndarray, borders: np.ndarray | None) -> np.ndarray:
        """Values (windows,) summed over each document that is scored, in the order of the text; split before."""
        if borders is None:
            return values
        _, document = np.unique(np.searchsorted(borders, self.spans[:, 1], side="right"), return_inverse=True)
        return np.bincount(document, weights=values)


def cut(
    pieces: np.ndarray, length: int, longest: int, protocol: str, stride: int, max_windows: int | None = None
) -> Windows:
    """The windows of one length. Whatever the length, the same tokens are scored.

    nonoverlapping: windows of `length` side by side, the last one of a piece what is left; all tokens but the first of
    each piece are scored. sliding: the targets are cut into blocks of `stride` from the first in each piece that has a
    full context at the longest length; a window of `length` inputs ends with its block. max_windows keeps at most so
    many windows of the longest length, spread evenly, and of shorter windows those that score the same tokens.
    """
    if max_windows is not None and protocol == "nonoverlapping":
        windows = cut(pieces, longest, longest, protocol, stride)
        pieces = _spread(windows.spans[windows.counts == longest], max_windows)[:, [0, 2]]
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
    if max_windows is not None and protocol == "sliding":
        spans = _spread(spans, max_windows)
    return Windows(length, spans)


def _spread(spans: np.ndarray, keep: int) -> np.ndarray:
    """At most `keep` of the spans, evenly from the first to the last."""
    n = len(spans)
    return spans if keep >= n else spans[np.arange(keep) * (n - 1) // max(1, keep - 1)]


def widening_edges(length: int) -> list[int]:
    """Edges of bins that widen: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 ... below `length`, and `length`."""
    powers = [2**k for k in range(1, length.bit_length())]
    return [edge for edge in sorted({0, 1, *powers, *(3 * power // 2 for power in powers)}) if edge < length] + [length]


def cut_by_position(pieces: np.ndarray, edges: Sequence[int], max_windows: int | None = None) -> list[Windows]:
    """The full windows of edges[-1] tokens side by side, once for each bin of positions: the targets in that bin only.

    Position p is a window's (p + 1)th input; what is scored there is the token after it.
    """
    length = edges[-1]
    windows = cut(pieces, length, length, "nonoverlapping", length, max_windows)
    starts = windows.spans[windows.counts == length, :1]
    return [
        Windows(length, np.concatenate((starts, starts + 1 + low, starts + 1 + high), axis=1))
        for low, high in pairwise(edges)
    ]
