"""Tasks with a right answer (data/tasks.py): exact match by length of the input, its table, plot and report.

An answer is right where the likeliest id is the right one at each of its places, given the right ones before it: the
same as whether greedy decoding gives the answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from measure import plots
from measure.report import Pages, by_model
from measure.tables import NOTHING, Table
from model import GPT
from model.sampling import evaluating

BATCH = 100  # strings passed at once


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    z, share = 1.959964, right / n
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


@torch.no_grad()  # not inference_mode: see measure.windows.score
def evaluate_task(model: GPT, task: Any) -> list[dict]:
    """A row per range of lengths: range, from, to, exact_match, low, high (its interval), strings.

    task: a data.Task. Where a learned table ends before a range's strings, exact_match is None, with a note.
    """
    rows, limit = [], model.pos.max_length
    for first, last in task.test:
        row, right, n = {"range": f"{first}-{last}", "from": first, "to": last}, 0, 0
        rows.append(row)
        if limit is not None and task.kind.size(last) - 1 > limit:
            row |= {"exact_match": None, "low": None, "high": None, "note": f"table ends at {limit}"}
            continue
        with evaluating(model):
            for batch in task.test_batches((first, last), BATCH):
                inputs, targets = (torch.from_numpy(part).to(model.embedding.weight.device) for part in batch)
                logits = model(inputs, scaling_length=task.kind.size(last) - 1)  # not that of the batch
                wrong = (logits.argmax(dim=-1) != targets) & (targets != -100)
                right, n = right + int((~wrong.any(dim=1)).sum()), n + len(inputs)
        low, high = wilson(right, n)
        row |= {"exact_match": right / n, "low": low, "high": high, "strings": n}
    return rows


def match_with_interval(row: dict | None) -> str:
    """`0.9985 [0.9956, 0.9995]`, or where a table ends."""
    if row is None or row["exact_match"] is None:
        return NOTHING if row is None else row["note"]
    value, low, high = (f"{row[key]:.4f}".rstrip("0").rstrip(".") for key in ("exact_match", "low", "high"))
    return f"{value} [{low}, {high}]"


def measure_task(model: GPT, task: Any, about: dict) -> dict:
    """What a run answers: task, pos, rows; and about: run, folder, checkpoint, seed, key (equal for seeds of one)."""
    known = {"protocol": "exact match", "key": "", "task": task.name, "pos": model.config.pos}
    return known | about | {"rows": evaluate_task(model, task)}


def over_seeds(seeds: Sequence[dict], span: str) -> dict | None:
    """The row of a range; of several seeds their mean, and as low and high the lowest and the highest of them."""
    rows = [row for one in seeds for row in one["rows"] if row["range"] == span]
    values = [row["exact_match"] for row in rows]
    if len(rows) < 2 or None in values:
        return rows[0] if rows else None
    return rows[0] | {"exact_match": math.fsum(values) / len(values), "low": min(values), "high": max(values)}


@dataclass
class AnswerReport(Pages):
    """Results of measure_task side by side, with the interface of measure.Report."""

    results: Sequence[dict]
    commands: Sequence[str] = ()

    def __post_init__(self):
        self.models = by_model(self.results, lambda one: one)
        rows = sorted((row for one in self.results for row in one["rows"]), key=lambda row: row["to"])
        self.spans = list(dict.fromkeys(row["range"] for row in rows))

    @property
    def tables(self) -> list[Table]:
        """Models of several seeds, and those of their seeds without a wrong answer in the first range, which is what
        papers average over; then run by run."""
        lines = []
        for label, seeds in self.models:
            right = [one for one in seeds if one["rows"][0]["exact_match"] == 1]
            first = seeds[0]["rows"][0]["range"]
            lines += [(label, seeds), (f"{label}, seeds right in {first}", right)] if len(seeds) > 1 else []
        lines += [(one["run"] if len(seeds) > 1 else label, [one]) for label, seeds in self.models for one in seeds]
        cells = [[match_with_interval(over_seeds(of, span)) for span in self.spans] for _, of in lines]
        rows = [[name, str(len(of)), *line] for (name, of), line in zip(lines, cells, strict=True) if of]
        note = "[ ]: Wilson's 95 % interval over test strings; of several seeds, lowest and highest seed"
        return [Table("exact match by length", ["model", "seeds", *self.spans], rows, note)]

    def document(self) -> dict:
        results = [{key: value for key, value in one.items() if key != "key"} for one in self.results]
        return results[0] if len(results) == 1 else {"commands": [*self.commands], "results": results}

    def figures(self, html: bool) -> dict[str, plots.Plot]:
        caption = "Bars: 95 % interval over test strings; of several seeds, the lowest and highest."
        return {"extrapolation": plots.Plot([self._draw], caption)}

    def head(self) -> list[str]:
        return ["<h1>Exact match by length</h1>"]

    def _draw(self, axes: Any) -> None:
        looks = plots.styles([(label, seeds[0]) for label, seeds in self.models])
        for label, seeds in self.models:
            rows = [over_seeds(seeds, span) or {} for span in self.spans]
            middle, *ends = (np.array([row.get(key) for row in rows], float) for key in ("exact_match", "low", "high"))
            look = {"label": plots.literal(label), "capsize": 3, **looks[label]}
            axes.errorbar(self.spans, middle, [abs(middle - end) for end in ends], **look)
        axes.set(xlabel="length of the input", ylabel="exact match of the answer", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.25)
