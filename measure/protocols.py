"""Which tokens are scored in which context, and their losses from as few forward passes as a causal model needs.

Two protocols, since they answer different questions (Press et al. 2021, "Train Short, Test Long", section 2.2): longer
windows of `nonoverlapping` also have fewer tokens with little context; under `sliding` only the context differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from measure.statistics import exp, ratio_and_error
from model import GPT
from model.positions import PositionScheme
from model.sampling import evaluating

if TYPE_CHECKING:
    from runs import Ranks

PROTOCOLS = ("sliding", "nonoverlapping")
# A cap on the scored tokens keeps windows at so many places of the text, neighbours together: neighbours share passes.
PLACES = 32
# So many documents at least, and errors are taken over documents; windows inside documents are then the default.
ENOUGH_DOCUMENTS = 10


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


def stretches(n_tokens: int, longest: int, documents: np.ndarray | None = None) -> np.ndarray:
    """The pieces of text that windows may not leave, int64 (pieces, 2), begin and end: all of it, or each document
    (offsets, (documents + 1,)) that holds a window of the longest length and its target."""
    if documents is None:
        return np.array([[0, n_tokens]])
    pieces = np.stack((documents[:-1], documents[1:]), axis=1)
    return pieces[pieces[:, 1] - pieces[:, 0] > longest]


def cut(
    pieces: np.ndarray, length: int, longest: int, protocol: str, stride: int, max_targets: int | None = None
) -> Windows:
    """The windows of one length.

    nonoverlapping: windows of `length` side by side, the last one of a piece what is left; all tokens but the first of
    each piece are scored. sliding: the targets are cut into blocks of `stride`, the same for all lengths, from the
    first in each piece that has a full context at the longest length; a window of `length` inputs ends with its block.
    max_targets keeps at most that many (one window at least), the same for all lengths, spread over the text: blocks of
    sliding windows, or for nonoverlapping ones stretches of longest windows, each then a piece of its own.
    """
    if max_targets is not None and protocol == "nonoverlapping":
        pieces = _thinned(pieces, longest, max_targets)
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
    if max_targets is not None and protocol == "sliding":
        spans = spans[_spread(len(spans), max(1, max_targets // stride))]
    return Windows(length, spans)


def _thinned(pieces: np.ndarray, longest: int, max_targets: int) -> np.ndarray:
    """Stretches of whole windows of the longest length with at most max_targets targets, one window at least."""
    windows = cut(pieces, longest, longest, "nonoverlapping", longest)
    spans = windows.spans[windows.counts == longest]
    kept = spans[_spread(len(spans), max(1, max_targets // longest))]
    border = kept[1:, 0] != kept[:-1, 2] - 1  # else the next window goes on where this one ends
    return np.stack((kept[np.r_[True, border], 0], kept[np.r_[border, True], 2]), axis=1)


def _spread(n: int, keep: int) -> np.ndarray:
    """Indices of at most `keep` of n windows: runs of neighbours at PLACES places, the first and last included."""
    if keep >= n:
        return np.arange(n)
    places = min(PLACES, keep)
    run = keep // places
    starts = np.arange(places) * (n - run) // max(1, places - 1)
    return (starts[:, None] + np.arange(run)).ravel()


def widening_edges(length: int) -> list[int]:
    """Edges of bins that widen: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 ... below `length`, and `length`."""
    powers = [2**k for k in range(1, length.bit_length())]
    return [edge for edge in sorted({0, 1, *powers, *(3 * power // 2 for power in powers)}) if edge < length] + [length]


def cut_by_position(pieces: np.ndarray, edges: Sequence[int], max_targets: int | None = None) -> list[Windows]:
    """The full windows of edges[-1] tokens side by side, once for each bin of positions: the targets in that bin only.

    Position p is a window's (p + 1)th input; what is scored there is the token after it.
    """
    length = edges[-1]
    windows = cut(pieces, length, length, "nonoverlapping", length, max_targets)
    starts = windows.spans[windows.counts == length, :1]
    return [
        Windows(length, np.concatenate((starts, starts + 1 + low, starts + 1 + high), axis=1))
        for low, high in pairwise(edges)
    ]


@dataclass(frozen=True)
class Plan:
    """The forward passes that score a list of windows.

    A causal model's losses at the start of a long window are those of a shorter window that starts there, so each start
    is passed once, to the furthest target anybody wants. That holds where the frequencies are the same: windows whose
    lengths differ in the scheme's regime are passed apart.
    """

    spans: np.ndarray  # int64 (windows, 3), of all windows one after the other
    of_pass: np.ndarray  # int64 (windows,), the pass that scores each
    passes: np.ndarray  # int64 (passes, 3): start, number of inputs, scaling length
    batches: list[np.ndarray]  # indices of passes

    @property
    def tokens(self) -> int:
        return int(self.passes[:, 1].sum())


def plan_passes(windows: Sequence[Windows], scheme: PositionScheme, batch_tokens: int) -> Plan:
    """The passes that all windows need, in batches of about batch_tokens tokens."""
    spans = np.concatenate([np.empty((0, 3), dtype=np.int64), *(w.spans for w in windows)])
    regimes = {}  # of equal ones, the first length stands for all
    lengths = [regimes.setdefault(scheme.regime(w.length), w.length) for w in windows]
    of_length = np.repeat(np.array(lengths, dtype=np.int64), [len(w.spans) for w in windows])
    keys = np.stack((of_length, spans[:, 0]), axis=1)
    found, of_pass = np.unique(keys, axis=0, return_inverse=True)
    of_pass, sizes = of_pass.ravel(), np.zeros(len(found), dtype=np.int64)
    np.maximum.at(sizes, of_pass, spans[:, 2] - 1 - spans[:, 0])
    passes = np.stack((found[:, 1], sizes, found[:, 0]), axis=1)
    batches = []
    for length in np.unique(passes[:, 2]):
        same = np.flatnonzero(passes[:, 2] == length)
        same = same[np.argsort(-passes[same, 1], kind="stable")]  # like sizes together: the shorter ones are padded
        while len(same):
            size = max(1, batch_tokens // int(passes[same[0], 1]))
            batches.append(same[:size])
            same = same[size:]
    return Plan(spans, of_pass, passes, batches)


def new_losses(plan: Plan) -> np.ndarray:
    """Nothing scored yet: NaN for every window."""
    return np.full(len(plan.spans), np.nan)


class Alone:
    """One process that makes all passes by itself; runs.Ranks stands for those of a torchrun job."""

    rank, world_size = 0, 1

    def summed(self, values: np.ndarray) -> np.ndarray:
        """float64 (n,) -> their sums over the processes."""
        return values


@torch.no_grad()  # not inference_mode: weights that a sharded model gathers in it could not be trained on afterwards
def score(
    model: GPT,
    tokens: np.ndarray,
    plan: Plan,
    losses: np.ndarray,
    done: Callable[[int], None] = lambda tokens: None,
    ranks: "Alone | Ranks" = Alone(),  # noqa: B008 (it holds nothing)
) -> None:
    """Fill `losses`, float64 (windows,), nats summed over each window's targets, batch by batch; what is there stays.

    The processes of a job take turns: round by round each passes another batch, and then all have the losses of all of
    them, the same whatever the number of processes. `losses` must be the same in all of them before. done: called after
    each round with the tokens that were passed in it. Dropout is off; autocast is the caller's.
    """
    order = np.argsort(plan.of_pass, kind="stable")
    bounds = np.searchsorted(plan.of_pass[order], np.arange(len(plan.passes) + 1))
    todo = []  # of each batch with something open: the passes, the windows they score, the row of each window
    for batch in plan.batches:
        wanted = [order[bounds[i] : bounds[i + 1]] for i in batch]
        row = np.repeat(np.arange(len(batch)), [len(w) for w in wanted])
        wanted = np.concatenate(wanted)
        if np.isnan(losses[wanted]).any():
            todo.append((batch, wanted, row))
        else:
            done(int(plan.passes[batch, 1].sum()))
    with evaluating(model):
        for first in range(0, len(todo), ranks.world_size):
            around = todo[first : first + ranks.world_size]
            # Where the last round has too few batches for all, the others pass its first one too, for nothing: the
            # passes of a sharded model need every process.
            mine = ranks.rank if ranks.rank < len(around) else 0
            found = [np.zeros(len(wanted)) for _, wanted, _ in around]
            scored = _batch_losses(model, tokens, plan, *around[mine])
            if mine == ranks.rank:
                found[mine] = scored
            losses[np.concatenate([wanted for _, wanted, _ in around])] = ranks.summed(np.concatenate(found))
            done(int(sum(plan.passes[batch, 1].sum() for batch, _, _ in around)))


def _batch_losses(
    model: GPT, tokens: np.ndarray, plan: Plan, batch: np.ndarray, wanted: np.ndarray, row: np.ndarray
) -> np.ndarray:
    """The losses of the windows `wanted` (n,), each in its row (n,) of a batch of passes: float64 (n,)."""
    device = next(model.parameters()).device
    starts, sizes, lengths = plan.passes[batch].T
    width = int(sizes.max())
    index = np.minimum(starts[:, None] + np.arange(width + 1), len(tokens) - 1)
    ids = torch.from_numpy(tokens[index].astype(np.int64))  # (B, T + 1), padded with whatever follows
    model.check_tokens(ids)
    low, high = (plan.spans[wanted, 1:] - 1 - starts[row, None]).T
    # The network forms logits only for targets that somebody wants: +1 where a span begins, -1 after it.
    scored = np.zeros((len(batch), width + 1), dtype=np.int64)
    np.add.at(scored, (row, low), 1)
    np.add.at(scored, (row, high), -1)
    targets = ids[:, 1:].masked_fill(torch.from_numpy(scored.cumsum(axis=1)[:, :-1] == 0), -100)
    nll = model(ids[:, :-1].to(device), targets=targets.to(device), scaling_length=int(lengths[0]))
    sums = np.zeros((len(batch), width + 1))
    sums[:, 1:] = nll.cpu().double().cumsum(dim=1).numpy()
    return sums[row, high] - sums[row, low]


@dataclass(frozen=True)
class Scored:
    """One length's windows with their losses. clusters: ids that errors are taken over (None: each window)."""

    windows: Windows
    losses: np.ndarray
    clusters: np.ndarray | None = None

    def row(self, byte_sums: np.ndarray | None = None) -> dict:
        """nll, perplexity, stderr, scored; with byte_sums (tokens + 1,), bytes before each token, bits_per_byte."""
        nll, stderr = ratio_and_error(self.losses, self.windows.counts, self.clusters)
        row = {"length": self.windows.length, "nll": nll, "perplexity": exp(nll), "stderr": stderr}
        row["scored"] = int(self.windows.counts.sum())
        if byte_sums is not None:
            n_bytes = (byte_sums[self.windows.spans[:, 2]] - byte_sums[self.windows.spans[:, 1]]).sum()
            row["bits_per_byte"] = float(self.losses.sum() / np.log(2) / n_bytes) if n_bytes else None
        return row

    def targets(self) -> np.ndarray:
        """The stretches of scored tokens, neighbours joined, int64 (stretches, 2): equal where the same is scored."""
        spans = self.windows.spans[np.argsort(self.windows.spans[:, 1]), 1:]
        joined = spans[1:, 0] == spans[:-1, 1]
        return np.stack((spans[np.r_[True, ~joined], 0], spans[np.r_[~joined, True], 1]), axis=1)


