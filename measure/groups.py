"""Measurements of models that differ in their seed only, together; and how two groups, or two lengths, compare."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from measure.measurement import Measurement
from measure.statistics import estimate, exp
from model.registry import lookup
from model.scaling import SCALINGS

TOLERANCE = 0.03  # how far perplexity may rise above that at the training length within the usable length


@dataclass(frozen=True)
class Group:
    """Seeds of one model, under one scaling and one protocol."""

    label: str
    members: list[Measurement]

    @property
    def first(self) -> dict:
        return self.members[0].about

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.members[0].lengths

    @property
    def seeds(self) -> list[int]:
        return [member.about.get("seed", 0) for member in self.members]

    def losses(self, length: int) -> np.ndarray:
        """(seeds, documents)"""
        return np.stack([member.losses[length] for member in self.members])

    def has(self, length: int) -> bool:
        return length in self.members[0].losses

    def row(self, length: int) -> dict:
        """nll (nats a token, the mean over seeds), its standard error, low and high (its 95 % interval), perplexity (of
        that mean) and bits_per_byte. Past a table None, with a note."""
        first = self.members[0]
        if not self.has(length):
            return {key: first.row(length).get(key) for key in ("length", "nll", "perplexity", "bits_per_byte", "note")}
        found, n_bytes = estimate(self.losses(length), first.counts), first.n_bytes.sum()
        nll = found.pop("value")
        per_byte = float(nll * first.counts.sum() / n_bytes / math.log(2)) if n_bytes else None
        return {"length": length, "nll": nll, **found, "perplexity": exp(nll), "bits_per_byte": per_byte}

    def by_position(self) -> list[dict]:
        """from, to (positions), nll, its standard error, and low and high (its 95 % interval), of each bin."""
        rows = []
        for same in zip(*(member.bins for member in self.members), strict=True):
            low, high, _, counts = same[0]
            found = estimate(np.stack([losses for _, _, losses, _ in same]), counts)
            rows.append({"from": low, "to": high, "nll": found.pop("value"), **found})
        return rows

    def probe(self, name: str, averaged: dict[str, str]) -> dict | None:
        """A probe's rows, averaged over seeds; None where it was not made.

        averaged: the names of values and of their errors, which with several seeds are standard errors over them.
        """
        rows, probed = [], [member.probes[name] for member in self.members if name in member.probes]
        for same in zip(*probed, strict=True):
            rows.append(dict(same[0]))
            for value, error in averaged.items():
                values = [row[value] for row in same]
                if len(same) > 1 and None not in values:
                    rows[-1][value] = float(np.mean(values))
                    rows[-1][error] = float(np.std(values, ddof=1) / math.sqrt(len(values)))
        return {"run": self.label, "train_length": self.first["train_length"], name: rows} if rows else None

    def against(self, other: "Group", length: int, other_length: int | None = None) -> dict | None:
        """Nats a token above the other's: difference, error, low, high, documents; seeds, in words. Of equal seeds the
        difference is taken seed by seed. None where either was not measured, or not on the same tokens."""
        other_length = other_length or length
        mine, theirs = self.members[0], other.members[0]
        same_text = all(self.first[key] == other.first[key] for key in ("fingerprint", "tokenizer", "protocol"))
        if not (same_text and self.has(length) and other.has(other_length)):
            return None
        if not np.array_equal(mine.counts, theirs.counts):
            return None
        a, b = self.losses(length), other.losses(other_length)
        words = [", ".join(map(str, group.seeds)) for group in (self, other)]
        if sorted(self.seeds) == sorted(other.seeds):
            found = estimate(a - b[[other.seeds.index(seed) for seed in self.seeds]], mine.counts)
            seeds = f"{words[0]} (paired)" if len(a) > 1 else words[0]
        else:
            found, seeds = estimate(a, mine.counts, minus=b), f"{words[0]} against {words[1]} (not paired)"
        return {"difference": found.pop("value"), **found, "seeds": seeds}

    def over_train_length(self, length: int) -> dict | None:
        return self.against(self, length, self.first["train_length"])

    def usable_length(self) -> dict | None:
        """The context up to which perplexity stays within TOLERANCE of that at the training length, on the same tokens.

        value, interpolated in the logarithm of the length; low and high, its 95 % interval: where the upper and the
        lower end of the difference's intervals leave the tolerance. What never leaves it is the longest length, and
        `open` names it. Of a learned table: its end, with a note. None where the training length was not measured.
        """
        base = self.first["train_length"]
        if not self.has(base):
            return None
        lengths = [base, *(length for length in self.lengths if length > base and self.has(length))]
        pairs, found = [self.over_train_length(length) for length in lengths], {"open": []}
        for key, end in (("value", "difference"), ("low", "high"), ("high", "low")):
            if pairs[0][end] is None:
                found[key] = None
                continue
            at = _crossing(lengths, [pair[end] for pair in pairs], math.log1p(TOLERANCE))
            found[key] = at or float(lengths[-1])
            found["open"] += [] if at else [key]
        limit = self.members[0].limit
        if limit is not None and limit < self.lengths[-1] and "value" in found["open"]:
            found |= {"value": float(limit), "low": None, "high": None, "open": [], "note": f"table ends at {limit}"}
        return found


def of_metric(row: dict, metric: str) -> tuple[float | None, float | None]:
    """A group's row as perplexity or bits_per_byte: value and standard error (delta method)."""
    value, error = row[metric], row.get("error")
    if value is None or error is None:
        return value, None
    return value, value * error if metric == "perplexity" else value / row["nll"] * error


