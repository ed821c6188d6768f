"""Numbers with no more digits than their errors support, and the tables made of them: as text and as HTML."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from measure.groups import TOLERANCE, Group, of_metric
from measure.statistics import ENOUGH_DOCUMENTS, FEW_DOCUMENTS, exp

NOTHING = "–"
PLUS_MINUS = "±: standard error"
INTERVAL = "[ ]: 95 % interval"
WITHIN = f"{TOLERANCE * 100:g} %"


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def text(self) -> str:
        """The numbers of a column end below each other, and so do their errors and intervals."""
        first_cells, *others = zip(self.header, *self.rows, strict=True)
        columns = [first_cells, *([head, *_lined_up(cells)] for head, *cells in others)]
        widths = [max(map(len, column)) for column in columns]
        first = str.rjust if all(cell.isdigit() for cell in columns[0][1:]) else str.ljust
        numbers = "\n".join(
            "  ".join([first(line[0], widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in zip(*columns, strict=True)
        )
        return "\n".join(part for part in (self.title, numbers, self.note) if part)

    def html(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>\n" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
        return f"<h3>{escape(self.title)}</h3>\n<div class=wide>{table}</div><p class=note>{escape(self.note)}</p>"

    def sorted(self, column: str) -> "Table":
        """By the number that a cell begins with, or by its words, empty cells last; as it is without such a column."""
        if column not in self.header:
            return self
        place = self.header.index(column)
        return replace(self, rows=sorted(self.rows, key=lambda row: _sort_key(row[place])))


def _lined_up(cells: Sequence[str]) -> list[str]:
    """The same width for all: numbers end where a ± or [ begins in other cells. Words stay as they are."""
    halves = {cell: re.fullmatch(r"((?:≥ )?\S+)( [±\[(].*)?", cell) for cell in cells}
    left, right = (max((len(m[side] or "") for m in halves.values() if m), default=0) for side in (1, 2))
    return [f"{m[1]:>{left}}{m[2] or '':{right}}" if (m := halves[cell]) else cell for cell in cells]


def _sort_key(cell: str) -> tuple:
    try:
        return (0, float(cell.removeprefix("≥ ").split()[0].replace("−", "-")), cell)
    except (ValueError, IndexError):
        return (2 if cell in ("", NOTHING) else 1, 0.0, cell)


def places(error: float) -> int:
    """Decimals that leave an error two digits of its own, or all before the point."""
    return max(0, 1 - math.floor(math.log10(error)))


def digits(value: float, error: float | None, show_error: bool = True) -> str:
    """A number with no more digits than its error allows: at least two of the error's own, and all before the point."""
    if error is None or not 1e-9 * abs(value) < error < math.inf:  # less is rounding
        return f"{value:#.4g}".rstrip(".")
    n = places(error)
    return f"{value:.{n}f} ± {error:.{n}f}" if show_error else f"{value:.{n}f}"


def with_error(row: dict) -> str:
    """A row of a measurement: perplexity ± its standard error (perplexity · stderr, the delta method)."""
    if row["nll"] is None:
        return row["note"]
    return digits(row["perplexity"], None if row["stderr"] is None else row["perplexity"] * row["stderr"])


def with_interval(value: float, low: float | None, high: float | None) -> str:
    """`1.191 [1.163, 1.220]`: two digits of the interval's half."""
    if low is None or high is None or not 1e-9 * max(1.0, abs(value)) < high - low < math.inf:  # less is rounding
        return f"{value:#.4g}".rstrip(".")
    n = places((high - low) / 2)
    return f"{value:.{n}f} [{low:.{n}f}, {high:.{n}f}]"


def ratio(pair: dict | None) -> str:
    """A paired difference as a ratio of perplexities."""
    if pair is None:
        return NOTHING
    low, high = (None if pair[end] is None else exp(pair[end]) for end in ("low", "high"))
    return with_interval(exp(pair["difference"]), low, high)


def difference(pair: dict | None) -> str:
    """A paired difference with its sign."""
    if pair is None:
        return NOTHING
    text = with_interval(pair["difference"], pair["low"], pair["high"])
    text = text.removeprefix("-") if float(text.split()[0]) == 0 else text
    return (text if text.startswith("-") else f"+{text}").replace("-", "−")


def usable(found: dict | None) -> str:
    """The usable length: `332 [318, 349]`, `≥ 1024`, or where a table ends."""
    if found is None:
        return NOTHING
    if "note" in found:
        return f"{found['value']:.0f} (table)"
    ends = [key for key in ("value", "low", "high") if found[key] is not None]
    value, *ends = [("≥ " if key in found["open"] else "") + f"{found[key]:.0f}" for key in ends]
    return f"{value} [{', '.join(ends)}]" if ends and ends[0] != value else value


def one_model(group: Group) -> Table:
    """A line a length: perplexity, bits per byte, and the ratio to the perplexity at the training length."""
    train_length, lines = group.first["train_length"], []
    for length in group.lengths:
        row = group.row(length)
        if row["nll"] is None:
            lines.append([str(length), row["note"], "", ""])
            continue
        shown = [_value(row, "perplexity"), _value(row, "bits_per_byte", show_error=False)]
        lines.append([str(length), *shown, "1" if length == train_length else ratio(group.over_train_length(length))])
    header = ["length", "perplexity", "bits/byte", f"÷ at {train_length}"]
    return Table("", header, lines, f"{_errors([group], PLUS_MINUS, INTERVAL)}\n{sentence(group)}")


def sentence(group: Group) -> str:
    """What a model does past its training length: its usable length, and its loss at twice that or near it."""
    base, found = group.first["train_length"], group.usable_length()
    if found is None:
        return f"{group.label}: its training length, {base}, is not measured"
    shown = f"the end of its table, {found['value']:.0f}" if "note" in found else usable(found)
    times = f"{found['value'] / base:.2g} × the training length"
    words = f"{group.label}: within {WITHIN} up to {re.sub('^≥', 'at least', shown)} tokens ({times})"
    past = [length for length in group.lengths if length > base and group.has(length)]
    at = next((length for length in past if length >= 2 * base), max(past, default=base))
    return f"{words}; at {at}, {ratio(group.over_train_length(at))} times its perplexity at {base}" if past else words


def _value(row: dict, metric: str, show_error: bool = True) -> str:
    return NOTHING if row[metric] is None else digits(*of_metric(row, metric), show_error)


def _errors(groups: Sequence[Group], *meanings: str) -> str:
    """What the errors and intervals of a table are over, or why it has none."""
    sizes = sorted({len(group.members[0].counts) for group in groups} - {0})
    if not sizes or sizes[0] < ENOUGH_DOCUMENTS:
        return FEW_DOCUMENTS
    seeds = " and the seeds" if any(len(group.members) > 1 for group in groups) else ""
    return f"{', '.join(meanings)}, over {' or '.join(map(str, sizes))} documents{seeds}"


def by_length(groups: Sequence[Group], metric: str) -> Table:
    """A line a model, a column a length: `perplexity` or `bits_per_byte`; and the usable length."""
    ended = {f"{g.label}: {g.row(n)['note']}": None for g in groups for n in g.lengths if not g.has(n)}
    cell = lambda group, length: _value(group.row(length), metric)  # noqa: E731
    usable_is = f"usable: within {WITHIN} of the perplexity at the training length"
    note = "; ".join([_errors(groups, PLUS_MINUS, INTERVAL), usable_is, *ended])
    return _over_lengths(metric.replace("_", " "), groups, cell, note, with_usable=True)


def against_train_length(groups: Sequence[Group]) -> Table:
    """Each model's perplexity over its own at its training length, on the same tokens."""

    def cell(group: Group, length: int) -> str:
        return "1" if length == group.first["train_length"] else ratio(group.over_train_length(length))

    groups = [group for group in groups if not group.first.get("truncated")]  # these are 1 everywhere
    measured = [group for group in groups if group.has(group.first["train_length"])]
    missing = [sentence(group) for group in groups if group not in measured]
    title = "perplexity ÷ that at the training length, on the same tokens"
    return _over_lengths(title, measured, cell, "; ".join([_errors(measured, INTERVAL), *missing]))


def against(groups: Sequence[Group], reference: Group) -> Table:
    """Each model's nats a token minus the reference's, at each length on the same tokens."""
    others = [group for group in groups if group is not reference]
    pairs = {(id(g), n): g.against(reference, n) for g in others for n in g.lengths}
    compared = {g.label: pair["seeds"] for g in others for n in g.lengths if (pair := pairs[id(g), n])}
    seeds = [f"seeds of {label}: {words}" for label, words in compared.items() if not words.isdigit()]
    cell = lambda group, length: difference(pairs[id(group), length])  # noqa: E731
    title = f"nats a token minus those of {reference.label}, on the same tokens"
    return _over_lengths(title, others, cell, "; ".join([_errors(groups, INTERVAL), *seeds]))


def _over_lengths(
    title: str, groups: Sequence[Group], cell: Callable[[Group, int], str], note: str, with_usable: bool = False
) -> Table:
    """A line a model, a column a length; models with nothing but 1 are left out. Seeds and training lengths where they
    differ."""
    lengths, about = groups[0].lengths if groups else [], {}
    if any(len(group.members) > 1 for group in groups):
        about["seeds"] = lambda group: str(len(group.members))
    if len({group.first["train_length"] for group in groups}) > 1:
        about["trained at"] = lambda group: str(group.first["train_length"])
    after = {}
    if with_usable:
        after["usable"] = lambda group: usable(None if group.first.get("truncated") else group.usable_length())
    lines = []
    for group in groups:
        cells = [cell(group, length) for length in lengths]
        if set(cells) - {NOTHING, "1"}:
            before, last = ([tell(group) for tell in some.values()] for some in (about, after))
            lines.append([group.label, *before, *cells, *last])
    return Table(title, ["model", *about, *map(str, lengths), *after], lines, note)


def settings_apart(settings: dict[str, dict]) -> Table | None:
    """The settings in which runs differ; settings: a run's name -> its configuration as plain values."""
    flat = {name: _flat(config) for name, config in settings.items()}
    keys = dict.fromkeys(key for config in flat.values() for key in config)
    differing = [key for key in keys if len({config.get(key) for config in flat.values()}) > 1]
    lines = [[name, *(config.get(key, NOTHING) for key in differing)] for name, config in flat.items()]
    return Table("settings that differ", ["run", *differing], lines) if differing else None


def _flat(config: Any, name: str = "") -> dict[str, str]:
    if not isinstance(config, dict):
        return {name[1:]: str(config)}
    return {full: text for key, value in config.items() for full, text in _flat(value, f"{name}.{key}").items()}


def recall(results: Sequence[dict]) -> Table:
    cell = lambda row: digits(row["gain"], row["gain_stderr"])  # noqa: E731
    title = "recall: nats a token that a first copy of a random string gains, by tokens from copy to copy"
    return _of_probe(results, "recall", "distance", cell, title, f"{PLUS_MINUS}, over trials or seeds")


def shift(results: Sequence[dict]) -> Table:
    moved = [{**result, "shift": [row for row in result["shift"] if row["shift"]]} for result in results]
    cell = lambda row: f"{row['difference']:+.2g} ({row['mean_change']:.1g})"  # noqa: E731
    title = "shift test: change of the loss when all positions are moved, nats a token (mean size for a single token)"
    return _of_probe(moved, "shift", "shift", cell, title, "")


def _of_probe(results: Sequence[dict], probe: str, x: str, cell: Callable, title: str, note: str) -> Table:
    """A line a model, a column an x; nothing stands past a table."""
    xs, notes = sorted({row[x] for result in results for row in result[probe]}), [note] if note else []
    lines = []
    for result in results:
        known = {row[x]: cell(row).replace("-", "−") for row in result[probe] if row["nll"] is not None}
        lines.append([result["run"], *(known.get(at, NOTHING) for at in xs)])
        notes += [f"{result['run']}: {row['note']}" for row in result[probe] if "note" in row][:1]
    return Table(title, ["model", *map(str, xs)], lines, "; ".join(notes))


PROBES = {"recall": recall, "shift": shift}
