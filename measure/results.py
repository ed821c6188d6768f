"""One run under one frequency scaling, measured: what is passed, what comes out, and how two of them compare."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise
from typing import Any

import numpy as np

from data import TokenFiles, Tokenizer
from measure.protocols import (
    ENOUGH_DOCUMENTS,
    Scored,
    Windows,
    bytes_before,
    check_measurement,
    clusters_of,
    cut,
    cut_by_position,
    no_row,
    plan_passes,
    score,
    split,
    stretches,
    widening_edges,
)
from measure.statistics import difference_and_error, interval, mean_and_spread
from model import GPT
from model.config import GPTConfig
from model.positions import build_scheme

BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Scoring:
    """What to score. documents: within or across; None: within where at least ENOUGH_DOCUMENTS are long enough."""

    lengths: tuple[int, ...]
    protocols: tuple[str, ...] = ("sliding",)
    stride: int = 64
    max_targets: int | None = None
    documents: str | None = None
    by_position: bool = False

    def pieces(self, files: TokenFiles) -> tuple[np.ndarray, str]:
        """Where windows may lie, int64 (pieces, 2), and in words which documents those are. Raises ValueError."""
        total, longest = len(files.val_offsets) - 1, max(self.lengths, default=0)
        if self.documents not in (None, "within", "across"):
            raise ValueError(f"documents={self.documents!r}: use within or across, or null to let the corpus decide")
        offsets = files.val_offsets if self.documents == "within" else None
        check_measurement(files.val, self.lengths, self.protocols, self.stride, self.max_targets, offsets)
        inside = stretches(len(files.val), longest, files.val_offsets)
        if self.documents == "within" or (self.documents is None and len(inside) >= ENOUGH_DOCUMENTS):
            return inside, f"within documents: {len(inside)} of {total} hold a window of {longest}"
        return stretches(len(files.val), longest), f"across the borders of {total} documents"


@dataclass(frozen=True)
class Measurement:
    """One run, one scaling, one protocol. `result` is what is written; `scored` the windows behind its rows."""

    result: dict
    scored: dict[int, Scored]
    seed: int = 0
    key: str = ""  # equal for runs that differ in their seed only

    def row(self, length: int) -> dict:
        return next(row for row in self.result["rows"] if row["length"] == length)


class Job:
    """The passes for one model and all the protocols asked for. Raises ValueError for what does not fit the text."""

    def __init__(self, config: GPTConfig, files: TokenFiles, tokenizer: Tokenizer, scoring: Scoring):
        self.config, self.files, self.tokenizer, self.scoring = config, files, tokenizer, scoring
        scheme = build_scheme(config)
        self.limit = scheme.max_length
        pieces, self.documents = scoring.pieces(files)
        fitting = [length for length in scoring.lengths if self.limit is None or length <= self.limit]
        longest, cap = max(scoring.lengths), scoring.max_targets
        self.parts: dict[str, list[Windows]] = {
            name: [cut(pieces, length, longest, name, scoring.stride, cap) for length in fitting]
            for name in scoring.protocols
        }
        self.edges: list[int] = []  # of the bins of positions
        if scoring.by_position and fitting:
            self.edges = widening_edges(max(fitting))
            self.parts["by_position"] = cut_by_position(pieces, self.edges, cap)
        self.windows = [windows for part in self.parts.values() for windows in part]
        self.plan = plan_passes(self.windows, scheme, BATCH_TOKENS)

    def identity(self) -> dict:
        """What the losses depend on, but for the weights and the machine."""
        spans = hashlib.sha256(b"".join(windows.spans.astype("<i8").tobytes() for windows in self.windows))
        return {
            "config": repr(self.config),
            "data": self.files.fingerprint,
            "tokenizer": self.tokenizer.name,
            "windows": spans.hexdigest(),
            "lengths": [windows.length for windows in self.windows],
            "batch_tokens": BATCH_TOKENS,
        }

    def score(self, model: GPT, losses: np.ndarray, **how: Any) -> None:
        """Fill in what is missing of `losses`, float64 (windows,), as new_losses(self.plan) begins. how: see score."""
        score(model, self.files.val, self.plan, losses, **how)

    def measurements(self, losses: np.ndarray, about: dict, seed: int = 0, key: str = "") -> list[Measurement]:
        """One for each protocol; the first also has the curve by position. about: what else to say of the run."""
        byte_sums = bytes_before(self.files.val, self.tokenizer.bytes_per_token)
        offsets, longest = self.files.val_offsets, max(self.scoring.lengths)
        scored = iter(
            Scored(windows, values, clusters_of(windows, offsets, longest))
            for windows, values in zip(self.windows, split(losses, self.windows), strict=True)
        )
        c, p, found = self.config, self.scoring, []
        common = {"pos": c.pos, "scaling": c.scaling, "train_length": c.train_length, "tokenizer": self.tokenizer.name}
        common |= {"corpus": self.files.meta["corpus"], "fingerprint": self.files.fingerprint}
        for name in p.protocols:
            of_length = {windows.length: next(scored) for windows in self.parts[name]}
            rows = []
            for length in p.lengths:
                one = of_length.get(length)
                rows.append(one.row(byte_sums) if one else no_row(length, self.limit, with_bytes=True))
                if one and c.train_length in of_length and length != c.train_length:
                    rows[-1]["against_train_length"] = paired([one], [of_length[c.train_length]])
            used = {"protocol": name, "stride": p.stride if name == "sliding" else None, "max_targets": p.max_targets}
            result = {**about, **common, **used, "documents": self.documents, "rows": rows}
            found.append(Measurement(result, of_length, seed, key))
        if p.by_position:
            found[0].result["by_position"] = [
                {"from": low, "to": high, **{k: v for k, v in next(scored).row().items() if k != "length"}}
                for low, high in pairwise(self.edges)
            ]
        return found


def paired(a: Sequence[Scored], b: Sequence[Scored]) -> dict | None:
    """Mean loss of a minus that of b on the same tokens, with its 95 % interval; None where the tokens differ.

    a, b: the same seeds in the same order; losses are averaged over them, and `spread` is the standard deviation of
    their differences (None for a single seed). The interval is over the clusters of a and b (their windows, if they
    have none) where these hold the same tokens, else over stretches of the text as long as the longer window.
    """
    if not all(np.array_equal(a[0].targets(), other.targets()) for other in (*a[1:], *b)):
        return None
    both = (*a, *b)

    def sums(ids: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        n = 1 + max(int(of_one.max()) for of_one in ids)
        losses = [np.bincount(of_one, s.losses, n) for of_one, s in zip(ids, both, strict=True)]
        return losses, [np.bincount(of_one, s.windows.counts, n) for of_one, s in zip(ids, both, strict=True)]

    losses, counts = sums([s.clusters if s.clusters is not None else np.arange(len(s.losses)) for s in both])
    if not np.array_equal(counts[0], counts[-1]):  # windows over borders: the same token is in different clusters
        size = max(s.windows.length for s in both)
        losses, counts = sums([s.windows.spans[:, 1] // size for s in both])
    there = (counts[0] > 0) | (counts[-1] > 0)
    k = len(a)
    mean_a, mean_b = (np.mean(side, axis=0)[there] for side in (losses[:k], losses[k:]))
    difference, error = difference_and_error((mean_a, counts[0][there]), (mean_b, counts[-1][there]))
    scored = counts[0].sum()
    apart = [float(x.sum() - y.sum()) / scored for x, y in zip(losses[:k], losses[k:], strict=True)]
    low, high = interval(difference, error, int(there.sum())) or (None, None)
    spread = mean_and_spread(apart)[1]
    return {"difference": difference, "low": low, "high": high, "clusters": int(there.sum()), "spread": spread}


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only, under one scaling and one protocol."""

    label: str
    members: list[Measurement]

    @property
    def first(self) -> dict:
        return self.members[0].result

    def row(self, length: int) -> dict:
        """perplexity, bits_per_byte and nll: means over seeds; with each its `_error`: the spread over seeds (standard
        deviation), or for a single run the standard error. None past a table, with its note."""
        rows = [member.row(length) for member in self.members]
        if rows[0]["nll"] is None:
            return {"length": length, "note": rows[0]["note"], "nll": None, "perplexity": None, "bits_per_byte": None}
        row, relative = {"length": length}, rows[0]["stderr"]
        for key in ("nll", "perplexity", "bits_per_byte"):
            values = [each[key] for each in rows]
            if None in values:
                row[key] = row[f"{key}_error"] = None
                continue
            row[key], row[f"{key}_error"] = mean_and_spread(values)
            if len(values) == 1 and relative is not None:
                scale = {"nll": 1.0, "perplexity": values[0], "bits_per_byte": values[0] / rows[0]["nll"]}
                row[f"{key}_error"] = relative * scale[key] if rows[0]["nll"] else None
        return row

    def probe(self, name: str, averaged: dict[str, str]) -> dict | None:
        """A probe's rows, averaged over seeds; None where it was not made.

        averaged: the names of values and of their errors, which with several seeds are the spread over them.
        """
        probed = [member.result[name] for member in self.members if name in member.result]
        if not probed:
            return None
        rows = []
        for same in zip(*probed, strict=True):
            rows.append(dict(same[0]))
            for value, error in averaged.items():
                if len(same) > 1 and None not in (values := [row[value] for row in same]):
                    rows[-1][value], rows[-1][error] = mean_and_spread(values)
        return {"run": self.label, "train_length": self.first["train_length"], name: rows}

    def against(self, other: "Group", length: int, other_length: int | None = None) -> dict | None:
        """paired, over the seeds that both have; None where there is none, or no common tokens."""
        alone = len(self.members) == len(other.members) == 1  # two runs are compared whatever their seeds
        mine = {0 if alone else m.seed: m.scored.get(length) for m in self.members}
        theirs = {0 if alone else m.seed: m.scored.get(other_length or length) for m in other.members}
        seeds = [seed for seed in mine if mine[seed] and theirs.get(seed)]
        same_text = self.first["fingerprint"] == other.first["fingerprint"]
        if not seeds or not same_text or self.first["tokenizer"] != other.first["tokenizer"]:
            return None
        return paired([mine[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def group_labels(named: Sequence[tuple[str, str]]) -> dict[str, str]:
    """(key, run's name) of each run -> a label for each key: the name, without its seed where several share the key."""
    names: dict[str, list[str]] = {}
    for key, name in named:
        names.setdefault(key, []).append(name)
    labels = {}
    for key, same in names.items():
        label = same[0] if len(set(same)) == 1 else re.sub(r"[_\- ]*seed[_\-= ]*\d+", "", same[0]) or same[0]
        candidates = chain([label, same[0]], (f"{same[0]} ({i})" for i in count(2)))
        labels[key] = next(candidate for candidate in candidates if candidate not in labels.values())
    return labels


def grouped(measurements: Sequence[Measurement]) -> list[Group]:
    """Seeds of one model together, protocol by protocol, in the order they come."""
    labels = group_labels([(m.key, m.result["run"]) for m in measurements])
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.result["protocol"], m.key), []).append(m)
    return [Group(labels[key], members) for (_, key), members in groups.items()]


def seedless(settings: dict) -> str:
    """What must be equal for two runs to be seeds of one configuration; settings: a run's, as plain values."""
    left_out = {"seed", "name", "wandb", "device", "resume", "repeat", "trust", "sharding", "preset", "val"}
    kept = {key: value for key, value in settings.items() if key not in left_out}
    kept["data"] = {key: value for key, value in settings["data"].items() if key != "cache"}
    said_only = ("eval_every", "checkpoint_every", "log_every", "keep")
    kept["train"] = {key: value for key, value in settings["train"].items() if key not in said_only}
    return json.dumps(kept, sort_keys=True, default=str)