def _crossing(lengths: Sequence[int], values: Sequence[float], level: float) -> float | None:
    """Where values first rise above level, or are no numbers, linear in the logarithm of the length; None: nowhere."""
    for i in range(1, len(values)):
        if not values[i] <= level:
            share = (level - values[i - 1]) / (values[i] - values[i - 1])
            return float(lengths[i - 1] * (lengths[i] / lengths[i - 1]) ** (share if math.isfinite(share) else 0))
    return None


def labels_of(named: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """(key, run's name, its folder's name) of each run -> a label for each key.

    The name, without its seed where several share the key; with the folder's where another key has that label.
    """
    names: dict[str, dict[str, str]] = {}
    for key, name, folder in named:
        names.setdefault(key, {}).setdefault(name, folder)
    labels: dict[str, str] = {}
    for key, same in names.items():
        name, folder = next(iter(same.items()))
        label = (re.sub(r"[_\- ]*seed[_\-= ]*\d+", "", name) or name) if len(same) > 1 else name
        candidates = (label, f"{label} ({folder})", f"{label} ({len(labels)})")
        labels[key] = next(candidate for candidate in candidates if candidate not in labels.values())
    return labels


def grouped(measurements: Sequence[Measurement]) -> list[Group]:
    """Seeds of one model together, protocol by protocol, in the order they come."""
    named = [(m.about["key"], m.about["run"], re.split(r"[/\\]", m.about.get("folder", ""))[-1]) for m in measurements]
    labels, groups = labels_of(named), {}
    for m in measurements:
        groups.setdefault((m.about["protocol"], m.about["key"]), []).append(m)
    return [Group(labels[key], members) for (_, key), members in groups.items()]


def scaling_words(scaling: dict | None) -> list[str]:
    """Its name, and what is not as by default: [yarn, 4.0, beta_fast=8]."""
    if scaling is None:
        return []
    name, known = lookup("scaling", {"none": lambda: None, **SCALINGS}, scaling)
    others = {key: value for key, value in scaling.items() if key != "name" and value != known[key]}
    return [name, *(str(value) if key == "factor" else f"{key}={value}"[:24] for key, value in others.items())]


def seedless(settings: dict) -> str:
    """What must be equal for two runs to be seeds of one configuration; settings: a run's, as plain values."""
    left_out = {"seed", "name", "wandb", "device", "resume", "sharding", "preset", "val"}
    kept = {key: value for key, value in settings.items() if key not in left_out}
    kept["data"] = {key: value for key, value in settings["data"].items() if key != "cache"}
    said_only = ("eval_every", "checkpoint_every", "log_every", "keep")
    kept["train"] = {key: value for key, value in settings["train"].items() if key not in said_only}
    return json.dumps(kept, sort_keys=True, default=str)