def clusters_of(windows: Windows, documents: np.ndarray, longest: int) -> np.ndarray:
    """What errors are taken over, an id a window: the document of its first target, where at least ENOUGH_DOCUMENTS are
    scored; else stretches of the text as long as the longest window, since neighbouring windows are alike."""
    ids = np.searchsorted(documents, windows.spans[:, 1], side="right") - 1
    return ids if len(np.unique(ids)) >= ENOUGH_DOCUMENTS else windows.spans[:, 1] // longest


def token_array(tokens: torch.Tensor | np.ndarray, name: str = "tokens") -> np.ndarray:
    """As numpy. ValueError unless they are integers in one dimension, one at least."""
    try:
        tokens = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    except (TypeError, ValueError) as error:  # bfloat16, which numpy has not, or rows of different lengths
        raise ValueError(f"{name} must be integers in one dimension ({error})") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not len(tokens):
        raise ValueError(f"{name} must be integers in one dimension, found {tokens.dtype} {tokens.shape}")
    return tokens


def _is_whole(value: Any, least: int = 1) -> bool:
    """A whole number of at least `least`, be it a numpy one or a float; True is none."""
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool) and least <= value < 2**63 and value == int(value)


def bytes_before(tokens: np.ndarray, bytes_per_token: np.ndarray) -> np.ndarray:
    """Bytes of all tokens before each one, int64 (tokens + 1,)."""
    return np.concatenate(([0], np.cumsum(bytes_per_token[tokens], dtype=np.int64)))


