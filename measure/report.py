"""What a measurement leaves behind: JSON, plots, tables.md, a report.html that needs no network, metrics in wandb.

It also says which runs are seeds of one model, and shows them together.
"""

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import chain, count
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from measure import plots, tables
from measure.measurement import Measurement
from measure.statistics import standard_error
from measure.tables import Table
from model.checkpoint import write_text
from model.checks import lookup
from model.scaling import SCALINGS

SEED = r"[_\- ]*seed[_\-= ]*\d+"  # in a run's name
OF_PROBES = {"recall", "attention"}  # plots that stand last
PLOTS = {"extrapolation", "by_position"} | OF_PROBES
FIGURE = '<figure><img alt="{}" src="data:image/svg+xml;base64,{}"><figcaption>{}</figcaption></figure>'
PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


def labels_of(runs: Sequence[dict]) -> dict[str, str]:
    """A label for each key: the run's name, without its seed where several names share the key; with the folder, or a
    number, where another key has that label. runs: dicts with key, run (a name) and folder."""
    labels: dict[str, str] = {}
    for one in runs:
        if one["key"] not in labels:
            several = len({other["run"] for other in runs if other["key"] == one["key"]}) > 1
            label = (several and re.sub(SEED, "", one["run"])) or one["run"]
            name, differing = label, chain([one.get("folder")], count(2))
            while name in labels.values():
                name = f"{label} ({next(differing)})"
            labels[one["key"]] = name
    return labels


def by_model(found: Sequence[Any], about: Callable[[Any], dict]) -> list[tuple[str, list]]:
    """Label and seeds of each model under each protocol, in the order they come. about: run, key, protocol of each."""
    labels, groups = labels_of([about(one) for one in found]), {}
    for one in found:
        groups.setdefault((about(one)["protocol"], about(one)["key"]), []).append(one)
    return [(labels[key], seeds) for (_, key), seeds in groups.items()]


