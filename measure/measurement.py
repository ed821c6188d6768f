"""One model measured on one text: what to score, the losses of each document at each length, and the rows they make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from measure.passes import BATCH_TOKENS, plan_passes, score, token_bar
from measure.statistics import ENOUGH_DOCUMENTS, estimate, exp, ratio_and_error
from measure.windows import PROTOCOLS, Windows, cut, cut_by_position, stretches, widening_edges
from model import GPT
from model.checks import check_whole
from model.positions import PositionScheme


@dataclass(frozen=True)
class Text:
    """tokens: 1-D ids. offsets: int64 (documents + 1,), where each document begins, and the end. bytes_per_token:
    (vocab,). about: corpus, fingerprint, tokenizer (names), and what else the results shall say."""

    tokens: np.ndarray
    offsets: np.ndarray
    bytes_per_token: np.ndarray
    about: dict

    def bytes_of(self, windows: Windows) -> np.ndarray:
        """Bytes of each window's targets, int64 (windows,)."""
        before = np.concatenate(([0], np.cumsum(self.bytes_per_token[self.tokens], dtype=np.int64)))
        return before[windows.spans[:, 2]] - before[windows.spans[:, 1]]


@dataclass(frozen=True)
class Scoring:
    """What to score. documents: within or across; None: within where at least ENOUGH_DOCUMENTS are long enough."""

    lengths: tuple[int, ...]
    protocols: tuple[str, ...] = ("sliding",)
    stride: int = 64
    max_targets: int | None = None
    documents: str | None = None
    by_position: bool = False

    def pieces(self, text: Text) -> tuple[np.ndarray, str]:
        """Where windows may lie, int64 (pieces, 2), and in words which documents those are. Raises ValueError."""
        if self.documents not in (None, "within", "across"):
            raise ValueError(f"documents={self.documents!r}: use within or across, or null to let the corpus decide")
        self._check(len(text.tokens))
        total, longest = len(text.offsets) - 1, max(self.lengths)
        inside = stretches(len(text.tokens), longest, text.offsets)
        if self.documents == "within" and not len(inside):
            raise ValueError(
                f"documents=within: no document holds a window of {longest} tokens and its target, the longest has "
                f"{np.diff(text.offsets).max()}; use shorter lengths or documents=across"
            )
        if self.documents == "within" or (self.documents is None and len(inside) >= ENOUGH_DOCUMENTS):
            return inside, f"within documents: {len(inside)} of {total} hold a window of {longest}"
        return stretches(len(text.tokens), longest), f"across the borders of {total} documents"

    def _check(self, n_tokens: int) -> None:
        """ValueError for settings that do not fit the text or each other."""
        if unknown := [protocol for protocol in self.protocols if protocol not in PROTOCOLS]:
            raise ValueError(f"protocol={unknown[0]!r}: use {' or '.join(PROTOCOLS)}")
        if not self.lengths:
            raise ValueError("lengths=[]: give at least one length")
        for length in self.lengths:
            check_whole("lengths", length)
        if max(self.lengths) >= n_tokens:
            raise ValueError(
                f"lengths={list(self.lengths)}: a window of {max(self.lengths)} and its target do not fit into the "
                f"{n_tokens} tokens of the text; use shorter lengths or more text"
            )
        check_whole("max_targets", self.max_targets, optional=True)
        if "sliding" in self.protocols:
            check_whole("stride", self.stride)
            if self.stride > min(self.lengths):
                raise ValueError(
                    f"stride={self.stride}: must be no larger than the shortest length, {min(self.lengths)}"
                )

    def windows(self, text: Text, scheme: PositionScheme) -> dict[str, list[Windows]]:
        """Those of each protocol, a Windows a length, and by_position, a Windows a bin; split at documents' borders."""
        pieces, _ = self.pieces(text)
        fitting, longest = [n for n in self.lengths if n <= (scheme.max_length or n)], max(self.lengths)
        parts = {
            protocol: [cut(pieces, length, longest, protocol, self.stride, self.max_targets) for length in fitting]
            for protocol in self.protocols
        }
        if self.by_position and fitting:
            parts["by_position"] = cut_by_position(pieces, widening_edges(max(fitting)), self.max_targets)
        return {name: [w.split(text.offsets) for w in windows] for name, windows in parts.items()}

    def cost(self, text: Text, scheme: PositionScheme) -> int:
        """Tokens to pass for one model of this scheme."""
        windows = [w for part in self.windows(text, scheme).values() for w in part]
        return int(plan_passes(windows, scheme)[0][:, 1].sum()) if windows else 0


