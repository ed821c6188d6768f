"""Figures a paper could use: one look for all of them. PNG or SVG, by the ending of the path.

Bars and bands are one standard error to both sides; there are none where fewer than ten documents are scored.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from measure.groups import Group, of_metric
from model.checkpoint import write_file

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
MARKERS = "osDv^<>P*"  # more than colours: no two of the first 63 curves look the same
FAINTEST = 1e-6  # a mean attention weight below it gets its colour


def styles() -> Iterable[dict]:
    """Colour and marker of one curve after the other."""
    return ({"color": colour, "marker": marker} for colour, marker in zip(cycle(COLOURS), cycle(MARKERS), strict=False))


def literal(label: str) -> str:
    """A label as it stands: no formula, no leading _, which would hide it from the legend, nothing SVG cannot hold."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in label)
    return "\u200b" + textwrap.shorten(shown, 64, placeholder="…").replace("$", r"\$")


def save(figure: Any, path: Path) -> None:
    """Whole, or not at all; the same figure gives the same file, without a date and random ids."""
    import matplotlib

    undated = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "ropewalk"}):
        write_file(path, lambda to: figure.savefig(to, dpi=150, format=path.suffix[1:], metadata=undated))


def new_figure(panels: int) -> tuple[Any, list]:
    """A figure of panels side by side; not pyplot's, so that a notebook's backend is left alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * panels + 2.4, 4.4), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def log_axes(axes: Any, ticks: Sequence[int], train_lengths: Iterable[int], text_at: str = "top") -> None:
    """Tokens to base 2, with a line at each training length."""
    from matplotlib import ticker

    for train_length in sorted(set(train_lengths)):
        axes.axvline(train_length, color="#777777", linestyle="--", linewidth=1, zorder=0)
        place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": text_at}
        height = 0.99 if text_at == "top" else 0.01
        axes.text(train_length, height, f"training length {train_length}", color="#555555", fontsize=8, **place)
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


def legend(figure: Any, panels: Sequence[Any]) -> None:
    """Beside the panels, where it hides no curve."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    words = {"title": "bars, bands: ± standard error", "title_fontsize": 8}
    figure.legend(found.values(), found.keys(), frameon=False, loc="outside right upper", **words)


