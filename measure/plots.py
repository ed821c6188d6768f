"""Figures a paper could use: one look for all of them. A panel each in the report, side by side in a PNG or SVG file.

Bands are one standard error to both sides; there are none where fewer than ten documents are scored.
"""

import io
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from measure.groups import Group, of_metric
from model.checkpoint import write_file

# A scheme's in every figure; Okabe and Ito 2008, and two more. Any other scheme is olive.
COLOURS = {"rope": "#0072B2", "alibi": "#D55E00", "none": "#000000", "t5": "#009E73", "kerple": "#CC79A7"}
COLOURS |= {"fire": "#E69F00", "sinusoidal": "#56B4E9", "learned": "#8C564B", "shaw": "#7B3FA0"}
MARKERS = "osDv^<>PX*"
LINES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)))  # variants of one scheme, one after the other
GREY = "#777777"
BANDS = "Bands are ± one standard error; there are none where fewer than ten documents are scored."
FAINTEST = 1e-6  # a mean attention weight below it gets its colour


@dataclass(frozen=True)
class Plot:
    """panels: functions that draw into given axes; size: of a panel, in inches; caption: what a reader must know."""

    panels: Sequence[Callable[[Any], None]]
    caption: str
    size: tuple[float, float] = (5.4, 4.0)

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
        width, height = self.size[0] * columns, self.size[1] * rows
        figure, found = Figure(layout="constrained"), {}
        for i, draw in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, i)
            draw(axes)
            found |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        # The legend stands below the panels, where it hides no curve, in as many columns as fit.
        fitting = max(1, int(width / (0.062 * max(map(len, found), default=0) + 0.7)))
        look = {"frameon": False, "fontsize": 8.5, "ncols": fitting, "handlelength": 4}
        figure.legend(found.values(), found.keys(), loc="outside lower center", **look)
        figure.set_size_inches(width, height + 0.2 * math.ceil(len(found) / fitting))
        with matplotlib.rc_context({"svg.hashsalt": "ropewalk"}):
            figure.savefig(to, dpi=150, format=form, metadata={"Date": None} if form == "svg" else None)


def styles(groups: Iterable[Group]) -> dict[str, dict]:
    """label -> colour, marker and line of a model's curves: a scheme's colour, another line for each variant of it.

    A control (the model's own context cut short) is dotted.
    """
    found, variants = {}, Counter()
    for label, about in {group.label: group.first for group in groups}.items():
        name, cut = about["pos"]["name"], about.get("truncated")
        line = {"linestyle": ":" if cut else LINES[variants[name] % len(LINES)]}
        line["marker"] = "" if cut else MARKERS[len(found) % len(MARKERS)]
        found[label] = {"color": COLOURS.get(name, "#808000"), **line}
        variants[name] += not cut
    return found


def literal(label: str) -> str:
    """A label as it stands: no formula, no leading _, which would hide it from the legend, nothing SVG cannot hold."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in label)
    return "\u200b" + textwrap.shorten(shown, 64, placeholder="…").replace("$", r"\$")


def log_axes(axes: Any, ticks: Sequence[int], train_lengths: Iterable[int]) -> None:
    """Tokens to base 2, with a line at each training length; the legend says what it is."""
    from matplotlib import ticker

    words = f"training length {', '.join(map(str, lengths := sorted(set(train_lengths))))}"
    for train_length in lengths:
        axes.axvline(train_length, color=GREY, linestyle="--", linewidth=1, zorder=0, label=words)
    if axes.collections:  # bands
        axes.fill_between([], [], color=GREY, alpha=0.3, linewidth=0, label="± one standard error")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.25)


def log_values(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic y-axis with plain numbers, where values differ by much."""
    from matplotlib import ticker

    if values and max(values) > 3 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))


