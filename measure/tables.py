"""Numbers with no more digits than their errors support, and the tables made of them: as text and as HTML."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from measure.results import Group
from measure.statistics import exp

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def text(self) -> str:
        columns = list(zip(self.header, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        first = str.rjust if all(cell.isdigit() for cell in columns[0][1:]) else str.ljust
        numbers = "\n".join(
            "  ".join([first(line[0], widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in (self.header, *self.rows)
        )
        return "\n".join(part for part in (self.title, numbers, self.note) if part)

    def html(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>\n" for row in self.rows)
        note = f"<p class=note>{escape(self.note)}</p>" if self.note else ""
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>{note}"

    def sorted(self, column: str) -> "Table":
        """By the number that a cell begins with, or by its words; cells without anything come last."""
        if column not in self.header:
            raise ValueError(f"sort={column!r}: the columns are {', '.join(self.header)}")
        place = self.header.index(column)
        rows = sorted(self.rows, key=lambda row: _sort_key(row[place]))
        return Table(self.title, self.header, rows, self.note)


def _sort_key(cell: str) -> tuple:
    try:
        return (0, float(cell.split()[0].replace("−", "-")), cell)
    except (ValueError, IndexError):
        return (2 if cell in ("", NOTHING) else 1, 0.0, cell)


def places(error: float) -> int:
    """Decimals that leave an error two digits of its own."""
    return max(0, 1 - math.floor(math.log10(error)))


def digits(value: float, error: float | None, show_error: bool = True) -> str:
    """A number with no more digits than its error allows, two of the error's own."""
    if error is None or not 0 < error < math.inf or not math.isfinite(value):
        return f"{value:.4g}"
    n = places(error)
    return f"{value:.{n}f} ± {error:.{n}f}" if show_error else f"{value:.{n}f}"


def with_error(row: dict) -> str:
    """A row of a measurement: perplexity ± its standard error (perplexity · stderr, the delta method)."""
    if row["nll"] is None:
        return row["note"]
    return digits(row["perplexity"], None if row["stderr"] is None else row["perplexity"] * row["stderr"])


def ratio(pair: dict | None) -> str:
    """A paired difference as a ratio of perplexities, `1.19 [1.16, 1.22]`: two digits of the interval's half."""
    if pair is None:
        return NOTHING
    value = exp(pair["difference"])
    low, high = (math.nan if pair[end] is None else exp(pair[end]) for end in ("low", "high"))
    if not 0 < high - low < math.inf:
        return f"{value:.3g}"
    n = places((high - low) / 2)
    return f"{value:.{n}f} [{low:.{n}f}, {high:.{n}f}]"


def difference(pair: dict | None) -> str:
    """A paired difference with the half of its 95 % interval, and its spread over seeds in brackets."""
    if pair is None:
        return NOTHING
    margin = None if pair["low"] is None else (pair["high"] - pair["low"]) / 2
    text = digits(pair["difference"], margin)
    text = text if text.startswith("-") else f"+{text}"
    spread = "" if pair["spread"] is None else f" ({pair['spread']:.2g})"
    return (text + spread).replace("-", "−")


def one_model(result: dict) -> Table:
    """A line a length: perplexity, bits per byte, and the ratio to the perplexity at the training length."""
    train_length, lines = result["train_length"], []
    for row in result["rows"]:
        if row["nll"] is None:
            lines.append([str(row["length"]), row["note"], "", "", ""])
            continue
        bits, pair = row.get("bits_per_byte"), row.get("against_train_length")
        relative = row["stderr"] / row["nll"] if row["stderr"] and row["nll"] else None
        bits = "" if bits is None else digits(bits, relative and bits * relative, show_error=False)
        to_train = "1" if row["length"] == train_length else ratio(pair)
        lines.append([str(row["length"]), with_error(row), bits, to_train, f"{row['scored']:,}"])
    header = ["length", "perplexity", "bits/byte", f"÷ at {train_length} [95 %]", "scored"]
    return Table("", header, lines)


def _label_columns(groups: Sequence[Group]) -> tuple[list[str], Callable[[Group], list[str]]]:
    """Name, number of seeds where any has several, training length where they differ."""
    several = any(len(group.members) > 1 for group in groups)
    lengths = len({group.first["train_length"] for group in groups}) > 1
    header = ["model", *(["seeds"] if several else []), *(["trained at"] if lengths else [])]

    def cells(group: Group) -> list[str]:
        seeds, trained = str(len(group.members)), str(group.first["train_length"])
        return [group.label, *([seeds] if several else []), *([trained] if lengths else [])]

    return header, cells


