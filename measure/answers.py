"""Tasks with a right answer (data/tasks.py): exact match by length of the input, its table, plot and report.

An answer is right where the likeliest id is the right one at each of its places, given the right ones before it: the
same as whether greedy decoding gives the answer.
"""

import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measure import plots
from measure.groups import labels_of
from measure.report import PAGE, SCRIPT, STYLE
from measure.tables import NOTHING, Table
from model import GPT
from model.checkpoint import write_text
from model.sampling import evaluating

BATCH = 100  # strings passed at once
ENDS = {"low": -1, "high": 1}


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    z, share = 1.959964, right / n
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


@torch.inference_mode()
def evaluate_task(model: GPT, task: Any, ranges: Sequence[tuple[int, int]] | None = None) -> list[dict]:
    """A row a range of lengths: range, from, to, exact_match, low, high (its interval), strings.

    task: a data.Task. Where a learned table ends before a range's strings, exact_match is None, with a note.
    """
    rows = []
    for bounds in ranges or task.ranges:
        row, right, n = {"range": "-".join(map(str, bounds)), "from": bounds[0], "to": bounds[1]}, 0, 0
        rows.append(row)
        limit = model.pos.max_length
        if limit is not None and task.kind.size(bounds[1]) - 1 > limit:
            rows[-1] |= {"exact_match": None, "low": None, "high": None, "note": f"table ends at {limit}"}
            continue
        with evaluating(model):
            for batch in task.test_batches(bounds, BATCH):
                inputs, targets = (torch.from_numpy(part).to(model.embedding.weight.device) for part in batch)
                wrong = (model(inputs).argmax(dim=-1) != targets) & (targets != -100)
                right, n = right + int((~wrong.any(dim=1)).sum()), n + len(inputs)
        low, high = wilson(right, n)
        row |= {"exact_match": right / n, "low": low, "high": high, "strings": n}
    return rows


def shown(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def with_interval(row: dict) -> str:
    """`0.9985 [0.9956, 0.9995]`, or where a table ends."""
    if row["exact_match"] is None:
        return row["note"]
    return f"{shown(row['exact_match'])} [{shown(row['low'])}, {shown(row['high'])}]"


@dataclass(frozen=True)
class Answers:
    """What a run answers. about: run, folder, checkpoint, seed and, of several runs, key (equal for seeds)."""

    about: dict
    rows: list[dict]


def over_seeds(seeds: Sequence[Answers], span: str) -> dict | None:
    """The row of a range; of several seeds their mean, and as low and high the lowest and the highest of them."""
    rows = [row for one in seeds for row in one.rows if row["range"] == span]
    values = [row["exact_match"] for row in rows]
    if len(rows) < 2 or None in values:
        return rows[0] if rows else None
    return rows[0] | {"exact_match": float(np.mean(values)), "low": min(values), "high": max(values)}


@dataclass
class AnswerReport:
    """Answers of runs side by side, with the interface of measure.Report."""

    answers: Sequence[Answers]
    commands: Sequence[str] = ()

    def __post_init__(self):
        key_of = lambda one: one.about.get("key", "")  # noqa: E731
        labels = labels_of([(key_of(m), m.about["run"], Path(m.about["folder"]).name) for m in self.answers])
        self.groups = {label: [m for m in self.answers if key_of(m) == key] for key, label in labels.items()}
        self.spans = {
            row["range"]: row for row in sorted((r for m in self.answers for r in m.rows), key=lambda r: r["to"])
        }

    @property
    def results(self) -> list[dict]:
        return [one.about | {"rows": one.rows} for one in self.answers]

    @property
    def tables(self) -> list[Table]:
        """Run by run; before it, seeds together: all, and those without a wrong answer in their first range, which is
        what papers average over."""
        several = {label: seeds for label, seeds in self.groups.items() if len(seeds) > 1}
        right = {label: [one for one in seeds if one.rows[0]["exact_match"] == 1] for label, seeds in several.items()}
        spread, wilsons = "[ ]: lowest and highest seed", "[ ]: Wilson's 95 % interval over test strings"
        made = [self._table("exact match by length, mean over seeds", several, spread)]
        made += [self._table("the same, of the seeds without a wrong answer in the first range", right, spread)]
        rows = [[m.about["run"], str(m.about["seed"]), *self._cells([m])] for m in self.answers]
        made += [Table("exact match by length", ["run", "seed", *self.spans], rows, wilsons)]
        return [table for table in made if table.rows]

    def _cells(self, seeds: list[Answers]) -> list[str]:
        return [with_interval(row) if (row := over_seeds(seeds, span)) else NOTHING for span in self.spans]

    def _table(self, title: str, groups: dict[str, list[Answers]], note: str) -> Table:
        rows = [[label, str(len(seeds)), *self._cells(seeds)] for label, seeds in groups.items() if seeds]
        return Table(title, ["model", "seeds", *self.spans], rows, note)

    def text(self) -> str:
        return "\n\n".join(table.text() for table in self.tables)

    def write(self, folder: Path, html: bool = False) -> None:
        """extrapolation.json and extrapolation.png; with html also the SVG and report.html."""
        folder.mkdir(parents=True, exist_ok=True)
        for ending in ("png", "svg") if html else ("png",):
            self.plot(folder / f"extrapolation.{ending}")
        if html:
            image = base64.b64encode((folder / "extrapolation.svg").read_bytes()).decode()
            parts = ["<h1>Exact match by length</h1>", f'<img alt="" src="data:image/svg+xml;base64,{image}">']
            parts += [*(table.html() for table in self.tables), f"<pre>{escape(chr(10).join(self.commands))}</pre>"]
            write_text(folder / "report.html", PAGE.format(style=STYLE, body="\n".join(parts), script=SCRIPT))
        several = {"commands": list(self.commands), "results": self.results}
        document = self.results[0] if len(self.answers) == 1 else several
        write_text(folder / "extrapolation.json", json.dumps(document, indent=1) + "\n")

    def plot(self, path: Path) -> None:
        """A curve a model; bars are Wilson's intervals, of several seeds the lowest and the highest."""
        figure, (axes,) = plots.new_figure(1)
        for i, (style, (label, seeds)) in enumerate(zip(plots.styles(), self.groups.items(), strict=False)):
            rows = [(place, over_seeds(seeds, span)) for place, span in enumerate(self.spans)]
            rows = [(place, row) for place, row in rows if row and row["exact_match"] is not None]
            at, values = [place + 0.02 * i for place, _ in rows], [row["exact_match"] for _, row in rows]
            bars = [[max(0, sign * (row[end] - row["exact_match"])) for _, row in rows] for end, sign in ENDS.items()]
            axes.errorbar(at, values, yerr=bars, label=plots.literal(label), capsize=3, **style)
        axes.set_xticks(range(len(self.spans)), list(self.spans))
        axes.set(xlabel="length of the input", ylabel="exact match of the answer", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.25)
        figure.legend(frameon=False, loc="outside right upper", title="bars: 95 % or seeds", title_fontsize=8)
        plots.save(figure, path)


def log_answers(rows: Sequence[dict], prefix: str, record: Callable[[dict], None], wandb_run: Any) -> None:
    """The curve as a metric with the longest length of each range as its x-axis, and summary values to sort runs by."""
    rows = [row for row in rows if row["exact_match"] is not None]
    for row in rows:
        record({"extrapolation/length": row["to"], f"{prefix}/exact_match": row["exact_match"]})
    wandb_run.summary.update({f"{prefix}/exact_match_{row['range']}": row["exact_match"] for row in rows})
