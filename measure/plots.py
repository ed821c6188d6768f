"""Figures a paper could use: a panel each in the report, side by side in a PNG or SVG file."""

import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from measure.measurement import Measurement, of_metric
from model.checkpoint import write_file

# A scheme's in every figure; Okabe and Ito 2008, and two more. Any other scheme is olive.
COLOURS = {"rope": "#0072B2", "alibi": "#D55E00", "none": "#000000", "t5": "#009E73", "kerple": "#CC79A7"}
COLOURS |= {"fire": "#E69F00", "sinusoidal": "#56B4E9", "learned": "#8C564B", "shaw": "#7B3FA0"}
LINES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)))  # variants of one scheme, one after the other
MARKERS = "osDv^<>PX*"
GREY = "#777777"
BANDS = "Bands are ± one standard error; there are none where fewer than ten documents are scored."
FAINTEST = 1e-6  # smaller mean attention weights get its colour


@dataclass(frozen=True)
class Plot:
    """panels: functions that draw into given axes; caption: what a reader must know."""

    panels: Sequence[Callable[[Any], None]]
    caption: str

    def save(self, path: Path) -> None:
        """Whole or not at all: PNG or SVG, by the ending of the path."""
        write_file(path, lambda to: to.write_bytes(self.draw(path.suffix[1:])))

    def draw(self, form: str) -> bytes:
        """The same figure gives the same bytes, without a date and random ids. A notebook's backend is left alone."""
        import matplotlib
        from matplotlib.figure import Figure

        rows, columns = math.ceil(len(self.panels) / 2), min(2, len(self.panels))
        figure, shown, file = Figure(layout="constrained"), {}, io.BytesIO()
        for i, draw in enumerate(self.panels, 1):
            axes = figure.add_subplot(rows, columns, i)
            draw(axes)
            shown |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        # The legend stands below the panels, where it hides no curve, in as many columns as fit.
        fitting = max(1, int(5.4 * columns / (0.062 * max(map(len, shown), default=0) + 0.7)))
        look = {"frameon": False, "fontsize": 8.5, "ncols": fitting, "handlelength": 4}
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", **look)
        figure.set_size_inches(5.4 * columns, 4.0 * rows + 0.2 * math.ceil(len(shown) / fitting))
        with matplotlib.rc_context({"svg.hashsalt": "ropewalk"}):
            figure.savefig(file, dpi=150, format=form, metadata={"Date": None} if form == "svg" else None)
        return file.getvalue()


def styles(models: Sequence[tuple[str, dict]]) -> dict[str, dict]:
    """label -> colour, line and marker of a model: a scheme's colour, another line and marker for each variant of it.

    models: label, and a dict with pos. A control (truncated: the model's own context cut short) is dotted.
    """
    looks, variants = {}, Counter()
    for label, about in dict(models).items():
        name = about["pos"]["name"]
        number = variants[name]
        line = (":", "") if about.get("truncated") else (LINES[number % len(LINES)], MARKERS[number % len(MARKERS)])
        looks[label] = {"color": COLOURS.get(name, "#808000"), "linestyle": line[0], "marker": line[1]}
        variants[name] += line[1] != ""
    return looks


def literal(label: str) -> str:
    """A label as it stands: no formula, no leading _, which would hide it from the legend."""
    return "\u200b" + (label if len(label) <= 64 else f"{label[:31]}…{label[-32:]}").replace("$", r"\$")


def draw_curves(
    axes: Any, models: Sequence[Measurement], points: dict[str, list[tuple]], looks: dict, ticks: Sequence[int], **words
) -> None:
    """A curve per model over tokens (log₂) with its band, a line at each training length, a cross where a table ends.

    points: of each label x, value (None past a table) and standard error or None. words: title and labels.
    """
    for model in models:
        look, label = looks[model.label], model.label
        shown = [at for at in points[label] if at[1] is not None and math.isfinite(at[1])]
        xs, ys, errors = zip(*shown, strict=True) if shown else [()] * 3
        ended = any(value is None for _, value, _ in points[label])
        label = "dotted: context cut" if model.about.get("truncated") else label
        label += f" (table ends at {model.limit})" if ended else ""
        axes.plot(xs, ys, label=literal(label), markersize=5, **look)
        if shown and ended:
            axes.plot(xs[-1], ys[-1], marker="x", markersize=14, markeredgewidth=2.5, color=look["color"])
        if shown and None not in errors and look["marker"]:  # the errors of a control are those of the model itself
            low, high = np.subtract(ys, errors), np.add(ys, errors)
            axes.fill_between(xs, low, high, color=look["color"], alpha=0.15, linewidth=0)
    lengths = sorted({model.about["train_length"] for model in models})
    for length in lengths:
        label = f"training length {', '.join(map(str, lengths))}"
        axes.axvline(length, color=GREY, linestyle="--", linewidth=1, zorder=0, label=label)
    if axes.collections:  # bands
        axes.fill_between([], [], color=GREY, alpha=0.3, linewidth=0, label="± one standard error")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set(**{"xlabel": "tokens of context", "ylabel": "nats per token", **words})