def no_row(length: int, limit: int, with_bytes: bool) -> dict:
    """The row of a length that the model has no positions for."""
    row = {"length": length, "nll": None, "perplexity": None, "stderr": None, "scored": 0}
    return row | ({"bits_per_byte": None} if with_bytes else {}) | {"note": f"table ends at {limit}"}


def check_measurement(
    tokens: np.ndarray,
    lengths: Sequence[int],
    protocols: Sequence[str],
    stride: int,
    max_targets: int | None,
    documents: np.ndarray | None,
) -> None:
    """Raise ValueError for settings that do not fit the text or each other."""
    for protocol in protocols:
        if not isinstance(protocol, str) or protocol not in PROTOCOLS:
            raise ValueError(f"protocol={protocol!r}: use {' or '.join(PROTOCOLS)}")
    given = list(lengths) if isinstance(lengths, Sequence | np.ndarray) else lengths
    if not isinstance(given, list) or not given or not all(map(_is_whole, given)):
        raise ValueError(f"lengths={given!r}: must be whole numbers of at least 1, and at least one of them")
    if max(lengths) > len(tokens) - 1:
        raise ValueError(
            f"lengths={list(lengths)}: a window of {max(lengths)} and its target do not fit into the {len(tokens)} "
            "tokens of the text; use shorter lengths or more text"
        )
    if "sliding" in protocols and not (_is_whole(stride) and stride <= min(lengths)):
        raise ValueError(f"stride={stride!r}: must be a whole number from 1 to the shortest length, {min(lengths)}")
    if max_targets is not None and not _is_whole(max_targets):
        raise ValueError(f"max_targets={max_targets!r}: must be a whole number of at least 1, or null for all")
    if documents is not None:
        if documents.ndim != 1 or len(documents) < 2 or (np.diff(documents) <= 0).any():
            raise ValueError("documents must be the growing offsets of the documents, and the end: (documents + 1,)")
        if documents[0] < 0 or documents[-1] > len(tokens):
            raise ValueError(f"documents reach from {documents[0]} to {documents[-1]} in {len(tokens)} tokens")
        if not len(stretches(len(tokens), max(lengths), documents)):
            raise ValueError(
                f"documents=within: no document holds a window of {max(lengths)} tokens and its target, the longest "
                f"has {np.diff(documents).max()}; use shorter lengths or documents=across"
            )


