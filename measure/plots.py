"""Figures a paper could use: one look for all of them. A panel each in the report, side by side in a PNG or SVG file.

Bands are one standard error to both sides; there are none where fewer than ten documents are scored.
"""

import io
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from measure.measurement import Measurement, of_metric
from model.checkpoint import write_file

# A scheme's in every figure; Okabe and Ito 2008, and two more. Any other scheme is olive.
COLOURS = {"rope": "#0072B2", "alibi": "#D55E00", "none": "#000000", "t5": "#009E73", "kerple": "#CC79A7"}
COLOURS |= {"fire": "#E69F00", "sinusoidal": "#56B4E9", "learned": "#8C564B", "shaw": "#7B3FA0"}
MARKERS = "osDv^<>PX*"
LINES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)))  # variants of one scheme, one after the other
GREY = "#777777"
BANDS = "Bands are ± one standard error; there are none where fewer than ten documents are scored."
FAINTEST = 1e-6  # smaller mean attention weights get its colour


@dataclass(frozen=True)
class Plot:
    """panels: functions that draw into given axes; caption: what a reader must know."""

    panels: Sequence[Callable[[Any], None]]
    caption: str
    height: float = 4.0  # of a panel, in inches

    def save(self, path: Path) -> None:
        """All panels, whole or not at all: PNG or SVG, by the ending of the path."""
        write_file(path, lambda to: self._draw(self.panels, to, path.suffix[1:]))

    def svg(self, panel: Callable[[Any], None]) -> bytes:
        """One of the panels alone."""
        self._draw([panel], file := io.BytesIO(), "svg")
        return file.getvalue()

    def _draw(self, panels: Sequence[Callable[[Any], None]], to: Any, form: str) -> None:
        """The same figure gives the same file, without a date and random ids. A notebook's backend is left alone."""
        import matplotlib
        from matplotlib.figure import Figure

        rows, columns = math.ceil(len(panels) / 2), min(2, len(panels))
        figure, shown = Figure(layout="constrained"), {}
        for i, draw in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, i)
            draw(axes)
            shown |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        # The legend stands below the panels, where it hides no curve, in as many columns as fit.
        fitting = max(1, int(5.4 * columns / (0.062 * max(map(len, shown), default=0) + 0.7)))
        look = {"frameon": False, "fontsize": 8.5, "ncols": fitting, "handlelength": 4}
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", **look)
        figure.set_size_inches(5.4 * columns, self.height * rows + 0.2 * math.ceil(len(shown) / fitting))
        with matplotlib.rc_context({"svg.hashsalt": "ropewalk"}):
            figure.savefig(to, dpi=150, format=form, metadata={"Date": None} if form == "svg" else None)


def styles(models: Sequence[tuple[str, dict]]) -> dict[str, dict]:
    """label -> colour, marker and line of a model's curves: a scheme's colour, another line for each variant of it.

    models: label, and a dict with pos. A control (truncated: the model's own context cut short) is dotted.
    """
    looks, variants = {}, Counter()
    for label, about in dict(models).items():
        name = about["pos"]["name"]
        line = {"linestyle": LINES[variants[name] % len(LINES)], "marker": MARKERS[len(looks) % len(MARKERS)]}
        if about.get("truncated"):
            line = {"linestyle": ":", "marker": ""}
        else:
            variants[name] += 1
        looks[label] = {"color": COLOURS.get(name, "#808000"), **line}
    return looks