def curve(axes: Any, points: Sequence[tuple], label: str, ended: str | None, style: dict) -> None:
    """points: x, value, its error or None. A cross marks where a curve ends with its table."""
    xs, ys, errors = zip(*points, strict=True) if points else [()] * 3
    axes.plot(xs, ys, label=literal(f"{label} ({ended})" if ended else label), markersize=5, **style)
    if points and None not in errors:
        low, high = ([y + sign * error for y, error in zip(ys, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if ended and points:
        axes.plot(xs[-1], ys[-1], marker="x", markersize=14, markeredgewidth=2.5, color=style["color"])


def plot_lengths(protocols: dict[str, list[Group]], metric: str, path: Path) -> None:
    """A panel a protocol, a curve a model: perplexity or bits per byte over the length."""
    figure, panels = new_figure(len(protocols))
    for axes, (protocol, groups) in zip(panels, protocols.items(), strict=True):
        values = []
        for group, style in zip(groups, styles(), strict=False):
            rows = [group.row(length) for length in group.lengths]
            ended = next((row["note"] for row in rows if row["nll"] is None), None)
            points = [(row["length"], *of_metric(row, metric)) for row in rows if 0 < (row[metric] or 0) < math.inf]
            if group.first.get("truncated"):  # a control: its error is that of the model itself
                points, style = [(x, y, None) for x, y, _ in points], style | {"linestyle": ":"}
            curve(axes, points, group.label, ended, style)
            values += [point[1] for point in points]
        ticks = sorted({length for group in groups for length in group.lengths})
        log_axes(axes, ticks, (group.first["train_length"] for group in groups))
        log_values(axes, values)
        axes.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.1)
        axes.set(xlabel="tokens of context evaluated", ylabel=f"validation {metric.replace('_', ' ')}")
        axes.set_title(f"{protocol} windows", fontsize=11)
    legend(figure, panels)
    save(figure, path)


def plot_positions(groups: list[Group], path: Path) -> None:
    """A curve a model: mean loss over the position in the longest window, a panel for each longest window.

    Models whose table is shorter are measured in other windows, so their losses cannot be compared with the others'.
    """
    windows: dict[int, list[tuple[Group, dict]]] = {}
    for group, style in zip(groups, styles(), strict=False):
        windows.setdefault(group.by_position()[-1]["to"], []).append((group, style))
    figure, panels = new_figure(len(windows))
    for axes, (length, some) in zip(panels, sorted(windows.items(), reverse=True), strict=True):
        for group, style in some:
            rows = group.by_position()  # x in tokens of context: positions + 1
            points = [((r["from"] + r["to"] + 1) / 2, r["nll"], r["error"]) for r in rows]
            curve(axes, points, group.label, None, style)
        ticks = [2**k for k in range(length.bit_length()) if 2**k <= length]
        log_axes(axes, ticks, (group.first["train_length"] for group, _ in some))
        axes.set(xlabel="tokens of context before the predicted one", ylabel="validation loss, nats a token")
        axes.set_title(f"loss by position in windows of {length}", fontsize=11)
    legend(figure, panels)
    save(figure, path)


def plot_recall(results: list[dict], path: Path) -> None:
    """A curve a model over distance: the loss on the second copy, dotted the control's, and what the first copy gains.

    results: dicts with run (its label), train_length and recall (what probes.recall returned).
    """
    figure, (left, right) = new_figure(2)
    for result, style in zip(results, styles(), strict=False):
        rows = [row for row in result["recall"] if row["nll"] is not None]
        ended = next((row["note"] for row in result["recall"] if row["nll"] is None), None)
        for axes, value, error in ((left, "nll", "stderr"), (right, "gain", "gain_stderr")):
            curve(axes, [(row["distance"], row[value], row[error]) for row in rows], result["run"], ended, style)
        dotted = {"color": style["color"], "linestyle": ":", "linewidth": 1}
        left.plot([row["distance"] for row in rows], [row["control_nll"] for row in rows], **dotted)
    ticks = sorted({row["distance"] for result in results for row in result["recall"]})
    for axes, text_at in ((left, "bottom"), (right, "top")):  # where the curves are not
        log_axes(axes, ticks, (result["train_length"] for result in results), text_at)
        axes.set_xlabel("tokens from copy to copy")
    left.set(ylabel="nats a token")
    left.set_title("loss on the second copy of a random string\n(dotted: with another first copy)", fontsize=11)
    right.set_title("what the first copy gains: control − loss", fontsize=11)
    right.axhline(0, color="#777777", linewidth=1, zorder=0)
    legend(figure, [left, right])
    save(figure, path)


def plot_attention(result: dict, path: Path) -> None:
    """A heat map: a row a head, a column a bin of distances, the mean attention weight as colour (log scale).

    result: a dict with run (its label), train_length and attention (what probes.attention_by_distance returned).
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    edges, weights = result["attention"]["edges"], np.array(result["attention"]["weights"])  # (n_layer, n_head, bins)
    n_layer, n_head, bins = weights.shape
    heads = n_layer * n_head
    figure = Figure(figsize=(2.5 + 0.34 * max(bins, 14), 1.6 + 0.2 * min(max(heads, 8), 60)), layout="constrained")
    axes, lowest = figure.subplots(), max(FAINTEST, weights.min())
    shown, grid = np.maximum(weights.reshape(heads, bins), lowest), (np.arange(bins + 1), np.arange(heads + 1))
    norm = LogNorm(lowest, weights.max())
    mesh = axes.pcolormesh(*grid, shown, norm=norm, cmap="viridis", rasterized=True)
    figure.colorbar(mesh, ax=axes, label=f"mean attention weight\n(darkest: {lowest:.1g} and less)")
    axes.invert_yaxis()
    axes.hlines(np.arange(n_head, heads, n_head), 0, bins, color="white", linewidth=1)
    names = [str(low) if high == low + 1 else f"{low}–{high - 1}" for low, high in pairwise(edges)]
    axes.set_xticks(np.arange(bins) + 0.5, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
    each = 1 if heads <= 60 else n_head  # a label a head, or at a layer's first
    rows = np.arange(0, heads, each)
    axes.set_yticks(rows + 0.5, [f"{row // n_head}.{row % n_head}" for row in rows], fontsize=8)
    axes.set(xlabel="tokens back from the query", ylabel="layer.head")
    title = f"{literal(result['run'])}\nattention by distance in windows of {result['attention']['length']}"
    if result["train_length"] < edges[-1]:
        at = np.interp(result["train_length"], edges, np.arange(bins + 1))
        axes.axvline(at, color="#D55E00", linestyle="--", linewidth=2)
        title += f" (dashed: training length {result['train_length']})"
    axes.set_title(title, fontsize=11)
    save(figure, path)
