"""Numbers with no more digits than their errors support, and the tables made of them: as text, Markdown and HTML."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from measure.measurement import TOLERANCE, Measurement, of_metric
from measure.statistics import ENOUGH_DOCUMENTS, exp

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
        lines = [self.title]
        for line in zip(*columns, strict=True):
            cells = [first(line[0], widths[0]), *map(str.rjust, line[1:], widths[1:])]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(filter(None, [*lines, self.note]))

    def markdown(self) -> str:
        rows = [self.header, ["---"] * len(self.header), *self.rows]
        lines = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows)
        table = "\n".join(f"| {line} |" for line in lines)
        return "\n\n".join(filter(None, [self.title, table, self.note])) + "\n"

    def html(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>\n" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
        return f"<h3>{escape(self.title)}</h3>\n<div class=wide>{table}</div><p class=note>{escape(self.note)}</p>"


def _lined_up(cells: Sequence[str]) -> list[str]:
    """The same width for all: numbers end where a ± or [ begins in other cells. Words stay as they are."""
    halves = {cell: re.fullmatch(r"((?:≥ )?\S+)( [±\[(].*)?", cell) for cell in cells}
    left, right = (max((len(m[side] or "") for m in halves.values() if m), default=0) for side in (1, 2))
    return [f"{m[1]:>{left}}{m[2] or '':{right}}" if (m := halves[cell]) else cell for cell in cells]


def _format(value: float, error: float | None) -> str:
    """Leaves an error two digits of its own, or all before the point; four digits of a value without an error."""
    if error is None or not 1e-9 * max(1.0, abs(value)) < error < math.inf:  # less is rounding
        return "#.4g"
    return f".{max(0, 1 - math.floor(math.log10(error)))}f"


def digits(value: float, error: float | None, show_error: bool = True) -> str:
    """`3.254 ± 0.033`: no more digits than the error allows."""
    form = _format(value, error)
    text = f"{value:{form}}".rstrip(".")
    return f"{text} ± {error:{form}}" if show_error and form != "#.4g" else text


def with_error(row: dict, metric: str = "perplexity", show_error: bool = True) -> str:
    """A row of a measurement: perplexity or bits_per_byte ± its standard error; NOTHING past the end of a table."""
    value, error = of_metric(row, metric)
    return NOTHING if value is None else digits(value, error, show_error)


def with_interval(pair: dict | None, unit: Callable[[float], float] = exp) -> str:
    """A paired difference as a ratio of perplexities (float: in nats): `1.191 [1.163, 1.220]`, the half to 2 digits."""
    if pair is None:
        return NOTHING
    value, low, high = (None if pair[key] is None else unit(pair[key]) for key in ("difference", "low", "high"))
    half = None if low is None else (high - low) / 2
    form = _format(value, half)
    text = digits(value, half, show_error=False)
    return text if form == "#.4g" else f"{text} [{low:{form}}, {high:{form}}]"


def difference(pair: dict | None) -> str:
    """A paired difference with its sign."""
    if pair is None:
        return NOTHING
    text = with_interval(pair, unit=float)
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
    return f"{value} [{', '.join(ends)}]" if {*ends} - {value} else value


def sentence(model: Measurement) -> str:
    """What a model does past its training length: its usable length, and its loss at twice that or near it."""
    base, found = model.about["train_length"], model.usable_length()
    if found is None:
        return f"{model.label}: its training length, {base}, is not measured"
    shown = f"the end of its table, {found['value']:.0f}" if "note" in found else usable(found)
    times = found["value"] / base
    times = f"{times:{'.2g' if times < 99.5 else '.0f'}} × the training length"
    words = f"{model.label}: within {WITHIN} up to {re.sub('^≥', 'at least', shown)} tokens ({times})"
    past = sorted(length for length in model.losses if length > base)
    at = next((length for length in past if length >= 2 * base), max(past, default=base))
    ratio = with_interval(model.over_train_length(at))
    return f"{words}; at {at}, {ratio} times its perplexity at {base}" if past else words


def _over_train_length(model: Measurement, length: int) -> str:
    return "1" if length == model.about["train_length"] else with_interval(model.over_train_length(length))


def _errors(models: Sequence[Measurement], meanings: str) -> str:
    """What the errors and intervals of a table are over, or why it has none."""
    sizes = sorted({len(model.counts) for model in models if len(model.counts) >= ENOUGH_DOCUMENTS})
    if not sizes:
        return f"no errors or intervals: fewer than {ENOUGH_DOCUMENTS} documents are scored"
    seeds = " and the seeds" if any(len(model.seeds) > 1 for model in models) else ""
    return f"{meanings}, over {' or '.join(map(str, sizes))} documents{seeds}"


def one_model(model: Measurement) -> Table:
    """A line per length: perplexity, bits per byte, and the ratio to the perplexity at the training length."""
    lines = []
    for row in model.rows:
        cells = [with_error(row), with_error(row, "bits_per_byte", False), _over_train_length(model, row["length"])]
        lines.append([str(row["length"]), *([row["note"], "", ""] if "note" in row else cells)])
    header = ["length", "perplexity", "bits/byte", f"÷ at {model.about['train_length']}"]
    return Table("", header, lines, f"{_errors([model], f'{PLUS_MINUS}, {INTERVAL}')}\n{sentence(model)}")


def by_length(models: Sequence[Measurement], metric: str) -> Table:
    """A line per model, a column per length: `perplexity` or `bits_per_byte`; and the usable length."""
    ended = {f"{m.label}: {m.row(n)['note']}": None for m in models for n in m.lengths if n not in m.losses}
    usable_is = f"usable: within {WITHIN} of the perplexity at the training length"
    note = "; ".join([_errors(models, f"{PLUS_MINUS}, {INTERVAL}"), usable_is, *ended])
    table = _over_lengths(metric.replace("_", " "), models, lambda model, n: with_error(model.row(n), metric), note)
    lengths = {m.label: usable(None if m.about.get("truncated") else m.usable_length()) for m in models}
    return Table(table.title, [*table.header, "usable"], [[*row, lengths[row[0]]] for row in table.rows], note)


def against_train_length(models: Sequence[Measurement]) -> Table:
    """Each model's perplexity over its own at its training length, on the same tokens."""
    models = [model for model in models if not model.about.get("truncated")]  # these are 1 everywhere
    measured = [model for model in models if model.about["train_length"] in model.losses]
    note = "; ".join([_errors(measured, INTERVAL), *(sentence(model) for model in models if model not in measured)])
    title = "perplexity ÷ that at the training length, on the same tokens"
    return _over_lengths(title, measured, _over_train_length, note)


def against(models: Sequence[Measurement], reference: Measurement) -> Table:
    """Each model's nats per token minus the reference's, at each length on the same tokens."""
    others = [model for model in models if model is not reference]
    pairs = {(m.label, n): m.against(reference, n) for m in others for n in m.lengths}
    seeds = {f"seeds of {label}: {pair['seeds']}": None for (label, _), pair in pairs.items() if pair}
    note = "; ".join([_errors(models, INTERVAL), *(words for words in seeds if words.endswith(")"))])
    title = f"nats per token minus those of {reference.label}, on the same tokens"
    return _over_lengths(title, others, lambda model, n: difference(pairs[model.label, n]), note)


def _over_lengths(title: str, models: Sequence[Measurement], cell: Callable, note: str) -> Table:
    """A line per model, except those with nothing but 1; a column per length, and for what else differs."""
    lengths, about, lines = models[0].lengths if models else [], {}, []
    if any(len(model.seeds) > 1 for model in models):
        about["seeds"] = lambda model: str(len(model.seeds))
    if len({model.about["train_length"] for model in models}) > 1:
        about["trained at"] = lambda model: str(model.about["train_length"])
    for model in models:
        cells = [cell(model, length) for length in lengths]
        if set(cells) - {NOTHING, "1"}:
            lines.append([model.label, *(tell(model) for tell in about.values()), *cells])
    return Table(title, ["model", *about, *map(str, lengths)], lines, note)


PROBE_TITLES = {  # x and title
    "recall": ("distance", "recall: nats per token gained from a first copy of a string, by tokens from copy to copy"),
    "shift": ("shift", "shift test: change of the loss at other positions, nats per token (mean size for a token)"),
}


def of_probe(models: Sequence[Measurement], probe: str) -> Table:
    """A line per model that has the probe, a column per x other than 0; nothing stands past a table."""
    (x, title), lines = PROBE_TITLES[probe], []
    of_model = {model.label: model.probes[probe] for model in models if probe in model.probes}
    xs = sorted({row[x] for rows in of_model.values() for row in rows} - {0})
    for label, rows in of_model.items():
        if probe == "recall":
            cells = {row[x]: digits(row["gain"], row["gain_stderr"]) for row in rows}
        else:
            cells = {row[x]: f"{row['difference']:+.2g} ({row['mean_change']:.1g})" for row in rows}
        lines.append([label, *(cells.get(at, NOTHING).replace("-", "−") for at in xs)])
    notes = [f"{PLUS_MINUS}, over trials or seeds"] if probe == "recall" else []
    notes += [f"{NOTHING}: not measured, or past the end of a table"] if any(NOTHING in line for line in lines) else []
    return Table(title, ["model", *map(str, xs)], lines, "; ".join(notes))
