"""What a measurement leaves behind: JSON, plots, tables.md, a report.html that needs no network, metrics in wandb."""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from measure import plots, tables
from measure.groups import grouped, scaling_words
from measure.measurement import Measurement
from measure.statistics import finite
from measure.tables import Table
from model.checkpoint import write_text

PLOTS = {"extrapolation", "by_position", "recall", "attention"}
PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


class Pages:
    """What is written of a report, which has tables, commands and a document."""

    probed: Sequence[Table] = ()  # under a head of their own

    def text(self) -> str:
        return "\n\n".join(table.text() for table in (*self.tables, *self.probed))

    def write_files(self, folder: Path, made: dict[str, plots.Plot], body: list[str] | None) -> None:
        """extrapolation.json, plots as PNG; with the parts of a page's body also SVG, tables.md and report.html."""
        folder.mkdir(parents=True, exist_ok=True)
        for stem, plot in made.items():
            for ending in (".png",) if body is None else (".png", ".svg"):
                plot.save(folder / f"{stem}{ending}")
        if body is not None:
            for stem in PLOTS - made.keys() if (folder / "report.html").exists() else ():  # of an earlier measurement
                for ending in (".png", ".svg"):
                    (folder / f"{stem}{ending}").unlink(missing_ok=True)
            write_text(folder / "tables.md", "\n".join(table.markdown() for table in (*self.tables, *self.probed)))
            words = {"body": "\n".join(body), "commands": escape("\n".join(self.commands))}
            write_text(folder / "report.html", PAGE.substitute(words))
        # The last of all: where it is, the others are.
        write_text(folder / "extrapolation.json", json.dumps(finite(self.document()), indent=1) + "\n")


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

    @property
    def results(self) -> list[dict]:
        return [measurement.result for measurement in self.measurements]

    @cached_property
    def tables(self) -> list[Table]:
        """Those that have anything to say, protocol by protocol."""
        made = []
        for protocol, models in self.protocols.items():
            texts = dict.fromkeys(model.about["fingerprint"][:8] for model in models)
            scored = dict.fromkeys(f"{model.counts.sum():,.0f}" for model in models)
            what = f"{protocol} windows, text {' or '.join(texts)}, {' or '.join(scored)} tokens scored"
            made += [replace(t, title=": ".join(filter(None, (what, t.title)))) for t in self._of_protocol(models)]
        return [table for table in made if table.rows]

    def _of_protocol(self, models: list[Measurement]) -> list[Table]:
        if len(models) == len(models[0].seeds) == 1:
            return [tables.one_model(models[0])]
        made = [tables.by_length(models, "perplexity")] if self.alike else []
        made += [tables.by_length(models, "bits_per_byte"), tables.against_train_length(models)]
        return [*made, tables.against(models, self._reference(models))]

    @cached_property
    def probed(self) -> list[Table]:
        """The probes' tables; losses per token of different tokenizers do not stand side by side."""
        made = [tables.of_probe(self.groups, probe) for probe in tables.PROBES if self.alike]
        return [table for table in made if table.rows]

    def _reference(self, models: list[Measurement]) -> Measurement:
        return next((model for model in models if model.label == self.reference), models[0])

    @cached_property
    def paired(self) -> list[dict]:
        """Every model against the reference, at every length on the same tokens."""
        found = []
        for protocol, models in self.protocols.items():
            first = self._reference(models)
            pairs = [
                (model, n, model.against(first, n)) for model in models if model is not first for n in model.lengths
            ]
            names = {"protocol": protocol, "reference": first.label}
            found += [{**names, "model": model.label, "length": n, **pair} for model, n, pair in pairs if pair]
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

    def write(self, folder: Path, html: bool = False) -> None:
        looks, probes = plots.styles([(model.label, model.about) for model in self.groups]), {}
        curves = {"extrapolation": plots.plot_lengths(self.protocols, self.metric, looks)}
        if html and self.alike:
            if any(model.bins for model in self.groups):
                curves["by_position"] = plots.plot_positions(self.groups, looks)
            if recalled := [model for model in self.groups if "recall" in model.probes]:
                probes["recall"] = plots.plot_recall(recalled, looks)
        if html and (attentive := [one for one in self.measurements if "attention" in one.probes]):
            probes["attention"] = plots.plot_attention(attentive)
        self.write_files(folder, curves | probes, self._body(curves, probes) if html else None)

    def _body(self, curves: dict[str, plots.Plot], probes: dict[str, plots.Plot]) -> list[str]:
        """A sentence per model, the curves, the tables, the probes."""
        first = self.measurements[0].about
        models = [model for model in next(iter(self.protocols.values())) if not model.about.get("truncated")]
        text = ", ".join(filter(None, [first["corpus"], first["documents"], coverage(first)]))
        of = f"{first['protocol']} windows; within {tables.WITHIN} of the perplexity at the training length"
        told = [f"What: {of}; {tables.INTERVAL}; {first.get('precision')}. Text: {text}.", *self.notes]
        told += [f"left out: {reason}" for reason in self.skipped]
        parts = ["<h1>Length extrapolation</h1>\n<ul>", *(f"<li>{escape(tables.sentence(one))}</li>" for one in models)]
        parts += ["</ul>", *(f"<p>{escape(words)}</p>" for words in told), figures(curves)]
        parts += [table.html() for table in self.tables]
        if self.probed or probes:
            parts += ["<h2>Probes</h2>", figures(probes), *(table.html() for table in self.probed)]
        return parts


