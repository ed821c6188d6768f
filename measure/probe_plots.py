"""Pictures of the probes: recall at a distance as curves, attention by distance as a heat map. PNG or SVG by suffix."""

from itertools import cycle, pairwise
from pathlib import Path

import numpy as np
from matplotlib import ticker
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure  # not pyplot: a notebook's backend is left alone
from matplotlib.lines import Line2D

from model.checkpoint import write_file

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
MARKERS = "osDv^<>P*"  # more than colours: no two of the first 63 curves look the same
FAINTEST = 1e-6  # a mean attention weight below it gets its colour


def plot_recall(results: list[dict], path: Path) -> None:
    """A curve a run over distance: the loss on the second copy, beside the control's, and what the first copy gains.

    Error bars: one standard error. results: dicts with run (its label), train_length and recall (what probes.recall
    returned). A cross marks where a learned table ends a curve. Raises ValueError for a suffix that is neither .png nor
    .svg.
    """
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result, colour, marker in zip(results, cycle(COLOURS), cycle(MARKERS), strict=False):
        rows = [row for row in result["recall"] if row["nll"] is not None]
        distances = [row["distance"] for row in rows]
        ended = next((row["note"] for row in result["recall"] if row["nll"] is None), None)
        style = {"marker": marker, "markersize": 5, "capsize": 3, "color": colour}
        style["label"] = _label(result["run"]) + (f" ({ended})" if ended else "")
        for axes, value, error in ((left, "nll", "stderr"), (right, "gain", "gain_stderr")):
            values, errors = [row[value] for row in rows], [row[error] or 0 for row in rows]
            axes.errorbar(distances, values, yerr=errors, **style)
            if ended and rows:
                axes.plot(distances[-1], values[-1], marker="x", markersize=14, markeredgewidth=2.5, color=colour)
        left.plot(distances, [row["control_nll"] for row in rows], ":", linewidth=1, color=colour)
    ticks = sorted({row["distance"] for result in results for row in result["recall"]})
    for axes, height, side in ((left, 0.01, "bottom"), (right, 0.99, "top")):  # where the curves are not
        for train_length in sorted({result["train_length"] for result in results}):
            axes.axvline(train_length, color="#777777", linestyle="--", linewidth=1, zorder=0)
            place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": side}
            axes.text(train_length, height, f"training length {train_length}", color="#555555", fontsize=9, **place)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(distance) for distance in ticks], rotation=45 if len(ticks) > 8 else 0)
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.set_xlabel("tokens from copy to copy (log scale)")
        axes.grid(alpha=0.25)
    left.set(title="Loss on the second copy of a random string", ylabel="nats a token")
    right.set(title="What the first copy gains (control's loss − loss)", ylabel="nats a token")
    right.axhline(0, color="#777777", linewidth=1, zorder=0)
    handles, labels = left.get_legend_handles_labels()
    handles.append(Line2D([], [], color="#555555", linestyle=":", linewidth=1))
    labels.append("control: another first copy")
    right.legend(handles, labels, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))  # there it hides no curve
    _save(figure, path)


def plot_attention(result: dict, path: Path) -> None:
    """A heat map: a row a head, a column a bin of distances, the mean attention weight as colour (log scale).

    result: a dict with run (its label), train_length and attention (what probes.attention_by_distance returned).
    Raises ValueError for a suffix that is neither .png nor .svg.
    """
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
    note = f" (darkest: {FAINTEST:g} and less)" if lowest == FAINTEST else ""
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
    title = f"Attention by distance, {_label(result['run'])}, windows of {result['attention']['length']}"
    if result["train_length"] < edges[-1]:
        at = np.interp(result["train_length"], edges, np.arange(bins + 1))
        axes.axvline(at, color="#D55E00", linestyle="--", linewidth=2)
        title += f"\ndashed: training length {result['train_length']}"
    axes.set_title(title, fontsize=11)
    _save(figure, path)


def _label(run: str) -> str:
    return "\u200b" + run.replace("$", r"\$")  # no formula, and no leading _, which hides it


def _save(figure: Figure, path: Path) -> None:
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path={path}: must end in .png or .svg")
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=150, format=path.suffix[1:]))