def literal(label: str) -> str:
    """A label as it stands: no formula, no leading _, which would hide it from the legend, nothing SVG cannot hold."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in label)
    return "\u200b" + textwrap.shorten(shown, 64, placeholder="…").replace("$", r"\$")


def log_axes(axes: Any, ticks: Sequence[int], models: Sequence[Measurement], **words: str) -> None:
    """Tokens to base 2, with a line at each training length; the legend says what it is."""
    from matplotlib import ticker

    lengths = sorted({model.about["train_length"] for model in models})
    for length in lengths:
        label = f"training length {', '.join(map(str, lengths))}"
        axes.axvline(length, color=GREY, linestyle="--", linewidth=1, zorder=0, label=label)
    if axes.collections:  # bands
        axes.fill_between([], [], color=GREY, alpha=0.3, linewidth=0, label="± one standard error")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.25)
    axes.set(**words)


def curve(axes: Any, points: Sequence[tuple], label: str, ended: str | None, style: dict) -> None:
    """points: x, value, its error or None. A cross marks where a curve ends with its table."""
    xs, ys, errors = zip(*points, strict=True) if points else [()] * 3
    axes.plot(xs, ys, label=literal(f"{label} ({ended})" if ended else label), markersize=5, **style)
    if points and None not in errors:
        axes.fill_between(
            xs, np.subtract(ys, errors), np.add(ys, errors), color=style["color"], alpha=0.15, linewidth=0
        )
    if ended and points:
        axes.plot(xs[-1], ys[-1], marker="x", markersize=14, markeredgewidth=2.5, color=style["color"])


def _ended(rows: Sequence[dict]) -> str | None:
    return next((row["note"] for row in rows if "note" in row), None)


def plot_lengths(protocols: dict[str, list[Measurement]], metric: str, looks: dict[str, dict]) -> Plot:
    """A panel a protocol, a curve a model: perplexity or bits per byte over the length."""
    from matplotlib import ticker

    def panel(axes: Any, protocol: str, models: list[Measurement]) -> None:
        values = []
        for model in models:
            label, rows = model.label, model.rows
            points = [(row["length"], *of_metric(row, metric)) for row in rows if 0 < (row[metric] or 0) < math.inf]
            values += [value for _, value, _ in points]
            if model.about.get("truncated"):  # its error is that of the model itself
                label, points = "dotted: context cut", [(x, y, None) for x, y, _ in points]
            curve(axes, points, label, _ended(rows), looks[model.label])
        words = {"xlabel": "tokens of context evaluated", "ylabel": f"validation {metric.replace('_', ' ')}"}
        log_axes(axes, models[0].lengths, models, title=f"{protocol} windows", **words)
        axes.set_xlim(models[0].lengths[0] / 1.25, models[0].lengths[-1] * 1.1)
        if values and max(values) > 3 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))

    return Plot([partial(panel, protocol=name, models=models) for name, models in protocols.items()], BANDS)


def plot_positions(models: Sequence[Measurement], looks: dict[str, dict]) -> Plot:
    """A curve a model: mean loss over the position in the longest window, a panel for each longest window.

    Models whose table is shorter are measured in other windows, so their losses cannot be compared with the others'.
    """

    def panel(axes: Any, length: int) -> None:
        same = [model for model in models if model.bins[-1][1] == length]
        for model in same:  # x in tokens of context: positions + 1
            points = [((row["from"] + row["to"] + 1) / 2, row["nll"], row["stderr"]) for row in model.by_position]
            curve(axes, points, model.label, None, looks[model.label])
        words = {"xlabel": "tokens of context before the predicted one", "ylabel": "validation loss, nats a token"}
        ticks = [2**k for k in range(length.bit_length())]
        log_axes(axes, ticks, same, title=f"loss by position in windows of {length}", **words)

    lengths = sorted({model.bins[-1][1] for model in models}, reverse=True)
    return Plot([partial(panel, length=length) for length in lengths], BANDS)


def plot_recall(models: Sequence[Measurement], looks: dict[str, dict]) -> Plot:
    """A curve a model over the distance: what the first copy of a random string gains (measure.probes.recall)."""

    def panel(axes: Any) -> None:
        for model in models:
            rows = model.probes["recall"]
            points = [(row["distance"], row["gain"], row["gain_stderr"]) for row in rows if row["gain"] is not None]
            curve(axes, points, model.label, _ended(rows), looks[model.label])
        ticks = sorted({row["distance"] for model in models for row in model.probes["recall"]})
        words = {"xlabel": "tokens from copy to copy", "ylabel": "nats a token"}
        log_axes(axes, ticks, models, title="recall: what the first copy of a random string gains", **words)

    return Plot([panel], "Bands are ± one standard error, over trials or seeds.")


def plot_attention(models: Sequence[Measurement]) -> Plot:
    """A heat map a model: a row a head, a column a bin of distances, as colour the logarithm of the mean weight."""
    from matplotlib.colors import LogNorm

    every = [np.array(model.probes["attention"]["weights"]) for model in models]  # (n_layer, n_head, bins) each
    heads = max(weights.shape[0] * weights.shape[1] for weights in every)
    lowest = max(FAINTEST, min(weights.min() for weights in every))
    norm = LogNorm(lowest, max(weights.max() for weights in every), clip=True)

    def panel(axes: Any, model: Measurement, weights: np.ndarray) -> None:
        names = [str(low) for low, _ in pairwise(model.probes["attention"]["edges"])]
        shown = axes.imshow(weights.reshape(-1, weights.shape[2]), norm=norm, aspect="auto", interpolation="nearest")
        axes.figure.colorbar(shown, ax=axes, label="mean attention weight")
        axes.set_xticks(range(len(names)), names, rotation=60)
        axes.set(xlabel="tokens back from the query, at least", ylabel="head, layer by layer")
        axes.set_title(f"{literal(model.label)}: attention by distance")

    panels = [partial(panel, model=model, weights=weights) for model, weights in zip(models, every, strict=True)]
    return Plot(
        panels, "Mean attention weight by distance; all models have one scale.", 2.6 + 0.2 * min(max(heads, 8), 60)
    )
