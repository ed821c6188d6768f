"""Measurements as wandb metrics: curves over the length, the position and the distance, and values to sort runs by."""

from collections.abc import Callable, Sequence
from typing import Any

from measure.groups import scaling_words
from measure.measurement import Measurement
from measure.report import Report


def log_curve(rows: Sequence[dict], prefix: str, record: Callable[[dict], None], wandb_run: Any) -> None:
    """The curve as metrics with length as their x-axis, and a summary value a length to sort runs by."""
    rows = [row for row in rows if row["nll"] is not None]
    for row in rows:
        values = {f"{prefix}/{key}": row[key] for key in ("nll", "perplexity", "stderr", "bits_per_byte")}
        record({"extrapolation/length": row["length"], **values})
    wandb_run.summary.update({f"{prefix}/perplexity_{row['length']}": row["perplexity"] for row in rows})


def log_measurements(found: Sequence[Measurement], report: Report, wandb_run: Any) -> None:
    """Curves by length and by position, probes, the usable length, and the table of paired differences."""
    import wandb  # it is the caller's: wandb_run is a run of it

    first = found[0]
    stretched = "".join(f"_{word}" for word in scaling_words(first.about["scaling"]))

    def record(row: dict) -> None:
        wandb_run.log({key: value for key, value in row.items() if value is not None})  # wandb shows None as a value

    for measurement in found:
        prefix = f"extrapolation/{measurement.about['protocol']}{stretched}"
        log_curve(measurement.rows, prefix, record, wandb_run)
        if usable := measurement.usable_length():
            wandb_run.summary.update({f"{prefix}/usable_length": usable["value"]})
    for row in first.by_position:
        values = {f"by_position/{key}{stretched}": row[key] for key in ("nll", "stderr")}
        record({"by_position/position": row["to"], **values})
    for row in first.probes.get("recall", ()):
        values = {f"recall/{key}{stretched}": row[key] for key in ("nll", "control_nll", "gain")}
        record({"recall/distance": row["distance"], **values})
    for row in first.probes.get("shift", ()):
        wandb_run.summary.update({f"shift/mean_change_{row['shift']}{stretched}": row["mean_change"]})
    columns = ["protocol", "model", "reference", "length", "difference", "low", "high", "documents"]
    mine = next(model.label for model in report.groups if model.about["key"] == first.about["key"])
    if pairs := [pair for pair in report.paired if pair["model"] == mine]:
        rows = [[pair[column] for column in columns] for pair in pairs]
        wandb_run.log({f"paired{stretched}": wandb.Table(columns=columns, data=rows)})
