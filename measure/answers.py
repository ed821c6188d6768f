"""Tasks with a right answer (data/tasks.py): exact match by length of the input, its table, plot and report.

An answer is right where the likeliest id is the right one at each of its places, given the right ones before it: the
same as whether greedy decoding gives the answer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measure import plots
from measure.groups import Group, grouped
from measure.report import figures, write_files
from measure.tables import NOTHING, Table
from model import GPT
from model.sampling import evaluating

BATCH = 100  # strings passed at once


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
            row |= {"exact_match": None, "low": None, "high": None, "note": f"table ends at {limit}"}
            continue
        with evaluating(model):
            for batch in task.test_batches(bounds, BATCH):
                inputs, targets = (torch.from_numpy(part).to(model.embedding.weight.device) for part in batch)
                wrong = (model(inputs).argmax(dim=-1) != targets) & (targets != -100)
                right, n = right + int((~wrong.any(dim=1)).sum()), n + len(inputs)
        low, high = wilson(right, n)
        row |= {"exact_match": right / n, "low": low, "high": high, "strings": n}
    return rows


def with_interval(row: dict) -> str:
    """`0.9985 [0.9956, 0.9995]`, or where a table ends."""
    if row["exact_match"] is None:
        return row["note"]
    value, low, high = (f"{row[key]:.4f}".rstrip("0").rstrip(".") for key in ("exact_match", "low", "high"))
    return f"{value} [{low}, {high}]"


def in_words(rows: Sequence[dict]) -> str:
    return ", ".join(f"{row['range']}: {with_interval(row)}" for row in rows)


@dataclass(frozen=True)
class Answers:
    """What a run answers. about: run, folder, checkpoint, seed, key (equal for seeds of a model), task, pos."""

    about: dict
    rows: list[dict]


def measure_task(model: GPT, task: Any, about: dict) -> Answers:
    known = {"protocol": "exact match", "key": "", "task": task.name, "pos": model.config.pos}
    return Answers(known | about, evaluate_task(model, task))


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
        self.groups = grouped(self.answers)
        rows = sorted((row for one in self.answers for row in one.rows), key=lambda row: row["to"])
        self.spans = list(dict.fromkeys(row["range"] for row in rows))

    @property
    def results(self) -> list[dict]:
        return [one.about | {"rows": one.rows} for one in self.answers]

    @property
    def tables(self) -> list[Table]:
        """Run by run; before it, seeds together: all, and those without a wrong answer in their first range, which is
        what papers average over."""
        several = [group for group in self.groups if len(group.members) > 1]
        right = [Group(g.label, [m for m in g.members if m.rows[0]["exact_match"] == 1]) for g in several]
        made = []
        for title, groups in (
            ("exact match by length, mean over seeds", several),
            ("the same, of the seeds without a wrong answer in the first range", right),
        ):
            rows = [[g.label, str(len(g.members)), *self._cells(g.members)] for g in groups if g.members]
            made.append(Table(title, ["model", "seeds", *self.spans], rows, "[ ]: lowest and highest seed"))
        rows = [[m.about["run"], str(m.about["seed"]), *self._cells([m])] for m in self.answers]
        note = "[ ]: Wilson's 95 % interval over test strings"
        made.append(Table("exact match by length", ["run", "seed", *self.spans], rows, note))
        return [table for table in made if table.rows]

    def _cells(self, seeds: Sequence[Answers]) -> list[str]:
        return [with_interval(row) if (row := over_seeds(seeds, span)) else NOTHING for span in self.spans]

    def text(self) -> str:
        return "\n\n".join(table.text() for table in self.tables)

    def write(self, folder: Path, html: bool = False) -> None:
        """extrapolation.json and extrapolation.png; with html also the SVG and report.html."""
        caption = "Bars: 95 % interval over test strings; of several seeds, the lowest and highest."
        made = {"extrapolation": plots.Plot([self._draw], caption)}
        page = ["<h1>Exact match by length</h1>", figures(made), *(table.html() for table in self.tables)]
        page.append(f"<pre>{escape(chr(10).join(self.commands))}</pre>")
        several = {"commands": list(self.commands), "results": self.results}
        document = self.results[0] if len(self.answers) == 1 else several
        write_files(folder, made, document, page if html else None)

    def _draw(self, axes: Any) -> None:
        """A curve a model over the ranges of lengths, a little beside each other."""
        looks = plots.styles(self.groups)
        for i, group in enumerate(self.groups):
            rows = [(place, over_seeds(group.members, span)) for place, span in enumerate(self.spans)]
            rows = [(place + 0.03 * i, row) for place, row in rows if row and row["exact_match"] is not None]
            values = [row["exact_match"] for _, row in rows]
            bars = [[abs(row[end] - row["exact_match"]) for _, row in rows] for end in ("low", "high")]
            at = [place for place, _ in rows]
            axes.errorbar(at, values, yerr=bars, label=plots.literal(group.label), capsize=3, **looks[group.label])
        axes.set_xticks(range(len(self.spans)), self.spans)
        axes.set(xlabel="length of the input", ylabel="exact match of the answer", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.25)


def log_answers(rows: Sequence[dict], prefix: str, record: Callable[[dict], None], wandb_run: Any) -> None:
    """The curve as a metric with the longest length of each range as its x-axis, and summary values to sort runs by."""
    rows = [row for row in rows if row["exact_match"] is not None]
    for row in rows:
        record({"extrapolation/length": row["to"], f"{prefix}/exact_match": row["exact_match"]})
    wandb_run.summary.update({f"{prefix}/exact_match_{row['range']}": row["exact_match"] for row in rows})