def evaluate_lengths(
    model: GPT,
    tokens: torch.Tensor | np.ndarray,
    lengths: Sequence[int],
    protocol: str = "sliding",
    stride: int = 64,
    max_targets: int | None = None,
    bytes_per_token: np.ndarray | None = None,
    batch_tokens: int = 16384,
    progress: bool = False,
    documents: torch.Tensor | np.ndarray | None = None,
) -> list[dict]:
    """Mean loss of a text at each context length. Runs under whatever autocast is on; dropout is off.

    tokens: integers, 1-D. stride: sliding only, targets scored a window, each with length - stride + 1 to length tokens
    of context. max_targets: score at most that many, in windows spread over the text (None: all). bytes_per_token:
    (vocab_size,), adds bits_per_byte. Batches hold about batch_tokens tokens, which changes speed and memory, not
    results. progress: a bar, where the output is a terminal. documents: integers (documents + 1,), where each document
    begins, and the end: no window crosses a border, and only documents that hold the longest window are scored.

    Returns one dict a length: length; nll, nats a token, the sum of all losses over their count; perplexity; stderr,
    the standard error of nll over windows (ratio estimator; None for a single one), or where `documents` are given over
    those, or if fewer than 10 are scored over stretches as long as the longest window; scored, the tokens counted.
    Past a learned table nll, perplexity and stderr are None, scored is 0 and `note` says where the table ends.
    Raises ValueError for settings that do not fit the text or each other, and ids outside the vocabulary.
    """
    tokens, documents = token_array(tokens), None if documents is None else token_array(documents, "documents")
    check_measurement(tokens, lengths, [protocol], stride, max_targets, documents)
    if not _is_whole(batch_tokens):
        raise ValueError(f"batch_tokens={batch_tokens!r}: must be a whole number of at least 1")
    if bytes_per_token is not None:
        bytes_per_token = token_array(bytes_per_token, "bytes_per_token")
        if len(bytes_per_token) < model.config.vocab_size:
            raise ValueError(f"bytes_per_token has {len(bytes_per_token)} entries for {model.config.vocab_size} ids")
    lengths, limit = [int(length) for length in lengths], model.pos.max_length
    stride = int(stride) if protocol == "sliding" else 1  # which is the only one to look at it
    max_targets, batch_tokens = max_targets and int(max_targets), int(batch_tokens)
    pieces = stretches(len(tokens), max(lengths), documents)
    fitting = [length for length in lengths if limit is None or length <= limit]
    windows = [cut(pieces, length, max(lengths), protocol, stride, max_targets) for length in fitting]
    byte_sums = None if bytes_per_token is None else bytes_before(tokens, bytes_per_token)
    passes = plan_passes(windows, model.pos, batch_tokens)
    losses, rows = new_losses(passes), {}
    hidden = None if progress else True  # None: where the output is no terminal
    with tqdm(total=passes.tokens, unit="token", unit_scale=True, leave=False, disable=hidden) as bar:
        score(model, tokens, passes, losses, bar.update)
    for of_length, values in zip(windows, split(losses, windows), strict=True):
        clusters = None if documents is None else clusters_of(of_length, documents, max(lengths))
        rows[of_length.length] = Scored(of_length, values, clusters).row(byte_sums)
    return [rows.get(length) or no_row(length, limit, byte_sums is not None) for length in lengths]


def split(losses: np.ndarray, windows: Sequence[Windows]) -> list[np.ndarray]:
    """The losses of each of the lists of windows that a plan was made of."""
    return np.split(losses, np.cumsum([len(w.spans) for w in windows])[:-1]) if windows else []
