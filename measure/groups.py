"""Which runs are seeds of one model: their labels, and their measurements together."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from measure.measurement import Measurement
from measure.statistics import standard_error
from model.checks import lookup
from model.scaling import SCALINGS

SEED = r"[_\- ]*seed[_\-= ]*\d+"  # in a run's name


def labels_of(runs: Sequence[dict]) -> dict[str, str]:
    """A label for each key: the run's name, without its seed where several names share the key; with the folder where
    another key has that label. runs: dicts with key, run (a name) and folder."""
    labels: dict[str, str] = {}
    for one in runs:
        if one["key"] not in labels:
            several = len({other["run"] for other in runs if other["key"] == one["key"]}) > 1
            label = (several and re.sub(SEED, "", one["run"])) or one["run"]
            labels[one["key"]] = f"{label} ({one.get('folder')})" if label in labels.values() else label
    return labels


def by_model(found: Sequence[Any], about: Callable[[Any], dict]) -> list[tuple[str, list]]:
    """Label and seeds of each model under each protocol, in the order they come. about: run, key, protocol of each."""
    labels, groups = labels_of([about(one) for one in found]), {}
    for one in found:
        groups.setdefault((about(one)["protocol"], about(one)["key"]), []).append(one)
    return [(labels[key], seeds) for (_, key), seeds in groups.items()]


def grouped(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Seeds of one model as one measurement, protocol by protocol, in the order they come."""
    return [_together(label, seeds) for label, seeds in by_model(measurements, lambda one: one.about)]


def _together(label: str, seeds: list[Measurement]) -> Measurement:
    first, names = seeds[0], [one.label for one in seeds]
    about = first.about | {"run": label, "runs": names, "seeds": [seed for one in seeds for seed in one.seeds]}
    losses = {length: np.concatenate([one.losses[length] for one in seeds]) for length in first.losses}
    bins = [
        (low, high, np.concatenate([one.bins[i][2] for one in seeds]), counts)
        for i, (low, high, _, counts) in enumerate(first.bins)
    ]
    shown = {"recall", "shift"} & first.probes.keys()
    probes = {name: _averaged([one.probes[name] for one in seeds]) for name in shown}
    return replace(first, about=about, losses=losses, bins=bins, probes=probes)


def _averaged(of_seeds: list[list[dict]]) -> list[dict]:
    """A probe's rows, what is shown of them averaged over seeds; with several seeds errors are those over them."""
    rows = []
    for same in zip(*of_seeds, strict=True):
        rows.append(dict(same[0]))
        for key in {"gain", "difference", "mean_change"} & same[0].keys() if len(same) > 1 else ():
            values = [row[key] for row in same]
            if None not in values:
                rows[-1] |= {key: float(np.mean(values)), f"{key}_stderr": standard_error(np.array(values))}
    return rows


def scaling_words(scaling: dict | None, before: str = " ") -> str:
    """Its name, and what is not as by default: ` yarn 4.0 beta_fast=8`, with `before` before each; none for None."""
    if scaling is None:
        return ""
    name, known = lookup("scaling", {"none": lambda: None, **SCALINGS}, scaling)
    others = {key: value for key, value in scaling.items() if key != "name" and value != known[key]}
    words = [name, *(str(value) if key == "factor" else f"{key}={value}"[:24] for key, value in others.items())]
    return "".join(before + word for word in words)


def seedless(settings: dict) -> str:
    """What must be equal for two runs to be seeds of one configuration; settings: a run's, as plain values."""
    left_out = {"seed", "name", "wandb", "device", "resume", "sharding", "preset", "val"}
    kept = {key: value for key, value in settings.items() if key not in left_out}
    # Each seed may start from its own: their folders differ in the seed, and in the time before their names.
    kept["init_from"] = re.sub(rf"{SEED}|\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d_", "", str(settings.get("init_from")))
    kept["data"] = {key: value for key, value in settings["data"].items() if key != "cache"}
    said_only = ("eval_every", "checkpoint_every", "log_every", "keep", "micro_batch_size")
    kept["train"] = {key: value for key, value in settings["train"].items() if key not in said_only}
    return json.dumps(kept, sort_keys=True, default=str)