def figures(made: dict[str, plots.Plot]) -> str:
    """Panel by panel, so that they stand side by side where there is room."""
    image = '<figure><img alt="{}" src="data:image/svg+xml;base64,{}"><figcaption>{}</figcaption></figure>'
    panels = [(name, plots.Plot([panel], plot.caption)) for name, plot in made.items() for panel in plot.panels]
    shown = [image.format(name, base64.b64encode(one.draw("svg")).decode(), one.caption) for name, one in panels]
    return "\n".join(["<div class=plots>", *shown, "</div>"])


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
            keys = [key for key in ("nll", "perplexity", "stderr", "bits_per_byte", "exact_match") if key in row]
            record({"extrapolation/length": row.get("to", at), **{f"{prefix}/{key}": row[key] for key in keys}})
            wandb_run.summary.update({f"{prefix}/{metric}_{at}": row[metric]})


def log_measurements(found: Sequence[Measurement], report: Report, wandb_run: Any) -> None:
    """Curves by length and by position, probes, the usable length, and the table of paired differences."""
    import wandb  # it is the caller's: wandb_run is a run of it

    first = found[0]
    stretched = scaling_words(first.about["scaling"], "_")

    def record(row: dict) -> None:
        wandb_run.log({key: value for key, value in row.items() if value is not None})  # wandb shows None as a value

    for measurement in found:
        prefix = f"extrapolation/{measurement.about['protocol']}{stretched}"
        log_curve(measurement.rows, prefix, record, wandb_run)
        if usable := measurement.usable_length():
            wandb_run.summary.update({f"{prefix}/usable_length": usable["value"]})
    for row in first.by_position:
        values = {f"by_position/{key}{stretched}": row[key] for key in ("nll", "stderr")}
        record({"by_position/position": row["to"], **values})
    for row in first.probes.get("recall", ()):
        values = {f"recall/{key}{stretched}": row[key] for key in ("nll", "control_nll", "gain")}
        record({"recall/distance": row["distance"], **values})
    for row in first.probes.get("shift", ()):
        wandb_run.summary.update({f"shift/mean_change_{row['shift']}{stretched}": row["mean_change"]})
    columns = ["protocol", "model", "reference", "length", "difference", "low", "high", "documents"]
    mine = next(model.label for model in report.groups if model.about["key"] == first.about["key"])
    if pairs := [pair for pair in report.paired if pair["model"] == mine]:
        rows = [[pair[column] for column in columns] for pair in pairs]
        wandb_run.log({f"paired{stretched}": wandb.Table(columns=columns, data=rows)})
