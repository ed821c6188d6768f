"""Pictures of the probes: recall at a distance as curves, attention by distance as a heat map. PNG or SVG."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from measure.plots import cross, legend, literal, log_axes, new_figure, save, styles

FAINTEST = 1e-6  # a mean attention weight below it gets its colour


def plot_recall(results: list[dict], path: Path) -> None:
    """A curve a run over distance: the loss on the second copy, beside the control's, and what the first copy gains.

    Error bars: one standard error. results: dicts with run (its label), train_length and recall (what probes.recall
    returned). A cross marks where a learned table ends a curve.
    """
    from matplotlib.lines import Line2D

    beside = len(results) > 3
    figure, (left, right) = new_figure(2, beside)
    for result, style in zip(results, styles(), strict=False):
        rows = [row for row in result["recall"] if row["nll"] is not None]
        distances = [row["distance"] for row in rows]
        ended = next((row["note"] for row in result["recall"] if row["nll"] is None), None)
        label = literal(result["run"]) + (f" ({ended})" if ended else "")
        for axes, value, error in ((left, "nll", "stderr"), (right, "gain", "gain_stderr")):
            values, errors = [row[value] for row in rows], [row[error] or 0 for row in rows]
            axes.errorbar(distances, values, yerr=errors, markersize=5, capsize=3, label=label, **style)
            if ended and rows:
                cross(axes, distances[-1], values[-1], style)
        left.plot(distances, [row["control_nll"] for row in rows], ":", linewidth=1, color=style["color"])
    ticks = sorted({row["distance"] for result in results for row in result["recall"]})
    for axes, text_at in ((left, "bottom"), (right, "top")):  # where the curves are not
        log_axes(axes, ticks, (result["train_length"] for result in results), text_at)
        axes.set_xlabel("tokens from copy to copy")
    left.set(ylabel="nats a token")
    left.set_title("loss on the second copy of a random string", fontsize=11)
    right.set_title("what the first copy gains: control − loss", fontsize=11)
    right.axhline(0, color="#777777", linewidth=1, zorder=0)
    control = Line2D([], [], color="#555555", linestyle=":", linewidth=1), "control: another first copy"
    legend(figure, right, beside, [control])
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
    axes = figure.subplots()
    lowest = max(FAINTEST, weights.min())
    mesh = axes.pcolormesh(
        np.arange(bins + 1),
        np.arange(heads + 1),
        np.maximum(weights.reshape(heads, bins), lowest),
        norm=LogNorm(lowest, weights.max()),
        cmap="viridis",
        rasterized=True,
    )
    note = f"\n(darkest: {FAINTEST:g} and less)" if lowest == FAINTEST else ""
    figure.colorbar(mesh, ax=axes, label=f"mean attention weight{note}")
    axes.invert_yaxis()
    axes.hlines(np.arange(n_head, heads, n_head), 0, bins, color="white", linewidth=1)
    names = [str(low) if high == low + 1 else f"{low}–{high - 1}" for low, high in pairwise(edges)]
    axes.set_xticks(np.arange(bins) + 0.5, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
    if heads <= 60:
        names = [f"{layer}.{head}" for layer in range(n_layer) for head in range(n_head)]
        axes.set_yticks(np.arange(heads) + 0.5, names, fontsize=8)
        axes.set_ylabel("layer.head")
    else:
        axes.set_yticks((np.arange(n_layer) + 0.5) * n_head, [str(layer) for layer in range(n_layer)], fontsize=8)
        axes.set_ylabel("layer (its heads from top to bottom)")
    axes.set_xlabel("tokens back from the query")
    title = f"{literal(result['run'])}\nattention by distance in windows of {result['attention']['length']}"
    if result["train_length"] < edges[-1]:
        at = np.interp(result["train_length"], edges, np.arange(bins + 1))
        axes.axvline(at, color="#D55E00", linestyle="--", linewidth=2)
        title += f" (dashed: training length {result['train_length']})"
    axes.set_title(title, fontsize=11)
    save(figure, path)