@dataclass(frozen=True, eq=False)
class Measurement:
    """One model under one protocol. At every length the same tokens of the same documents are scored.

    about: what was measured, and how. losses: length -> (documents,), nats summed over the scored tokens of each
    document that has any; counts, n_bytes: (documents,), of these tokens. Lengths past a learned table, which ends at
    `limit`, have no losses. bins: first and last position (exclusive), losses and counts by document. probes: results
    of measure.probes, by name.
    """

    about: dict
    lengths: tuple[int, ...]
    losses: dict[int, np.ndarray]
    counts: np.ndarray
    n_bytes: np.ndarray
    limit: int | None = None
    bins: Sequence[tuple[int, int, np.ndarray, np.ndarray]] = ()
    probes: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict]:
        return [self.row(length) for length in self.lengths]

    def row(self, length: int) -> dict:
        """length; nll (nats a token), perplexity, stderr (of nll, over documents), scored (tokens), bits_per_byte; and
        against_train_length, how much nll is above that at the training length. Past a table None, with a note."""
        if length not in self.losses:
            return empty_row(length, self.limit, with_bytes=True)
        row = _row(length, self.losses[length], self.counts, self.n_bytes, ENOUGH_DOCUMENTS)
        base = self.about["train_length"]
        if base in self.losses and length != base:
            found = estimate((self.losses[length] - self.losses[base])[None], self.counts)
            row["against_train_length"] = {"difference": found.pop("value"), **found}
        return row

    def truncated(self) -> "Measurement | None":
        """The same model with its context cut to the last train_length tokens; None without their sliding windows."""
        base = self.about["train_length"]
        if self.about["protocol"] != "sliding" or base not in self.losses:
            return None
        losses = {n: self.losses[min(n, base)] for n in self.lengths if min(n, base) in self.losses}
        name, key = f"{self.about['run']}, last {base}", f"{self.about['key']}, truncated"
        about = self.about | {"run": name, "key": key, "truncated": True}
        return replace(self, about=about, losses=losses, limit=None, bins=(), probes={})

    @property
    def result(self) -> dict:
        """All of it as plain values."""
        about = {key: value for key, value in self.about.items() if key != "key"}
        result = {**about, "rows": self.rows, **self.probes}
        if self.bins:
            rows = [{"from": low, **_row(high, *sums, least=ENOUGH_DOCUMENTS)} for low, high, *sums in self.bins]
            result["by_position"] = [{"from": row["from"], "to": row.pop("length"), **row} for row in rows]
        return result


def measure(
    model: GPT,
    text: Text,
    scoring: Scoring,
    about: dict,
    progress: Callable[[int], None] | None = None,
    ranks: Any = None,
) -> list[Measurement]:
    """A measurement for each protocol; the first also has the loss by position. Autocast is the caller's.

    about: run (its name), folder, checkpoint, precision, seed, and what else to say of the model; key, equal for models
    that differ in their seed only. progress: called now and then with the tokens passed since. ranks: runs.Ranks of a
    torchrun job. Raises ValueError for what does not fit the text.
    """
    parts, c = scoring.windows(text, model.pos), model.config
    every = [windows for part in parts.values() for windows in part]
    losses = iter(score(model, text.tokens, every, progress=progress, ranks=ranks))
    sums = {name: [w.sums(next(losses), text.offsets) for w in part] for name, part in parts.items()}
    common = {"key": about["run"], "seed": 0, **about, **text.about, "documents": scoring.pieces(text)[1]}
    common |= {"pos": c.pos, "scaling": c.scaling, "train_length": c.train_length}
    found, bins = [], []
    if "by_position" in parts:
        edges = pairwise(widening_edges(parts["by_position"][0].length))
        for (low, high), windows, values in zip(edges, parts["by_position"], sums["by_position"], strict=True):
            bins.append((low, high, values, windows.sums(windows.counts, text.offsets)))
    for protocol in scoring.protocols:
        counts = n_bytes = np.zeros(0)
        for windows in parts[protocol][:1]:  # these are the same at every length
            counts = windows.sums(windows.counts, text.offsets)
            n_bytes = windows.sums(text.bytes_of(windows), text.offsets)
        stride = scoring.stride if protocol == "sliding" else None
        used = {**common, "protocol": protocol, "stride": stride, "max_targets": scoring.max_targets}
        of_length = {w.length: values for w, values in zip(parts[protocol], sums[protocol], strict=True)}
        found.append(Measurement(used, scoring.lengths, of_length, counts, n_bytes, model.pos.max_length, bins))
        bins = []
    return found