def curve(axes: Any, points: Sequence[tuple], label: str, ended: str | None, style: dict) -> None:
    """points: x, value, its error or None. A cross marks where a curve ends with its table."""
    xs, ys, errors = zip(*points, strict=True) if points else [()] * 3
    axes.plot(xs, ys, label=literal(f"{label} ({ended})" if ended else label), markersize=5, **style)
    if points and None not in errors:
        low, high = ([y + sign * error for y, error in zip(ys, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if ended and points:
        axes.plot(xs[-1], ys[-1], marker="x", markersize=14, markeredgewidth=2.5, color=style["color"])


def plot_lengths(protocols: dict[str, list[Group]], metric: str, looks: dict[str, dict]) -> Plot:
    """A panel a protocol, a curve a model: perplexity or bits per byte over the length."""

    def panel(axes: Any, protocol: str, groups: list[Group]) -> None:
        values = []
        for group in groups:
            rows = [group.row(length) for length in group.lengths]
            points = [(row["length"], *of_metric(row, metric)) for row in rows if 0 < (row[metric] or 0) < math.inf]
            values += [point[1] for point in points]
            label, ended = group.label, next((row["note"] for row in rows if row["nll"] is None), None)
            if group.first.get("truncated"):  # its error is that of the model itself
                label, points = "dotted: context cut", [(x, y, None) for x, y, _ in points]
            curve(axes, points, label, ended, looks[group.label])
        ticks = sorted({length for group in groups for length in group.lengths})
        log_axes(axes, ticks, (group.first["train_length"] for group in groups))
        log_values(axes, values)
        axes.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.1)
        axes.set(xlabel="tokens of context evaluated", ylabel=f"validation {metric.replace('_', ' ')}")
        axes.set_title(f"{protocol} windows", fontsize=11)

    return Plot([partial(panel, protocol=name, groups=groups) for name, groups in protocols.items()], BANDS)


def plot_positions(groups: list[Group], looks: dict[str, dict]) -> Plot:
    """A curve a model: mean loss over the position in the longest window, a panel for each longest window.

    Models whose table is shorter are measured in other windows, so their losses cannot be compared with the others'.
    """
    windows: dict[int, list[Group]] = {}
    for group in groups:
        windows.setdefault(group.by_position()[-1]["to"], []).append(group)

    def panel(axes: Any, length: int) -> None:
        for group in windows[length]:
            rows = group.by_position()  # x in tokens of context: positions + 1
            points = [((r["from"] + r["to"] + 1) / 2, r["nll"], r["error"]) for r in rows]
            curve(axes, points, group.label, None, looks[group.label])
        ticks = [2**k for k in range(length.bit_length()) if 2**k <= length]
        log_axes(axes, ticks, (group.first["train_length"] for group in windows[length]))
        axes.set(xlabel="tokens of context before the predicted one", ylabel="validation loss, nats a token")
        axes.set_title(f"loss by position in windows of {length}", fontsize=11)

    return Plot([partial(panel, length=length) for length in sorted(windows, reverse=True)], BANDS)


def plot_recall(results: list[dict], looks: dict[str, dict]) -> Plot:
    """A curve a model over distance: the loss on the second copy, dotted the control's, and what the first copy gains.

    results: dicts with run (its label), train_length and recall (what probes.recall returned).
    """
    ticks = sorted({row["distance"] for result in results for row in result["recall"]})

    def panel(axes: Any, value: str, error: str, title: str) -> None:
        for result in results:
            rows, style = [row for row in result["recall"] if row["nll"] is not None], looks[result["run"]]
            ended = next((row["note"] for row in result["recall"] if row["nll"] is None), None)
            points = [(row["distance"], row[value], row[error]) for row in rows]
            curve(axes, points, result["run"], ended, style)
            control = [row["control_nll"] if value == "nll" else 0 for row in rows]
            dotted = {"color": style["color"], "linestyle": ":", "linewidth": 1}
            dotted |= {"label": "dotted: control"} if result is results[-1] else {}  # once, below the models
            axes.plot([row["distance"] for row in rows], control, **dotted)
        log_axes(axes, ticks, (result["train_length"] for result in results))
        axes.set(xlabel="tokens from copy to copy", ylabel="nats a token")
        axes.set_title(title, fontsize=11)

    loss = partial(panel, value="nll", error="stderr", title="loss on the second copy of a random string")
    gain = partial(panel, value="gain", error="gain_stderr", title="what the first copy gains: control − loss")
    return Plot([loss, gain], "Bands are ± one standard error, over trials or seeds.")


def plot_attention(results: list[dict]) -> Plot:
    """A heat map a model: a row a head, a column a bin of distances, the mean attention weight as colour (log scale).

    results: dicts with run (a label), train_length and attention (what probes.attention_by_distance returned).
    """
    from matplotlib.colors import LogNorm

    every = [np.array(result["attention"]["weights"]) for result in results]  # (n_layer, n_head, bins) each
    lowest = max(FAINTEST, min(weights.min() for weights in every))
    norm = LogNorm(lowest, max(weights.max() for weights in every))

    def panel(axes: Any, result: dict, weights: np.ndarray) -> None:
        edges, (n_layer, n_head, bins) = result["attention"]["edges"], weights.shape
        heads = n_layer * n_head
        shown, grid = np.maximum(weights.reshape(heads, bins), lowest), (np.arange(bins + 1), np.arange(heads + 1))
        mesh = axes.pcolormesh(*grid, shown, norm=norm, cmap="viridis", rasterized=True)
        axes.figure.colorbar(mesh, ax=axes, label=f"mean attention weight\n(darkest: {lowest:.1g} and less)")
        axes.invert_yaxis()
        axes.hlines(np.arange(n_head, heads, n_head), 0, bins, color="white", linewidth=1)
        names = [str(low) if high == low + 1 else f"{low}–{high - 1}" for low, high in pairwise(edges)]
        axes.set_xticks(np.arange(bins) + 0.5, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
        rows = np.arange(0, heads, 1 if heads <= 60 else n_head)  # a label a head, or at a layer's first
        axes.set_yticks(rows + 0.5, [f"{row // n_head}.{row % n_head}" for row in rows], fontsize=8)
        axes.set(xlabel="tokens back from the query", ylabel="layer.head")
        axes.set_title(f"{literal(result['run'])}: attention by distance", fontsize=11)
        if result["train_length"] < edges[-1]:
            at = np.interp(result["train_length"], edges, np.arange(bins + 1))
            words = f"training length {result['train_length']}"
            axes.axvline(at, color="#D55E00", linestyle="--", linewidth=2, label=words)

    panels = [partial(panel, result=result, weights=weights) for result, weights in zip(results, every, strict=True)]
    heads = max(weights.shape[0] * weights.shape[1] for weights in every)
    caption = "Mean attention weight by distance; all models have one scale."
    return Plot(panels, caption, (5.4, 2.6 + 0.2 * min(max(heads, 8), 60)))