def grouped(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Seeds of one model as one measurement, protocol by protocol, in the order they come."""
    groups = []
    for label, seeds in by_model(measurements, lambda one: one.about):
        first, names = seeds[0], [one.label for one in seeds]
        about = first.about | {"run": label, "runs": names, "seeds": [seed for one in seeds for seed in one.seeds]}
        losses = {length: np.concatenate([one.losses[length] for one in seeds]) for length in first.losses}
        bins = {at: (np.concatenate([one.bins[at][0] for one in seeds]), first.bins[at][1]) for at in first.bins}
        shown = tables.PROBE_TITLES.keys() & first.probes.keys()
        probes = {name: _averaged([one.probes[name] for one in seeds]) for name in shown}
        groups.append(replace(first, about=about, losses=losses, bins=bins, probes=probes))
    return groups


def _averaged(of_seeds: list[list[dict]]) -> list[dict]:
    """A probe's rows, what is shown of them averaged over seeds; with several seeds errors are those over them."""
    rows = [dict(row) for row in of_seeds[0]]
    for row, *same in zip(rows, *of_seeds, strict=True):
        for key in {"gain", "difference", "mean_change"} & row.keys() if len(same) > 1 else ():
            values = np.array([one[key] for one in same])
            row |= {key: float(values.mean()), f"{key}_stderr": standard_error(values)}
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


class Pages:
    """Writes the files of a report. A subclass has tables and commands, and gives figures(html), head(), document()."""

    def text(self) -> str:
        return "\n\n".join(table.text() for table in self.tables)

    def write(self, folder: Path, html: bool = False) -> None:
        """extrapolation.json and its plot as PNG; html: all plots, also as SVG, tables.md and report.html."""
        made = self.figures(html)
        folder.mkdir(parents=True, exist_ok=True)
        for stem, plot in made.items():
            for ending in (".png", ".svg") if html else (".png",):
                plot.save(folder / f"{stem}{ending}")
        if html:
            for stem in PLOTS - made.keys() if (folder / "report.html").exists() else ():  # of an earlier measurement
                for ending in (".png", ".svg"):
                    (folder / f"{stem}{ending}").unlink(missing_ok=True)
            write_text(folder / "tables.md", "\n".join(table.markdown() for table in self.tables))
            page = {"head": self.head(), "plots": [], "tables": [table.html() for table in self.tables], "probes": []}
            for stem, plot in made.items():
                for panel in plot.panels:  # one by one, so that they stand side by side where there is room
                    image = base64.b64encode(plots.Plot([panel], plot.caption).draw("svg")).decode()
                    page["probes" if stem in OF_PROBES else "plots"].append(FIGURE.format(stem, image, plot.caption))
            page["commands"] = map(escape, self.commands)
            write_text(folder / "report.html", PAGE.substitute({key: "\n".join(part) for key, part in page.items()}))
        # The last of all: where it is, the others are. JSON has no NaN and no infinity: null stands for both.
        plain = json.loads(json.dumps(self.document()), parse_constant=lambda _: None)
        write_text(folder / "extrapolation.json", json.dumps(plain, indent=1) + "\n")


@dataclass
class Report(Pages):
    """Measurements side by side. reference: the label that the others are compared with; None: the first."""

    measurements: Sequence[Measurement]
    reference: str | None = None
    notes: Sequence[str] = ()
    skipped: Sequence[str] = ()
    commands: Sequence[str] = ()

    def __post_init__(self):
        self.protocols: dict[str, list[Measurement]] = {}
        for model in grouped(self.measurements):
            self.protocols.setdefault(model.about["protocol"], []).append(model)
        self.groups = [model for models in self.protocols.values() for model in models]
        self.alike = len({model.about["tokenizer"] for model in self.groups}) == 1  # else bits per byte only
        self.metric = "perplexity" if self.alike else "bits_per_byte"
        self.results = [measurement.result for measurement in self.measurements]

    @cached_property
    def tables(self) -> list[Table]:
        """Those that have anything to say: protocol by protocol, then the probes'."""
        made = []
        for protocol, models in self.protocols.items():
            if len(models) == len(models[0].seeds) == 1:
                found = [tables.one_model(models[0])]
            else:
                found = [tables.by_length(models, "perplexity")] if self.alike else []
                found += [tables.by_length(models, "bits_per_byte"), tables.against_train_length(models)]
                found += [tables.against(models, self._reference(models))]
            texts = dict.fromkeys(model.about["fingerprint"][:8] for model in models)
            scored = dict.fromkeys(f"{model.counts.sum():,.0f}" for model in models)
            what = f"{protocol} windows, text {' or '.join(texts)}, {' or '.join(scored)} tokens scored"
            made += [replace(t, title=": ".join(filter(None, (what, t.title)))) for t in found]
        # Losses per token of different tokenizers do not stand side by side.
        made += [tables.of_probe(self.groups, probe) for probe in tables.PROBE_TITLES if self.alike]
        return [table for table in made if table.rows]

    def _reference(self, models: list[Measurement]) -> Measurement:
        return next((model for model in models if model.label == self.reference), models[0])

    @cached_property
    def paired(self) -> list[dict]:
        """Every model against the reference, at every length on the same tokens."""
        found = []
        for protocol, models in self.protocols.items():
            first = self._reference(models)
            for model in models:
                pairs = {n: model.against(first, n) for n in model.lengths if model is not first}
                names = {"protocol": protocol, "reference": first.label, "model": model.label}
                found += [{**names, "length": n, **pair} for n, pair in pairs.items() if pair]
        return found

    def document(self) -> dict:
        """extrapolation.json: of a single measurement its result, of several an object that holds them all."""
        if len(self.measurements) == 1:
            return self.results[0]
        groups = [
            {"model": model.label, **{key: model.about[key] for key in ("protocol", "runs", "seeds")}}
            | {"rows": model.rows, "usable_length": model.usable_length()}
            for model in self.groups
        ]
        about = {"commands": list(self.commands), "notes": list(self.notes), "skipped": list(self.skipped)}
        return {**about, "results": self.results, "groups": groups, "paired": self.paired}

    def figures(self, html: bool) -> dict[str, plots.Plot]:
        looks = plots.styles([(model.label, model.about) for model in self.groups])
        made = {"extrapolation": plots.plot_lengths(self.protocols, self.metric, looks)}
        if html and self.alike:
            if any(model.bins for model in self.groups):
                made["by_position"] = plots.plot_positions(self.groups, looks)
            if recalled := [model for model in self.groups if "recall" in model.probes]:
                made["recall"] = plots.plot_recall(recalled, looks)
        if html and (attentive := [one for one in self.measurements if "attention" in one.probes]):
            made["attention"] = plots.plot_attention(attentive)
        return made

    def head(self) -> list[str]:
        """A sentence per model, and what was measured."""
        first = self.measurements[0].about
        models = [model for model in next(iter(self.protocols.values())) if not model.about.get("truncated")]
        text = ", ".join(filter(None, [first["corpus"], first["documents"], coverage(first)]))
        of = f"{' and '.join(self.protocols)} windows; within {tables.WITHIN} of the perplexity at the training length"
        told = [f"What: {of}; {tables.INTERVAL}; {first.get('precision')}. Text: {text}.", *self.notes]
        told += [f"left out: {reason}" for reason in self.skipped]
        parts = ["<h1>Length extrapolation</h1>\n<ul>", *(f"<li>{escape(tables.sentence(one))}</li>" for one in models)]
        return [*parts, "</ul>", *(f"<p>{escape(words)}</p>" for words in told)]


def coverage(about: dict) -> str:
    """How much of the validation text is in the training text too, in words; nothing where that is not known."""
    if "val_covered" not in about:
        return ""
    least = "at least " if about.get("val_covered_of_train", 1) < 1 else ""  # not all of the training text was read
    return f"{least}{about['val_covered'] * 100:.1f} % of the text also occurs in the training text"


def comparability(measurements: Sequence[Measurement]) -> list[str]:
    """What a reader must know before comparing these numbers."""
    about, notes = [measurement.about for measurement in measurements], []
    for one in about:
        if one.get("trained_on", one["fingerprint"]) != one["fingerprint"]:
            now = f"{one['corpus']} is now {one['fingerprint']}: validation text may have been in its training text"
            notes.append(f"{one['run']} was trained on data {one['trained_on']}, but {now}")
    if len({one["fingerprint"] for one in about}) > 1:
        notes.append("not all of these runs are measured on the same data: only those of one text can be compared")
    if len({one["tokenizer"] for one in about}) > 1:
        notes.append("different tokenizers: only bits per byte are shown, and a length is in each run's own tokens")
    if len({one["documents"].split()[0] for one in about}) > 1:
        notes.append("some of these texts are scored within documents, others across: documents= chooses one for all")
    return list(dict.fromkeys(notes))


def log_curve(rows: Sequence[dict], prefix: str, record: Callable[[dict], None], wandb_run: Any) -> None:
    """The curve as metrics with length as their x-axis, and a summary value per length to sort runs by.

    rows: of a Measurement, or of a task's answers, whose x is the longest length of a range.
    """
    for row in rows:
        metric, at = ("exact_match", row["range"]) if "range" in row else ("perplexity", row["length"])
        if row[metric] is not None:
            keys = ("nll", "perplexity", "stderr", "bits_per_byte", "exact_match")
            values = {f"{prefix}/{key}": row[key] for key in keys if row.get(key) is not None}
            record({"extrapolation/length": row.get("to", at), **values})
            wandb_run.summary.update({f"{prefix}/{metric}_{at}": row[metric]})


def log_measurements(found: Sequence[Measurement], report: Report, wandb_run: Any) -> None:
    """Curves by length and by position, probes, the usable length, and the table of paired differences."""
    import wandb  # it is the caller's: wandb_run is a run of it

    first, stretched = found[0], scaling_words(found[0].about["scaling"], "_")
    for measurement in found:
        prefix = f"extrapolation/{measurement.about['protocol']}{stretched}"
        log_curve(measurement.rows, prefix, wandb_run.log, wandb_run)
        if usable := measurement.usable_length():
            wandb_run.summary.update({f"{prefix}/usable_length": usable["value"]})
    for row in first.by_position:
        values = {f"by_position/{key}{stretched}": row[key] for key in ("nll", "stderr") if row[key] is not None}
        wandb_run.log({"by_position/position": row["to"], **values})
    for row in first.probes.get("recall", ()):
        values = {f"recall/{key}{stretched}": row[key] for key in ("nll", "control_nll", "gain")}
        wandb_run.log({"recall/distance": row["distance"], **values})
    for row in first.probes.get("shift", ()):
        wandb_run.summary.update({f"shift/mean_change_{row['shift']}{stretched}": row["mean_change"]})
    columns = ["protocol", "model", "reference", "length", "difference", "low", "high", "documents"]
    mine = next(model.label for model in report.groups if model.about["key"] == first.about["key"])
    if pairs := [pair for pair in report.paired if pair["model"] == mine]:
        rows = [[pair[column] for column in columns] for pair in pairs]
        wandb_run.log({f"paired{stretched}": wandb.Table(columns=columns, data=rows)})