def _lengths(groups: Sequence[Group]) -> list[int]:
    return [row["length"] for row in groups[0].first["rows"]]


def by_length(groups: Sequence[Group], metric: str) -> Table:
    """A line a model, a column a length: `perplexity` or `bits_per_byte`."""
    header, cells = _label_columns(groups)
    lengths, lines, notes = _lengths(groups), [], {}
    for group in groups:
        line = cells(group)
        for length in lengths:
            row = group.row(length)
            line.append(NOTHING if row[metric] is None else digits(row[metric], row[f"{metric}_error"]))
            if row["nll"] is None:
                notes[f"{group.label}: {row['note']}"] = None
        lines.append(line)
    several = any(len(group.members) > 1 for group in groups)
    errors = "± is the standard deviation over seeds, or a single run's standard error" if several else ""
    note = "; ".join([*([errors] if errors else []), *notes])
    return Table(metric.replace("_", " "), [*header, *map(str, lengths)], lines, note)


def against_train_length(groups: Sequence[Group]) -> Table | None:
    """Each model's perplexity over its own at its training length, on the same tokens."""
    header, cells = _label_columns(groups)
    lines = []
    for group in groups:
        base = group.first["train_length"]
        pairs = {length: group.against(group, length, base) for length in _lengths(groups) if length != base}
        if any(pairs.values()):
            shown = [ratio(pairs.get(length)) if length != base else "1" for length in _lengths(groups)]
            lines.append([*cells(group), *shown])
    if not lines:
        return None
    title = "perplexity ÷ that at the training length, on the same tokens [95 %]"
    return Table(title, [*header, *map(str, _lengths(groups))], lines)


def against(groups: Sequence[Group], reference: Group) -> Table | None:
    """Each model's nats a token minus the reference's, at each length on the same tokens."""
    header, cells = _label_columns(groups)
    lines = []
    for group in groups:
        pairs = [group.against(reference, length) for length in _lengths(groups)]
        if group is not reference and any(pairs):
            lines.append([*cells(group), *map(difference, pairs)])
    if not lines:
        return None
    title = f"nats a token minus those of {reference.label}, on the same tokens"
    note = "±: half of the 95 % interval" + (
        "; in brackets: standard deviation over seeds" if "seeds" in header else ""
    )
    return Table(title, [*header, *map(str, _lengths(groups))], lines, note)


def settings_apart(settings: dict[str, dict]) -> Table | None:
    """The settings in which runs differ; settings: a run's name -> its configuration as plain values."""
    flat = {name: dict(_flat(config)) for name, config in settings.items()}
    keys = dict.fromkeys(key for config in flat.values() for key in config)
    differing = [key for key in keys if len({str(config.get(key)) for config in flat.values()}) > 1]
    lines = [[name, *(str(config.get(key, NOTHING)) for key in differing)] for name, config in flat.items()]
    return Table("settings that differ", ["run", *differing], lines) if differing else None


def _flat(config: dict, prefix: str = "") -> list[tuple[str, object]]:
    found = []
    for key, value in config.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def recall(results: Sequence[dict]) -> Table:
    cell = lambda row: digits(row["gain"], row["gain_stderr"])  # noqa: E731
    title = "recall: nats a token that a first copy of a random string gains, by tokens from copy to copy"
    return _of_probe(results, "recall", "distance", "gain", cell, title)


def shift(results: Sequence[dict]) -> Table:
    moved = [{**result, "shift": [row for row in result["shift"] if row["shift"]]} for result in results]
    cell = lambda row: f"{row['difference']:+.2g} ({row['mean_change']:.1g})".replace("-", "−")  # noqa: E731
    title = "shift test: change of the loss when all positions are moved, nats a token (mean size for a single token)"
    return _of_probe(moved, "shift", "shift", "difference", cell, title)


def _of_probe(results: Sequence[dict], probe: str, x: str, value: str, cell: Callable, title: str) -> Table:
    """A line a model, a column an x, in which cell(row) stands where the row's value is not None."""
    xs, lines, notes = sorted({row[x] for result in results for row in result[probe]}), [], {}
    for result in results:
        of_x = {row[x]: row for row in result[probe]}
        there = {at: row for at, row in of_x.items() if row[value] is not None}
        lines.append([result["run"], *(cell(there[at]) if at in there else NOTHING for at in xs)])
        notes |= {f"{result['run']}: {row['note']}": None for row in of_x.values() if "note" in row}
    return Table(title, ["model", *map(str, xs)], lines, "; ".join(notes))