def plot_lengths(protocols: dict[str, list[Measurement]], metric: str, looks: dict[str, dict]) -> Plot:
    """A panel per protocol: perplexity or bits per byte over the length."""
    from matplotlib import ticker

    def panel(axes: Any, protocol: str, models: list[Measurement]) -> None:
        points = {model.label: [(row["length"], *of_metric(row, metric)) for row in model.rows] for model in models}
        words = {"title": f"{protocol} windows", "ylabel": f"validation {metric.replace('_', ' ')}"}
        draw_curves(axes, models, points, looks, models[0].lengths, **words)
        values = [value for of_model in points.values() for _, value, _ in of_model if value and value < math.inf]
        if values and max(values) > 3 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))

    return Plot([partial(panel, protocol=name, models=models) for name, models in protocols.items()], BANDS)


def plot_positions(models: Sequence[Measurement], looks: dict[str, dict]) -> Plot:
    """Mean loss over the position in the longest window, a panel for each longest window.

    Models whose table is shorter are measured in other windows, so their losses cannot be compared with the others'.
    """
    panels = []
    for length in sorted({max(model.bins)[1] for model in models if model.bins}, reverse=True):
        same, points = [model for model in models if model.bins and max(model.bins)[1] == length], {}
        for model in same:  # x in tokens of context: positions + 1
            rows = model.by_position
            points[model.label] = [((row["from"] + row["to"] + 1) / 2, row["nll"], row["stderr"]) for row in rows]
        known = {"models": same, "points": points, "ticks": [2**k for k in range(length.bit_length())]}
        panels.append(partial(draw_curves, **known, looks=looks, title=f"loss by position in windows of {length}"))
    return Plot(panels, BANDS)


def plot_recall(models: Sequence[Measurement], looks: dict[str, dict]) -> Plot:
    """What the first copy of a random string gains (measure.probes.recall), over the distance."""
    keys = ("distance", "gain", "gain_stderr")
    points = {model.label: [tuple(row[key] for key in keys) for row in model.probes["recall"]] for model in models}
    known = {"models": models, "points": points, "ticks": sorted({at[0] for line in points.values() for at in line})}
    words = {"title": "recall: what the first copy of a random string gains", "xlabel": "tokens from copy to copy"}
    caption = "Bands are ± one standard error, over trials or seeds."
    return Plot([partial(draw_curves, **known, looks=looks, **words)], caption)


def plot_attention(models: Sequence[Measurement]) -> Plot:
    """A heat map per model: a row per head, a column per bin of distances, the mean weight as a colour."""
    from matplotlib.colors import LogNorm

    every = [np.array(model.probes["attention"]["weights"]) for model in models]  # (n_layer, n_head, bins) each
    lowest = max(FAINTEST, min(weights.min() for weights in every))
    norm = LogNorm(lowest, max(weights.max() for weights in every), clip=True)

    def panel(axes: Any, model: Measurement, weights: np.ndarray) -> None:
        edges = model.probes["attention"]["edges"]
        image = axes.imshow(weights.reshape(-1, weights.shape[2]), norm=norm, aspect="auto")
        axes.figure.colorbar(image, ax=axes, label="mean attention weight")
        axes.set_xticks(range(len(edges) - 1), [str(edge) for edge in edges[:-1]], rotation=60)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set(title=literal(model.label), ylabel="head, layer by layer", xlabel="tokens from key to query")

    panels = [partial(panel, model=model, weights=weights) for model, weights in zip(models, every, strict=True)]
    return Plot(panels, "Mean attention weight; all models have one scale.")
