"""One model measured on one text: what to score, the losses of each document at each length, and the rows they make."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from measure.statistics import ENOUGH_DOCUMENTS, estimate, exp
from measure.windows import PROTOCOLS, Windows, cut, plan_passes, score, targets_of, widening_edges
from model import GPT
from model.checks import check_whole
from model.positions import PositionScheme

TOLERANCE = 0.03  # how far perplexity may rise above that at the training length within the usable length


@dataclass(frozen=True)
class Text:
    """tokens: 1-D ids. offsets: int64 (documents + 1,), where each document begins, and the end. bytes_per_token:
    (vocab,). about: corpus, fingerprint, tokenizer (names), and what else the results shall say."""

    tokens: np.ndarray
    offsets: np.ndarray
    bytes_per_token: np.ndarray
    about: dict

    def by_document(self, targets: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
        """Of each document that holds any of these targets: how many it holds, their bytes, and the sums of values."""
        document = np.unique(np.searchsorted(self.offsets, targets, side="right"), return_inverse=True)[1]
        n_bytes = self.bytes_per_token[self.tokens[targets]]
        return [np.bincount(document, weights=of) for of in (np.ones(len(targets)), n_bytes, *values)]


@dataclass(frozen=True)
class Scoring:
    """What to score. documents: within or across; None: within where at least ENOUGH_DOCUMENTS are long enough."""

    lengths: tuple[int, ...]
    protocols: tuple[str, ...] = ("sliding",)
    stride: int = 64
    max_windows: int | None = None
    documents: str | None = None
    by_position: bool = False

    def pieces(self, text: Text) -> tuple[np.ndarray, str]:
        """Where windows may lie, int64 (pieces, 2), begin and end; and in words which documents those are.

        Raises ValueError for settings that do not fit the text or each other.
        """
        if unknown := [protocol for protocol in self.protocols if protocol not in PROTOCOLS]:
            raise ValueError(f"protocol={unknown[0]!r}: use {' or '.join(PROTOCOLS)}; eval.py also knows both")
        if self.documents not in (None, "within", "across"):
            raise ValueError(f"documents={self.documents!r}: use within or across, or null to let the corpus decide")
        if not self.lengths:
            raise ValueError("lengths=[]: give at least one length")
        for length in self.lengths:
            check_whole("lengths", length)
        check_whole("max_windows", self.max_windows, optional=True)
        check_whole("stride", self.stride)
        shortest, longest, n_tokens = min(self.lengths), max(self.lengths), len(text.tokens)
        if "sliding" in self.protocols and self.stride > shortest:
            raise ValueError(f"stride={self.stride}: must be no larger than the shortest length, {shortest}")
        if longest >= n_tokens:
            way_out = f"the {n_tokens} tokens of the text; use shorter lengths or more text"
            raise ValueError(f"lengths={longest}: a window of {longest} and its target do not fit into {way_out}")
        sizes, total = np.diff(text.offsets), len(text.offsets) - 1
        inside = np.stack((text.offsets[:-1], text.offsets[1:]), axis=1)[sizes > longest]  # with the target after it
        if self.documents == "within" and not len(inside):
            most = f"the longest has {sizes.max()}; use shorter lengths or documents=across"
            raise ValueError(f"documents=within: no document holds a window of {longest} tokens and its target, {most}")
        if self.documents == "within" or (self.documents is None and len(inside) >= ENOUGH_DOCUMENTS):
            return inside, f"within documents: {len(inside)} of {total} hold a window of {longest}"
        return np.array([[0, n_tokens]]), f"across the borders of {total} documents"

    def windows(self, text: Text, scheme: PositionScheme) -> dict[str, list[Windows]]:
        """The windows of each length, by protocol; by_position: full ones of the longest within the table."""
        pieces, _ = self.pieces(text)
        fitting, longest = [n for n in self.lengths if n <= (scheme.max_length or n)], max(self.lengths)
        parts = {
            protocol: [(n, cut(pieces, n, longest, protocol, self.stride, self.max_windows)) for n in fitting]
            for protocol in self.protocols
        }
        if self.by_position and fitting:
            spans = cut(pieces, max(fitting), max(fitting), "nonoverlapping", self.stride, self.max_windows)
            parts["by_position"] = [(max(fitting), spans[spans[:, 2] - spans[:, 1] == max(fitting)])]
        return parts

    def cost(self, text: Text, scheme: PositionScheme) -> int:
        """Tokens to pass for one model of this scheme."""
        windows = [w for part in self.windows(text, scheme).values() for w in part]
        return sum(size for _, _, size, _ in plan_passes(windows, scheme))


@dataclass(frozen=True, eq=False)
class Measurement:
    """One model, of one seed or of several, under one protocol. Every length scores the same tokens.

    about: what was measured, and how. losses: length -> float64 (seeds, documents), nats summed over the scored tokens
    of each document that has any; counts, n_bytes: (documents,), of these tokens. Lengths past a learned table, which
    ends at `limit`, have no losses. bins: losses and counts at positions, (first, end) -> both. probes: results of
    measure.probes, by name.
    """

    about: dict
    lengths: tuple[int, ...]
    losses: dict[int, np.ndarray]
    counts: np.ndarray
    n_bytes: np.ndarray
    limit: int | None = None
    bins: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    probes: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.about["run"]

    @property
    def seeds(self) -> list[int]:
        return self.about.get("seeds", [self.about.get("seed", 0)])

    @property
    def rows(self) -> list[dict]:
        return [self.row(length) for length in self.lengths]

    def row(self, length: int) -> dict:
        """length, and what row_of says; against_train_length: how much nll is above that at the training length."""
        if length not in self.losses:
            return {"length": length, **past_table(self.limit)}
        row = {"length": length, **row_of(self.losses[length], self.counts, self.n_bytes)}
        pair = self.over_train_length(length)
        return row if pair is None or length == self.about["train_length"] else row | {"against_train_length": pair}

    @property
    def by_position(self) -> list[dict]:
        return [{"from": low, "to": high, **row_of(*found)} for (low, high), found in self.bins.items()]

    @property
    def result(self) -> dict:
        about = {key: value for key, value in self.about.items() if key != "key"}
        by_position = {"by_position": self.by_position} if self.bins else {}
        return {**about, "rows": self.rows, "usable_length": self.usable_length(), **self.probes, **by_position}

    def against(self, other: "Measurement", length: int, other_length: int | None = None) -> dict | None:
        """Nats per token above the other's: difference, error, low, high, documents; seeds, in words. Of equal seeds
        the difference is taken seed by seed. None where either was not measured, or not on the same tokens."""
        a, b = self.losses.get(length), other.losses.get(other_length or length)
        same_text = all(self.about[key] == other.about[key] for key in ("fingerprint", "tokenizer", "protocol"))
        if a is None or b is None or not same_text or not np.array_equal(self.counts, other.counts):
            return None
        seeds, others = (", ".join(map(str, one.seeds)) for one in (self, other))
        if sorted(self.seeds) == sorted(other.seeds):
            found = estimate(a - b[[other.seeds.index(seed) for seed in self.seeds]], self.counts)
            seeds = f"{seeds} (paired)" if len(a) > 1 else seeds
        else:
            found, seeds = estimate(a, self.counts, minus=b), f"{seeds} against {others} (not paired)"
        return {"difference": found.pop("value"), **found, "seeds": seeds}

    def over_train_length(self, length: int) -> dict | None:
        return self.against(self, length, self.about["train_length"])

    def usable_length(self) -> dict | None:
        """The context up to which perplexity stays within TOLERANCE of that at the training length, on the same tokens.

        value, interpolated in the logarithm of the length; low and high, its 95 % interval: where the upper and the
        lower end of the difference's intervals leave the tolerance. What never leaves it is the longest length, and
        `open` names it. Of a learned table: its end, with a note. None where the training length was not measured.
        """
        base, found = self.about["train_length"], {"open": []}
        if base not in self.losses:
            return None
        lengths = sorted(length for length in self.losses if length >= base)
        pairs = [self.over_train_length(length) for length in lengths]
        for key, end in (("value", "difference"), ("low", "high"), ("high", "low")):
            ends = [pair[end] for pair in pairs]
            at = None if None in ends else _crossing(lengths, ends, math.log1p(TOLERANCE))
            found[key] = None if None in ends else at or float(lengths[-1])
            found["open"] += [key] if at is None and found[key] else []
        if self.limit is not None and self.limit < max(self.lengths) and "value" in found["open"]:
            note = f"table ends at {self.limit}"
            found = {"value": float(self.limit), "low": None, "high": None, "open": [], "note": note}
        return found

    def truncated(self) -> "Measurement | None":
        """The same model with its context cut to the last train_length tokens; None without their sliding windows."""
        base = self.about["train_length"]
        if self.about["protocol"] != "sliding" or base not in self.losses:
            return None
        losses = {n: self.losses[min(n, base)] for n in self.lengths if min(n, base) in self.losses}
        names = {"run": f"{self.label}, last {base}", "key": f"{self.about['key']}, truncated", "truncated": True}
        return replace(self, about=self.about | names, losses=losses, limit=None, bins={}, probes={})


def row_of(
    losses: np.ndarray, counts: np.ndarray, n_bytes: np.ndarray | None = None, least: int = ENOUGH_DOCUMENTS
) -> dict:
    """nll (nats per token, the mean over seeds), perplexity (of that mean), stderr (of nll), low and high (its 95 %
    interval), scored (tokens), bits_per_byte. losses: (seeds, documents) or (documents,); the others: (documents,)."""
    found = estimate(np.atleast_2d(losses), counts, least=least)
    nll, scored, size = found["value"], int(counts.sum()), 0 if n_bytes is None else n_bytes.sum()
    row = {"nll": nll, "perplexity": exp(nll), "stderr": found["error"], "low": found["low"], "high": found["high"]}
    return row | {"scored": scored, "bits_per_byte": float(nll * scored / size / math.log(2)) if size else None}


def of_metric(row: dict, metric: str) -> tuple[float | None, float | None]:
    """A row as perplexity or bits_per_byte: value and standard error (delta method)."""
    value, error = row[metric], row["stderr"]
    if value is None or error is None:
        return value, None
    return value, value * error if metric == "perplexity" else value / row["nll"] * error


def past_table(limit: int) -> dict:
    """The row of a length that the model has no positions for."""
    empty = dict.fromkeys(("nll", "perplexity", "stderr", "low", "high", "bits_per_byte"))
    return {**empty, "scored": 0, "note": f"table ends at {limit}"}


def _crossing(lengths: Sequence[int], values: Sequence[float], level: float) -> float | None:
    """Where values first rise above level, or are no numbers, linear in the logarithm of the length; None: nowhere."""
    for i in range(1, len(values)):
        if not values[i] <= level:
            share = (level - values[i - 1]) / (values[i] - values[i - 1])
            return float(lengths[i - 1] * (lengths[i] / lengths[i - 1]) ** (share if math.isfinite(share) else 0))
    return None


def measure(
    model: GPT, text: Text, scoring: Scoring, about: dict, progress: Callable | None = None, ranks: Any = None
) -> list[Measurement]:
    """A measurement for each protocol; the first also has the loss by position. Autocast is the caller's.

    about: run (its name), seed, key (equal for models that differ in their seed only), and what else to say of the
    model. progress: called now and then with the tokens passed since. ranks: runs.processes.Ranks of a torchrun job.
    """
    parts, c = scoring.windows(text, model.pos), model.config
    every = [windows for part in parts.values() for windows in part]
    losses = iter(score(model, text.tokens, every, progress=progress, ranks=ranks))
    about = {"key": about["run"], "seed": 0, **about, **text.about, "documents": scoring.pieces(text)[1]}
    about |= {"pos": c.pos, "scaling": c.scaling, "train_length": c.train_length, "max_windows": scoring.max_windows}
    found, positions = [], parts.pop("by_position", [])
    for protocol, part in parts.items():
        targets = targets_of(part[0][1]) if part else np.zeros(0, dtype=np.int64)  # no length is within the table
        counts, n_bytes, *sums = text.by_document(targets, *(next(losses) for _ in part))
        used = about | {"protocol": protocol, "stride": scoring.stride if protocol == "sliding" else None}
        of_length = {length: nll[None] for (length, _), nll in zip(part, sums, strict=True)}
        found.append(Measurement(used, scoring.lengths, of_length, counts, n_bytes, model.pos.max_length))
    for length, spans in positions:
        targets, position, values = targets_of(spans), np.tile(np.arange(length), len(spans)), next(losses)
        for low, high in pairwise(widening_edges(length)):
            inside = (low <= position) & (position < high)
            counts, _, nll = text.by_document(targets[inside], values[inside])
            found[0].bins[low, high] = nll[None], counts
    return found


def evaluate_lengths(
    model: GPT,
    tokens: torch.Tensor | np.ndarray,
    lengths: Sequence[int],
    protocol: str = "sliding",
    stride: int = 64,
    max_windows: int | None = None,
    bytes_per_token: np.ndarray | None = None,
    documents: torch.Tensor | np.ndarray | None = None,
) -> list[dict]:
    """Mean loss of a text at each context length. Runs under whatever autocast is on; dropout is off.

    tokens: integers, 1-D. stride: sliding only, targets scored per window, each with length - stride + 1 to length
    tokens of context. max_windows: of the longest length at most so many, spread over the text. bytes_per_token:
    (vocab_size,), for bits_per_byte. documents: integers (documents + 1,), where each begins, and the end: no window
    crosses a border, and only documents that hold the longest window are scored.

    Returns one dict per length: length; nll, nats per token, the sum of all losses over their count; perplexity; stderr
    and the 95 % interval from low to high of nll, over windows or, where given, documents, None for a single one;
    scored, the tokens counted; bits_per_byte. Past a learned table these are None, scored is 0 and `note` says where it
    ends. Raises ValueError for what does not fit, and for ids outside the vocabulary.
    """
    tokens, vocab_size = token_array(tokens), model.config.vocab_size
    sizes = np.zeros(vocab_size, dtype=np.int64) if bytes_per_token is None else bytes_per_token
    if len(sizes) < vocab_size:
        raise ValueError(f"bytes_per_token has {len(sizes)} entries for {vocab_size} ids")
    offsets = np.array([0, len(tokens)] if documents is None else documents)
    if len(offsets) < 2 or (np.diff(offsets) <= 0).any() or offsets[0] < 0 or offsets[-1] > len(tokens):
        raise ValueError(f"documents must be growing offsets, (documents + 1,), from 0 to {len(tokens)} at most")
    text, within = Text(tokens, offsets, sizes, {}), "across" if documents is None else "within"
    scoring = Scoring(tuple(np.asarray(lengths).tolist()), (protocol,), stride, max_windows, within)
    windows = scoring.windows(text, model.pos)[protocol]
    rows = dict.fromkeys(scoring.lengths, past_table(model.pos.max_length))
    for (length, spans), losses in zip(windows, score(model, tokens, windows), strict=True):
        over = replace(text, offsets=spans[:, 1]) if documents is None else text  # windows or documents
        counts, n_bytes, sums = over.by_document(targets_of(spans), losses)
        rows[length] = row_of(sums, counts, n_bytes, least=2)
    return [{"length": length, **row} for length, row in rows.items()]


def token_array(tokens: torch.Tensor | np.ndarray) -> np.ndarray:
    """As numpy. ValueError unless they are integers in one dimension, one at least."""
    tokens = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not len(tokens):
        raise ValueError(f"tokens must be integers in one dimension, found {tokens.dtype} {tokens.shape}")
    return tokens
