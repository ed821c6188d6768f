"""What a measurement leaves behind: extrapolation.json, plots as PNG and SVG, a report.html that needs no network."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path

from measure import plots, tables
from measure.groups import Group, grouped
from measure.measurement import Measurement
from measure.statistics import finite
from measure.tables import Table
from model.checkpoint import write_text

STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem clamp(.8rem,3vw,3rem)}
li,p{max-width:75rem}.note{margin:.2rem 0 1.5rem}.wide,pre{overflow-x:auto}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1rem;margin:1rem 0}
figure{margin:0;max-width:52rem}figcaption,.note{font-size:13px;opacity:.75}
img{width:100%;padding:.4rem;box-sizing:border-box;background:#fff;border-radius:6px;display:block}
h3{font-size:14px;margin:1.5rem 0 .3rem}summary{cursor:pointer;font-weight:600;margin:1rem 0}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid #8885;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #888;cursor:pointer}
th[data-up="1"]::after{content:" ▲"}th[data-up="-1"]::after{content:" ▼"}
"""
# Sorts a table by the column whose head is clicked: by the number a cell begins with, then by its words.
SCRIPT = """
for(const th of document.querySelectorAll("th"))th.onclick=()=>{
const body=th.closest("table").tBodies[0],up=th.dataset.up==="1"?-1:1;
for(const other of th.parentNode.cells)delete other.dataset.up;th.dataset.up=up;
const key=row=>row.cells[th.cellIndex].textContent.replace("≥ ","").replace("−","-");
[...body.rows].sort((a,b)=>{const x=key(a),y=key(b),m=parseFloat(x),n=parseFloat(y);
return isNaN(m)-isNaN(n)||up*(m-n||x.localeCompare(y))}).forEach(row=>body.append(row))}
"""
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Length extrapolation</title><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>{style}</style><body>
{body}
<script>{script}</script></html>
"""
# Of the probes' rows the values to average over seeds, and where their errors are.
AVERAGED = {
    "recall": {"nll": "stderr", "control_nll": "control_stderr", "gain": "gain_stderr"},
    "shift": {"difference": "stderr", "mean_change": "mean_change_stderr"},
}


@dataclass
class Report:
    """Measurements side by side. reference: the label that the others are compared with; None: the first."""

    measurements: Sequence[Measurement]
    reference: str | None = None
    sort: str | None = None
    notes: Sequence[str] = ()
    skipped: Sequence[str] = ()
    commands: Sequence[str] = ()
    settings: dict[str, dict] = field(default_factory=dict)  # a run's name -> its configuration

    def __post_init__(self):
        self.protocols: dict[str, list[Group]] = {}
        for group in grouped(self.measurements):
            self.protocols.setdefault(group.first["protocol"], []).append(group)
        tokenizers = {m.about["tokenizer"] for m in self.measurements}
        self.metric = "perplexity" if len(tokenizers) == 1 else "bits_per_byte"

    @property
    def groups(self) -> list[Group]:
        """All of them, protocol by protocol."""
        return [group for groups in self.protocols.values() for group in groups]

    @property
    def results(self) -> list[dict]:
        return [m.result | {"usable_length": Group("", [m]).usable_length()} for m in self.measurements]

    @cached_property
    def tables(self) -> list[Table]:
        """Those that have anything to say, protocol by protocol."""
        made = []
        for protocol, groups in self.protocols.items():
            texts = dict.fromkeys(group.first["fingerprint"][:8] for group in groups)
            scored = dict.fromkeys(f"{group.members[0].counts.sum():,.0f}" for group in groups)
            what = f"{protocol} windows, text {' or '.join(texts)}, {' or '.join(scored)} tokens scored"
            made += [replace(t, title=": ".join(filter(None, (what, t.title)))) for t in self._of_protocol(groups)]
        return [table for table in made if table.rows]

    @cached_property
    def probed(self) -> list[Table]:
        made = (tables.PROBES[name](rows) for name in tables.PROBES if (rows := self._probed(name)))
        return [table for table in made if table.rows]

    def _of_protocol(self, groups: list[Group]) -> list[Table]:
        if len(groups) == len(groups[0].members) == 1:
            return [tables.one_model(groups[0])]
        metrics = ("perplexity", "bits_per_byte") if self.metric == "perplexity" else ("bits_per_byte",)
        made = [tables.by_length(groups, metric) for metric in metrics]
        made += [tables.against_train_length(groups), tables.against(groups, self._reference(groups))]
        return [table.sorted(self.sort) if self.sort and table.rows else table for table in made]

    def _reference(self, groups: list[Group]) -> Group:
        return next((group for group in groups if group.label == self.reference), groups[0])

    def _probed(self, name: str) -> list[dict]:
        """A probe's rows of each model that has them, averaged over its seeds; none of different tokenizers."""
        if self.metric != "perplexity":
            return []
        groups = next(iter(self.protocols.values()))
        return [rows for group in groups if (rows := group.probe(name, AVERAGED[name]))]

    @cached_property
    def paired(self) -> list[dict]:
        """Every model against the reference, at every length on the same tokens."""
        found = []
        for protocol, groups in self.protocols.items():
            reference = self._reference(groups)
            names = {"protocol": protocol, "reference": reference.label}
            for group in (g for g in groups if g is not reference):
                pairs = ((length, group.against(reference, length)) for length in group.lengths)
                found += [{**names, "model": group.label, "length": n, **pair} for n, pair in pairs if pair]
        return found

    def text(self) -> str:
        return "\n\n".join(table.text() for table in (*self.tables, *self.probed))

    def document(self) -> dict:
        """extrapolation.json: of a single measurement its result, of several an object that holds them all."""
        if len(self.measurements) == 1:
            return finite(self.results[0])
        groups = [
            {"model": group.label, "protocol": group.first["protocol"], "runs": [m.about["run"] for m in group.members]}
            | {"seeds": group.seeds, "rows": [group.row(length) for length in group.lengths]}
            | {"usable_length": group.usable_length()}
            for group in self.groups
        ]
        about = {"commands": list(self.commands), "notes": list(self.notes), "skipped": list(self.skipped)}
        return finite({**about, "results": self.results, "groups": groups, "paired": self.paired})

    def write(self, folder: Path, html: bool = False) -> None:
        """extrapolation.json and extrapolation.png; with html also the SVG, the other plots and report.html."""
        curves, probes = self._plots(others=html)
        write_files(folder, curves | probes, self.document(), self._html(curves, probes) if html else None)

    def _plots(self, others: bool) -> tuple[dict[str, plots.Plot], dict[str, plots.Plot]]:
        """The curves, and the probes' figures. Losses a token of different tokenizers do not stand side by side."""
        looks, probes = plots.styles(self.groups), {}
        curves = {"extrapolation": plots.plot_lengths(self.protocols, self.metric, looks)}
        if others and self.metric == "perplexity":
            if with_positions := [group for group in self.groups if group.members[0].bins]:
                curves["by_position"] = plots.plot_positions(with_positions, looks)
            if recalled := self._probed("recall"):
                probes["recall"] = plots.plot_recall(recalled, looks)
            if attentive := [result for result in self.results if "attention" in result]:
                probes["attention"] = plots.plot_attention(attentive)
        return curves, probes

    def _html(self, curves: dict[str, plots.Plot], probes: dict[str, plots.Plot]) -> list[str]:
        """A sentence a model, the curves, the tables, the probes; folded away what the numbers are made of."""
        first = self.measurements[0].about
        models = [group for group in next(iter(self.protocols.values())) if not group.first.get("truncated")]
        text = ", ".join(filter(None, [first["corpus"], first["documents"], coverage(first)]))
        of = f"{tables.WITHIN}: of the perplexity at the training length, in {first['protocol']} windows"
        told = [f"{of}; {tables.INTERVAL}. Text: {text}; in {first.get('precision')}.", *self.notes]
        told += [f"left out: {reason}" for reason in self.skipped]
        parts = ["<h1>Length extrapolation</h1>\n<ul>", *(f"<li>{escape(tables.sentence(one))}</li>" for one in models)]
        parts += ["</ul>", *(f"<p>{escape(words)}</p>" for words in told), figures(curves)]
        parts += [table.html() for table in self.tables]
        if self.probed or probes:
            parts += ["<h2>Probes</h2>", figures(probes), *(table.html() for table in self.probed)]
        parts.append("<details><summary>Settings and commands</summary>")
        if len(self.settings) > 1 and (differing := tables.settings_apart(self.settings)):
            parts.append(differing.html())
        return [*parts, f"<pre>{escape(chr(10).join(self.commands))}</pre></details>"]