def evaluate_lengths(
    model: GPT,
    tokens: torch.Tensor | np.ndarray,
    lengths: Sequence[int],
    protocol: str = "sliding",
    stride: int = 64,
    max_targets: int | None = None,
    bytes_per_token: np.ndarray | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = False,
    documents: torch.Tensor | np.ndarray | None = None,
) -> list[dict]:
    """Mean loss of a text at each context length. Runs under whatever autocast is on; dropout is off.

    tokens: integers, 1-D. stride: sliding only, targets scored a window, each with length - stride + 1 to length tokens
    of context. max_targets: score at most that many, spread over the text (None: all). bytes_per_token: (vocab_size,),
    adds bits_per_byte. batch_tokens changes speed and memory, not results. progress: show a bar. documents: integers
    (documents + 1,), where each document begins, and the end: no window crosses a border, and only documents that hold
    the longest window are scored.

    Returns one dict a length: length; nll, nats a token, the sum of all losses over their count; perplexity; stderr,
    the standard error of nll (ratio estimator) over windows, or over `documents` where they are given, None for a
    single one; scored, the tokens counted. Past a learned table nll, perplexity and stderr are None, scored is 0 and
    `note` says where the table ends. Raises ValueError for settings that do not fit the text or each other, and ids
    outside the vocabulary.
    """
    tokens, lengths = token_array(tokens), tuple(np.asarray(lengths).tolist())
    if bytes_per_token is not None and len(bytes_per_token) < model.config.vocab_size:
        raise ValueError(f"bytes_per_token has {len(bytes_per_token)} entries for {model.config.vocab_size} ids")
    offsets = np.array([0, len(tokens)] if documents is None else documents)
    if len(offsets) < 2 or (np.diff(offsets) <= 0).any() or offsets[0] < 0 or offsets[-1] > len(tokens):
        raise ValueError(f"documents must be growing offsets, (documents + 1,), from 0 to {len(tokens)} at most")
    within = "across" if documents is None else "within"
    text, scoring = (
        Text(tokens, offsets, bytes_per_token, {}),
        Scoring(lengths, (protocol,), stride, max_targets, within),
    )
    windows = scoring.windows(text, model.pos)[protocol]
    with token_bar(scoring.cost(text, model.pos), progress) as bar:
        losses = score(model, tokens, windows, batch_tokens, bar.update)
    rows = {}
    for w, values in zip(windows, losses, strict=True):
        columns = [values, w.counts] + ([] if bytes_per_token is None else [text.bytes_of(w)])
        if documents is not None:
            columns = [w.sums(column, offsets) for column in columns]
        rows[w.length] = _row(w.length, *columns)
    past = {length: empty_row(length, model.pos.max_length, bytes_per_token is not None) for length in lengths}
    return [rows.get(length, past[length]) for length in lengths]


def _row(
    length: int, losses: np.ndarray, counts: np.ndarray, n_bytes: np.ndarray | None = None, least: int = 2
) -> dict:
    """Losses, counts and bytes of clusters: all (clusters,). Fewer than `least` have no error."""
    nll, stderr = ratio_and_error(losses, counts)
    stderr = stderr if len(counts) >= least else None
    row = {"length": length, "nll": nll, "perplexity": exp(nll), "stderr": stderr, "scored": int(counts.sum())}
    if n_bytes is not None:
        row["bits_per_byte"] = float(losses.sum() / np.log(2) / n_bytes.sum()) if n_bytes.sum() else None
    return row


def empty_row(length: int, limit: int, with_bytes: bool) -> dict:
    """The row of a length that the model has no positions for."""
    row = {"length": length, "nll": None, "perplexity": None, "stderr": None, "scored": 0}
    return row | ({"bits_per_byte": None} if with_bytes else {}) | {"note": f"table ends at {limit}"}


def token_array(tokens: torch.Tensor | np.ndarray) -> np.ndarray:
    """As numpy. ValueError unless they are integers in one dimension, one at least."""
    tokens = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not len(tokens):
        raise ValueError(f"tokens must be integers in one dimension, found {tokens.dtype} {tokens.shape}")
    return tokens
