"""What a measurement leaves behind: extrapolation.json, plots as PNG and SVG, a report.html that needs no network."""

import base64
import json
import re
from collections.abc import Callable, Sequence
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
body{font:15px/1.5 system-ui,sans-serif;max-width:90rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:14px;margin:1.5rem 0 .3rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:.3rem}
th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{border-bottom:2px solid #555;cursor:pointer}
.wide{overflow-x:auto}.note{color:#555;font-size:13px;margin:.2rem 0 1rem}
img{max-width:100%;display:block;margin:1.5rem 0}pre{background:#f5f5f5;padding:.7rem;overflow-x:auto;font-size:13px}
"""
# Sorts a table by the column whose head is clicked: by the number a cell begins with, else by its words.
SCRIPT = """
for(const th of document.querySelectorAll("th"))th.onclick=()=>{
const body=th.closest("table").tBodies[0],i=th.cellIndex,up=th.dataset.up=th.dataset.up==="1"?"0":"1";
const key=r=>{const t=r.cells[i].textContent.replace("\\u2265 ","").replaceAll("\\u2212","-");
const n=parseFloat(t.replaceAll(",",""));return isNaN(n)?t:n};
[...body.rows].sort((a,b)=>{const x=key(a),y=key(b);
const c=typeof x===typeof y?(x<y?-1:x>y?1:0):(typeof x==="number"?-1:1);
return up==="1"?c:-c}).forEach(r=>body.append(r))}
"""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Length extrapolation</title><link rel="icon" href="data:,">
<style>{style}</style>
<body>
{body}
<script>{script}</script>
</html>
"""

# Of the probes' rows, the values to average over seeds, and where their errors are.
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
        """Those that have anything to say, protocol by protocol, and the probes'."""
        made = []
        for protocol, groups in self.protocols.items():
            texts = dict.fromkeys(group.first["fingerprint"][:8] for group in groups)
            scored = dict.fromkeys(f"{group.members[0].counts.sum():,.0f}" for group in groups)
            what = f"{protocol} windows, text {' or '.join(texts)}, {' or '.join(scored)} tokens scored"
            made += [replace(t, title=": ".join(filter(None, (what, t.title)))) for t in self._of_protocol(groups)]
        made += [tables.PROBES[name](rows) for name in tables.PROBES if (rows := self._probed(name))]
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
        return "\n\n".join(table.text() for table in self.tables)

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
        folder.mkdir(parents=True, exist_ok=True)
        figures = {"extrapolation": lambda path: plots.plot_lengths(self.protocols, self.metric, path)}
        if html:
            figures |= self._other_figures()
        for stem, draw in figures.items():
            for ending in (".png", ".svg") if html else (".png",):
                draw(folder / f"{stem}{ending}")
        if html:
            write_text(folder / "report.html", self._html([folder / f"{stem}.svg" for stem in figures]))
        # The last of all: where it is, the others are.
        write_text(folder / "extrapolation.json", json.dumps(self.document(), indent=1) + "\n")

    def _other_figures(self) -> dict[str, Callable[[Path], None]]:
        if self.metric != "perplexity":
            return {}  # losses a token of different tokenizers, side by side
        with_positions = [group for group in self.groups if group.members[0].bins]
        figures = {"by_position": lambda path: plots.plot_positions(with_positions, path)} if with_positions else {}
        if recalled := self._probed("recall"):
            figures["recall"] = lambda path: plots.plot_recall(recalled, path)
        for result in self.results:
            if "attention" in result:
                stem = "attention_" + re.sub(r"\W+", "_", result["run"], flags=re.ASCII)[:80]
                stem += f"_{len(figures)}" if stem in figures else ""
                figures[stem] = lambda path, result=result: plots.plot_attention(result, path)
        return figures

    def _html(self, figures: list[Path]) -> str:
        first = self.measurements[0].about
        facts = [first["corpus"], first["documents"], coverage(first)]
        facts = [", ".join(filter(None, facts)) + f"; in {first.get('precision')}"]
        facts += [*self.notes, *(f"left out: {reason}" for reason in self.skipped)]
        made = [*self.tables, tables.settings_apart(self.settings) if len(self.settings) > 1 else None]
        parts = ["<h1>Length extrapolation</h1>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
        for path in figures:
            data = base64.b64encode(path.read_bytes()).decode()
            parts.append(f'<img alt="{escape(path.stem)}" src="data:image/svg+xml;base64,{data}">')
        parts += [f"<div class=wide>{table.html()}</div>" for table in made if table]
        parts += ["<h2>Made by</h2>", f"<pre>{escape(chr(10).join(self.commands))}</pre>"] if self.commands else []
        return PAGE.format(style=STYLE, body="\n".join(parts), script=SCRIPT)


def coverage(about: dict) -> str:
    """How much of the validation text is in the training text too, in words; nothing where that is not known."""
    if "val_covered" not in about:
        return ""
    least = "at least " if about.get("val_covered_of_train", 1) < 1 else ""  # not all of the training text was read
    return f"{least}{about['val_covered']:.1%} of its bytes in the training text too"


def comparability(measurements: Sequence[Measurement]) -> list[str]:
    """What a reader must know before comparing these numbers."""
    notes, about = {}, [m.about for m in measurements]
    for one in about:
        if one.get("trained_on", one["fingerprint"]) != one["fingerprint"]:
            notes[
                f"{one['run']} was trained on data {one['trained_on']}, but {one['corpus']} is now "
                f"{one['fingerprint']}: validation text may have been in its training text"
            ] = None
    if len({one["fingerprint"] for one in about}) > 1:
        notes["not all of these runs are measured on the same data: only those of one text can be compared"] = None
    if len({one["tokenizer"] for one in about}) > 1:
        notes[
            "these runs have different tokenizers: bits per byte only, as perplexities are per token, and a length is "
            "in each run's own tokens"
        ] = None
    return list(notes)