def write_files(folder: Path, made: dict[str, plots.Plot], document: dict, page: list[str] | None = None) -> None:
    """extrapolation.json and each plot as PNG; with the parts of a page's body also the SVG and report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, plot in made.items():
        for ending in (".png",) if page is None else (".png", ".svg"):
            plot.save(folder / f"{stem}{ending}")
    if page is not None:
        write_text(folder / "report.html", PAGE.format(style=STYLE, body="\n".join(page), script=SCRIPT))
    # The last of all: where it is, the others are.
    write_text(folder / "extrapolation.json", json.dumps(document, indent=1) + "\n")


def figures(made: dict[str, plots.Plot]) -> str:
    """Panel by panel, so that they stand side by side where there is room."""
    image = '<figure><img alt="{}" src="data:image/svg+xml;base64,{}"><figcaption>{}</figcaption></figure>'
    panels = [(name, plot.svg(panel), plot.caption) for name, plot in made.items() for panel in plot.panels]
    shown = [image.format(name, base64.b64encode(svg).decode(), caption) for name, svg, caption in panels]
    return "\n".join(["<div class=plots>", *shown, "</div>"])


def coverage(about: dict) -> str:
    """How much of the validation text is in the training text too, in words; nothing where that is not known."""
    if "val_covered" not in about:
        return ""
    least = "at least " if about.get("val_covered_of_train", 1) < 1 else ""  # not all of the training text was read
    return f"{least}{about['val_covered'] * 100:.1f} % of its bytes in the training text too"


def comparability(measurements: Sequence[Measurement]) -> list[str]:
    """What a reader must know before comparing these numbers."""
    about = [m.about for m in measurements]
    notes = [
        f"{one['run']} was trained on data {one['trained_on']}, but {one['corpus']} is now {one['fingerprint']}: "
        "validation text may have been in its training text"
        for one in about
        if one.get("trained_on", one["fingerprint"]) != one["fingerprint"]
    ]
    if len({one["fingerprint"] for one in about}) > 1:
        notes.append("not all of these runs are measured on the same data: only those of one text can be compared")
    if len({one["tokenizer"] for one in about}) > 1:
        notes.append(
            "these runs have different tokenizers: bits per byte only, as perplexities are per token, and a length is "
            "in each run's own tokens"
        )
    return list(dict.fromkeys(notes))
