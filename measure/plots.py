"""Figures a paper could use: one look for all of them. PNG or SVG, by the ending of the path."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from measure.results import Group
from measure.statistics import mean_and_spread
from model.checkpoint import write_file

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
MARKERS = "osDv^<>P*"  # more than colours: no two of the first 63 curves look the same


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


def new_figure(panels: int, beside: bool) -> tuple[Any, list]:
    """A figure of panels side by side; not pyplot's, so that a notebook's backend is left alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * panels + (2.4 if beside else 0.4), 4.4), layout="constrained")
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


def legend(figure: Any, axes: Any, beside: bool, more: Sequence[tuple[Any, str]] = ()) -> None:
    """Beside the panels, where it hides no curve, or in one of them. more: handles and labels that no curve has."""
    handles, labels = axes.get_legend_handles_labels()
    handles, labels = [*handles, *(handle for handle, _ in more)], [*labels, *(label for _, label in more)]
    if beside:
        figure.legend(handles, labels, frameon=False, loc="outside right upper")
    else:
        axes.legend(handles, labels, frameon=False)


def cross(axes: Any, x: float, y: float, style: dict) -> None:
    """Where a curve ends with its table."""
    axes.plot(x, y, marker="x", markersize=14, markeredgewidth=2.5, color=style["color"])


def band(axes: Any, xs: Sequence, ys: Sequence[float], errors: Sequence[float], style: dict) -> None:
    low, high = ([y + sign * error for y, error in zip(ys, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=style["color"], alpha=0.2, linewidth=0)


def plot_lengths(protocols: dict[str, list[Group]], metric: str, path: Path) -> None:
    """A panel a protocol, a curve a model: perplexity or bits per byte over the length.

    Several seeds: their mean, with a band of one standard deviation; one: error bars of one standard error. A curve
    that ends with a table ends in a cross.
    """
    beside = max(map(len, protocols.values())) > 3
    figure, panels = new_figure(len(protocols), beside)
    for axes, (protocol, groups) in zip(panels, protocols.items(), strict=True):
        values = []
        for group, style in zip(groups, styles(), strict=False):
            rows = [group.row(row["length"]) for row in group.first["rows"]]
            there = [row for row in rows if row[metric] is not None and 0 < row[metric] < float("inf")]
            lengths, ys = [row["length"] for row in there], [row[metric] for row in there]
            errors = [row[f"{metric}_error"] or 0 for row in there]
            ended = next((row["note"] for row in rows if row["nll"] is None), None)
            label = literal(f"{group.label} ({ended})" if ended else group.label)
            if len(group.members) > 1:
                axes.plot(lengths, ys, label=label, **style)
                band(axes, lengths, ys, errors, style)
            else:
                axes.errorbar(lengths, ys, yerr=errors, capsize=3, label=label, **style)
            if ended and there:
                cross(axes, lengths[-1], ys[-1], style)
            values += ys
        ticks = sorted({row["length"] for group in groups for row in group.first["rows"]})
        log_axes(axes, ticks, (group.first["train_length"] for group in groups))
        log_values(axes, values)
        axes.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.1)
        axes.set(xlabel="tokens of context evaluated", ylabel=f"validation {metric.replace('_', ' ')}")
        axes.set_title(f"{protocol} windows", fontsize=11)
    legend(figure, panels[0], beside)
    save(figure, path)


def plot_positions(groups: list[Group], path: Path) -> None:
    """A curve a model: mean loss over the position in the longest window; over seeds, their mean and a band."""
    beside = len(groups) > 3
    figure, (axes,) = new_figure(1, beside)
    for group, style in zip(groups, styles(), strict=False):
        curves = [[row["nll"] for row in member.result["by_position"]] for member in group.members]
        bins = group.first["by_position"]
        xs = [(row["from"] + row["to"] + 1) / 2 for row in bins]  # in tokens of context: positions + 1
        ys, errors = zip(*map(mean_and_spread, zip(*curves, strict=True)), strict=True)
        axes.plot(xs, ys, label=literal(group.label), markersize=4, **style)
        if len(curves) > 1:
            band(axes, xs, ys, errors, style)
    ticks = [2**k for k in range(int(max(xs)).bit_length() + 1) if 2**k <= max(row["to"] for row in bins)]
    log_axes(axes, ticks, (group.first["train_length"] for group in groups))
    axes.set(xlabel="tokens of context before the predicted one", ylabel="validation loss, nats a token")
    axes.set_title("loss by position in the longest window", fontsize=11)
    legend(figure, axes, beside)
    save(figure, path)
