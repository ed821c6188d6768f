"""What a user sees: digits, tables, plots, files, and the page in a real browser."""

import json
import math
import re
import shutil
import subprocess
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from measure import Measurement, Report, comparability, with_error
from measure.plots import COLOURS, GREY, Plot, plot_lengths, plot_positions, styles
from measure.tables import Table, difference, digits, usable, with_interval
from model.positions import SCHEMES

LENGTHS = (256, 512)


def measurement(name="rope_seed0", nll=(1.18, 1.87), seed=0, key=None, limit=None, n=20, **change) -> Measurement:
    """Made up: the losses of each length are nll per token, with noise that both lengths share."""
    noise, counts = np.random.default_rng(3).normal(0, 0.1, n), np.arange(100.0, 100 + n)
    losses = {x: counts[None] * (mean + noise) for x, mean in zip(LENGTHS, nll, strict=True) if x <= (limit or x)}
    ends = [(2**k - 1, 2 ** (k + 1) - 1) for k in range(8 if limit else 9)]
    bins = {at: ((2 - k / 10 + noise)[None] * counts, counts) for k, at in enumerate(ends)}
    about = {"run": name, "folder": f"outputs/{name}", "key": key or name, "seed": seed, "scaling": None}
    about |= {
        "pos": {"name": name.split("_")[0]},
        "protocol": "sliding",
        "train_length": 256,
        "tokenizer": "bytes",
        "corpus": "stdlib",
    }
    about |= {"fingerprint": "f1", "trained_on": "f1", "precision": "fp32", "documents": "within documents", **change}
    return Measurement(about, LENGTHS, losses, counts, counts * 1.0, limit, bins)


@pytest.mark.parametrize(
    ("perplexity", "stderr", "text"),
    [
        (3.25412, 0.01, "3.254 ± 0.033"),
        (1234.5, 0.1, "1234 ± 123"),
        (3.25412, None, "3.254"),
        (3.25412, 0.0, "3.254"),
        (14.3, None, "14.30"),
        (math.inf, 0.1, "inf"),
        (math.nan, math.nan, "nan"),
    ],
)
def test_no_more_digits_than_the_error_allows(perplexity, stderr, text):
    assert with_error({"nll": 1.0, "perplexity": perplexity, "stderr": stderr}) == text


def test_intervals_show_two_digits_of_their_half():
    pair = {"difference": math.log(1.1912), "low": math.log(1.1634), "high": math.log(1.2198)}
    assert with_interval(pair) == "1.191 [1.163, 1.220]"
    assert with_interval({**pair, "low": None, "high": None}) == "1.191"
    assert with_interval({"difference": 900.0, "low": 800.0, "high": 1000.0}) == "inf"
    assert difference({"difference": -0.5, "low": -0.7, "high": -0.3}) == "−0.50 [−0.70, −0.30]"
    assert difference({"difference": 0.5, "low": None, "high": None}) == "+0.5000"
    assert difference({"difference": -0.0001, "low": -0.0211, "high": 0.0209}) == "+0.000 [−0.021, 0.021]"
    assert (with_interval(None), difference(None)) == ("–", "–")
    assert digits(12.345, 0.5, show_error=False) == "12.35"


def test_the_usable_length_in_words():
    assert usable({"value": 332.4, "low": 318.0, "high": 349.0, "open": []}) == "332 [318, 349]"
    assert usable({"value": 800.0, "low": 700.0, "high": 1024.0, "open": ["high"]}) == "800 [700, ≥ 1024]"
    assert usable({"value": 1024.0, "low": 1024.0, "high": 1024.0, "open": ["value", "low", "high"]}) == "≥ 1024"
    assert usable({"value": 332.4, "low": None, "high": None, "open": []}) == "332"
    assert usable({"value": 260.4, "low": 259.6, "high": 284.0, "open": []}) == "260 [260, 284]"
    assert usable({"value": 64.0, "low": None, "high": None, "open": [], "note": "table ends at 64"}) == "64 (table)"


def test_table_of_one_run():
    lines = Report([measurement()]).text().splitlines()
    assert lines[0] == "sliding windows, text f1, 2,190 tokens scored"
    assert lines[1].split() == ["length", "perplexity", "bits/byte", "÷", "at", "256"]
    assert re.fullmatch(r" +256 +3\.\d+ ± 0\.0\d+ +1\.\d+ +1", lines[2])
    assert re.fullmatch(r" +512 +6\.\d+ ± 0\.\d+ +2\.\d+ +1\.9\d+", lines[3])  # noise is shared
    assert lines[4] == "±: standard error, [ ]: 95 % interval, over 20 documents"
    start = r"rope_seed0: within 3 % up to 26\d tokens \(1 × the training length\); at 512, 1\.9\d+ times "
    assert re.fullmatch(start + "its perplexity at 256", lines[5])


def test_errors_and_intervals_stand_below_each_other():
    rows = [["a", "9.2 ± 0.1", "1"], ["b", "10.1 ± 0.23", "1.02 [1.01, 1.03]"], ["c", "table ends at 8", "–"]]
    assert Table("", ["model", "256", "÷"], rows).text().splitlines() == [
        "model              256                  ÷",
        "a           9.2 ± 0.1      1",
        "b          10.1 ± 0.23  1.02 [1.01, 1.03]",
        "c      table ends at 8     –",
    ]


def test_every_table_says_what_its_errors_are_or_why_it_has_none():
    runs = [measurement("a", n=9), measurement("b", n=9)]
    for table in Report(runs).tables:
        assert "no errors or intervals: fewer than 10 documents are scored" in table.note
        assert not any("±" in cell or "[" in cell for row in table.rows for cell in row)
    seeds = [measurement(f"rope_seed{s}", (1.0 + s / 10, 2.0), s, "rope") for s in range(3)]
    for table in Report([*seeds, measurement("alibi")]).tables:
        cells = " ".join(cell for row in table.rows for cell in row)
        assert ("±: standard error" in table.note) == ("±" in cells)
        assert "[ ]: 95 % interval" in table.note
        assert "over 20 documents and the seeds" in table.note
        assert ("seeds of alibi: 0 against 0, 1, 2 (not paired)" in table.note) == ("minus those of" in table.title)


def test_a_training_length_that_is_not_measured_is_named():
    report = Report([measurement("a"), measurement("b"), measurement("c", train_length=1024)])
    table = next(table for table in report.tables if "at the training length, on" in table.title)
    assert [row[0] for row in table.rows] == ["a", "b"]
    assert "c: its training length, 1024, is not measured" in table.note


def test_seeds_are_one_line():
    seeds = [measurement(f"rope_seed{seed}", (1.0 + seed / 10, 2.0), seed, "rope") for seed in range(3)]
    report = Report([*seeds, measurement("alibi", (1.0, 1.0))])
    first = report.tables[0]
    assert (first.header[:2], [row[:2] for row in first.rows]) == (["model", "seeds"], [["rope", "3"], ["alibi", "1"]])
    group = report.document()["groups"][0]
    assert (group["seeds"], group["runs"]) == ([0, 1, 2], [f"rope_seed{seed}" for seed in range(3)])
    assert group["rows"][0]["perplexity"] == pytest.approx(math.exp(group["rows"][0]["nll"]))
    assert group["usable_length"]["low"] < group["usable_length"]["value"]


def test_the_tables_say_what_the_pairs_say():
    runs = [measurement("a", (1.0, 1.0)), measurement("b", (1.5, 2.0)), measurement("c", (3.0, 3.0))]
    report = Report(runs, reference="b")
    table = next(table for table in report.tables if "minus those of b" in table.title)
    assert [row[:3] for row in table.rows] == [["a", "−0.5000", "−1.000"], ["c", "+1.500", "+1.000"]]
    assert [pair["difference"] for pair in report.paired] == pytest.approx([-0.5, -1.0, 1.5, 1.0])


def recall(gain):
    return [{"distance": 16, "nll": 6.0, "stderr": 0.1, "control_nll": 6.0 + gain, "gain": gain, "gain_stderr": 0.1}]


def test_probes_are_averaged_over_seeds():
    runs = [measurement(f"rope_seed{s}", seed=s, key="rope") for s in range(3)]
    for seed, run in enumerate(runs):
        run.probes["recall"] = recall(1.0 + seed)
    table = Report(runs).tables[-1]
    assert table.rows == [["rope", "2.00 ± 0.58"]]  # standard error of 1, 2, 3
    assert Report(runs[:1]).tables[-1].rows == [["rope_seed0", "1.00 ± 0.10"]]


def test_different_tokenizers_share_no_picture_of_losses_a_token(tmp_path):
    runs = [measurement("a"), measurement("b", tokenizer="gpt2")]
    for run in runs:
        run.probes["recall"] = recall(0.0)
    report = Report(runs)
    report.write(tmp_path, html=True)
    assert {path.stem for path in tmp_path.glob("*.svg")} == {"extrapolation"}
    assert "bits per byte" in report.tables[0].title
    assert not [table for table in report.tables if "nats" in table.title]


def test_reports_are_whole_files(tmp_path):
    learned = measurement("learned", limit=256)
    Report([learned]).write(tmp_path / "one")
    written = json.loads((tmp_path / "one" / "extrapolation.json").read_text())
    assert written["rows"] == learned.rows
    assert written["usable_length"]["value"] == 256
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"extrapolation.json", "extrapolation.png"}
    Report([measurement(), learned]).write(tmp_path / "two", html=True)
    names = {path.name for path in (tmp_path / "two").iterdir()}
    plots = {f"{stem}.{ending}" for stem in ("extrapolation", "by_position") for ending in ("png", "svg")}
    assert names == {"extrapolation.json", "report.html", "tables.md"} | plots
    lines = (tmp_path / "two" / "tables.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[1] == ["---"] * len(cells[0])
    first = Report([measurement(), learned]).tables[0]
    assert [cells[0], *cells[2:4]] == [first.header, *first.rows]


def test_a_bar_in_a_name_ends_no_cell_of_tables_md():
    table = Report([measurement("a|b"), measurement("c")]).tables[0]
    (row,) = (line for line in table.markdown().splitlines() if line.startswith(r"| a\|b"))
    assert len(re.split(r"(?<!\\)\|", row)) == len(table.header) + 2


@pytest.mark.parametrize("nll", [900.0, math.nan])
def test_what_is_no_number_is_valid_json_and_can_be_drawn(nll, tmp_path):
    Report([measurement(nll=(nll, 1.0))]).write(tmp_path)
    text = (tmp_path / "extrapolation.json").read_text()
    assert json.loads(text)["rows"][0]["perplexity"] is None
    assert "Infinity" not in text
    assert "NaN" not in text


@pytest.fixture
def drawn(monkeypatch):
    figures, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **keys: (figures.append(self), real(self, *a, **keys)))
    return figures


def labels(drawn) -> list[str]:
    return [text.get_text().strip("\u200b") for text in drawn.legends[0].get_texts()]


def test_the_plot_has_a_curve_a_model_with_its_error(tmp_path, drawn):
    report = Report([measurement(), measurement("learned", limit=256)])
    plot_lengths(report.protocols, "perplexity", styles([(one.label, one.about) for one in report.groups])).save(
        tmp_path / "plot.png"
    )
    axes = drawn[0].axes[0]
    models = ["rope_seed0", "learned (table ends at 256)"]
    assert labels(drawn[0]) == [*models, "training length 256", "± one standard error"]
    assert axes.lines[0].get_xdata().tolist() == [256, 512]
    at_256 = [y for x, y in axes.collections[0].get_paths()[0].vertices if x == 256]
    row = report.groups[0].row(256)
    assert (min(at_256) + max(at_256)) / 2 == pytest.approx(row["perplexity"])
    assert (max(at_256) - min(at_256)) / 2 == pytest.approx(row["perplexity"] * row["stderr"])


def test_by_position_a_shorter_table_has_a_panel_of_its_own(tmp_path, drawn):
    """Its windows are others: its losses cannot be compared with those in longer windows."""
    report = Report([measurement(), measurement("alibi"), measurement("learned", limit=256)])
    plot = plot_positions(report.groups, styles([(one.label, one.about) for one in report.groups]))
    plot.save(tmp_path / "plot.svg")
    longer, shorter = drawn[0].axes
    shown = [[label.strip("\u200b") for label in axes.get_legend_handles_labels()[1]] for axes in (longer, shorter)]
    about = ["training length 256", "± one standard error"]
    assert shown == [["rope_seed0", "alibi", *about], ["learned", *about]]
    assert longer.lines[0].get_xdata()[:3].tolist() == [1.0, 2.5, 5.5]  # context of 1; 2 and 3; 4 to 7
    assert len(longer.collections) == 3  # bands, for single runs too, and that of the legend
    assert [Plot([panel], "").draw("svg").count(b"loss by position") for panel in plot.panels] == [1, 1]


def test_a_scheme_has_one_colour_in_every_plot_and_its_variants_other_lines(tmp_path, drawn):
    runs = [measurement(name) for name in ("alibi", "rope", "rope_wide", "fire")]
    for run in runs[1:]:  # alibi, the first, has no recall
        run.probes["recall"] = recall(1.0)
    runs.append(runs[1].truncated())
    Report(runs).write(tmp_path, html=True)
    colours = {}
    for axes in (axes for figure in drawn for axes in figure.axes):
        for line in axes.lines:
            colours.setdefault(line.get_label().strip("\u200b"), set()).add(line.get_color())
    assert {name: colours[name] for name in ("alibi", "rope", "rope_wide", "fire")} == {
        name: {COLOURS[name.split("_")[0]]} for name in ("alibi", "rope", "rope_wide", "fire")
    }
    looks = styles([(one.label, one.about) for one in Report(runs).groups])
    lines = [looks[name]["linestyle"] for name in ("alibi", "rope", "rope_wide", "rope, last 256")]
    assert lines == ["-", "-", "--", ":"]


def test_no_two_schemes_have_a_colour_in_common():
    assert {*COLOURS} <= {*SCHEMES}
    assert len({*COLOURS.values()}) == len(COLOURS)


@pytest.mark.parametrize("trained", [(256, 256), (256, 250)])
def test_training_lengths_stand_in_the_legend_once(trained, tmp_path, drawn):
    runs = [measurement(name, train_length=length) for name, length in zip("ab", trained, strict=True)]
    Report(runs).write(tmp_path)
    lengths = sorted({*trained})
    assert labels(drawn[0]).count(f"training length {', '.join(map(str, lengths))}") == 1
    dashed = [line.get_xdata()[0] for line in drawn[0].axes[0].lines if line.get_color() == GREY]
    assert dashed == lengths
    assert not drawn[0].axes[0].texts


@pytest.mark.parametrize("names", [("rope", "alibi"), ("rope", "rope")])
def test_attention_maps_share_one_scale(names, tmp_path, drawn):
    runs = [measurement(name, key=f"{i} {name}", tokenizer=f"t{i}") for i, name in enumerate(names)]
    for run, weights in zip(runs, ([[[0.9, 0.05]]], [[[0.5, 0.001]]]), strict=True):
        run.probes["attention"] = {"edges": [0, 1, 2], "length": 2, "weights": weights}
    Report(runs).write(tmp_path, html=True)
    maps = [axes.images[0] for figure in drawn for axes in figure.axes if axes.images]
    assert {(shown.norm.vmin, shown.norm.vmax) for shown in maps} == {(0.001, 0.9)}
    assert len(maps) == 6  # PNG, SVG, and one by one for the page
    assert [shown.get_array().max() for shown in maps[:2]] == [0.9, 0.5]


def test_long_names_that_differ_at_their_end_have_a_curve_each_in_the_legend(tmp_path, drawn):
    names = [f"rope_with_{'a_very_' * 12}long_name (outputs/{end})" for end in "ab"]
    Report([measurement(name) for name in names]).write(tmp_path)
    assert len({label for label in labels(drawn[0]) if label.startswith("rope_with")}) == 2


def test_plots_of_an_earlier_measurement_do_not_stay_beside_the_report(tmp_path):
    run = measurement()
    run.probes["recall"] = recall(1.0)
    Report([run]).write(tmp_path, html=True)
    assert (tmp_path / "recall.svg").exists()
    Report([measurement()]).write(tmp_path, html=True)
    assert {path.stem for path in tmp_path.glob("*.svg")} == {"extrapolation", "by_position"}


@pytest.mark.parametrize("name", ["cost$\\alp$", "_hidden", "größe=3 {x} %s", "<b>&amp;", "x" * 400])
def test_any_name_can_be_shown(name, tmp_path):
    Report([measurement(name), measurement("other")]).write(tmp_path, html=True)
    assert "<b>" not in (tmp_path / "report.html").read_text()
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)  # a browser shows nothing of what is no XML


def test_the_page_begins_with_a_sentence_a_model_and_ends_with_what_it_was_made_with(tmp_path):
    runs = [measurement("rope"), measurement("alibi", (1.18, 1.18)), measurement("learned", limit=256)]
    for run in runs:
        run.probes["recall"] = recall(1.0)
    runs.append(runs[0].truncated())
    report = Report(runs, notes=["take care"], commands=["train.py <pos=rope>"])
    report.write(tmp_path, html=True)
    page = (tmp_path / "report.html").read_text()
    rope, alibi, learned = re.findall("<li>(.*?)</li>", page)
    assert re.fullmatch(
        r"rope: within 3 % up to 26\d tokens \(1 × the training length\); at 512, 1.9\d+ times its .*", rope
    )
    assert alibi.startswith(
        "alibi: within 3 % up to at least 512 tokens (2 × the training length); at 512, 1.000 times"
    )
    assert learned == "learned: within 3 % up to the end of its table, 256 tokens (1 × the training length)"
    tags = re.findall("<(li|p|figure|table|h2|details|pre)[ >]", page)
    order = [tag for i, tag in enumerate(tags) if i == 0 or tag != tags[i - 1]]
    tables = ["table", "p"] * len(report.tables)
    assert order == ["li", "p", "figure", *tables, "figure", "details", "pre"]  # plots of probes last
    assert page.index("take care") < page.index("<figure")
    assert page.index("train.py &lt;pos=rope&gt;") > page.index("<details")


def test_the_page_says_how_much_validation_text_was_trained_on(tmp_path):
    Report([measurement(val_covered=0.1234, val_covered_of_train=0.5)]).write(tmp_path, html=True)
    assert "at least 12.3 % of the text also occurs in the training text" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_compared_is_said():
    made = measurement
    assert comparability([made(), made()]) == []
    assert "not all of these runs" in comparability([made(), made(fingerprint="f2", trained_on="f2")])[0]
    (mixed,) = comparability([made(), made(documents="across the borders of 20 documents")])
    assert "scored within documents, others across" in mixed
    (note,) = comparability([made(), made(tokenizer="gpt2")])
    assert "only bits per byte" in note
    assert "in each run's own tokens" in note
    assert "was trained on data f1" in comparability([made(fingerprint="f2")])[0]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_page_opens_in_a_browser_with_its_images_and_without_a_request(tmp_path):
    seeds = [measurement(f"rope_seed{seed}", (1.0 + seed, 2.0), seed, "rope") for seed in range(2)]
    runs = [*seeds, measurement("alibi", (1.0, 1.9))]
    Report(runs, commands=["train.py <pos=rope>"]).write(tmp_path, html=True)
    # Sorts the first table by its last column, then writes what the page holds into its title, which is dumped.
    probe = """<script>addEventListener("load", () => {
        const head = document.querySelectorAll("table")[0].tHead.rows[0]; head.cells[head.cells.length - 1].click();
        const images = [...document.images].map(i => i.complete && i.naturalWidth > 100);
        const fetched = performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:"));
        const order = [...document.querySelectorAll("table")[0].tBodies[0].rows].map(r => r.cells[0].textContent);
        document.title = JSON.stringify({images, fetched, order, tables: document.querySelectorAll("table").length});
    })</script>"""
    page = tmp_path / "report.html"
    text = page.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)|https?:""", text)
    page.write_text(text.replace("</html>", probe + "</html>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(re.search("<title>(.*?)</title>", done.stdout)[1])
    assert found == {"images": [True, True], "fetched": [], "order": ["alibi", "rope"], "tables": 4}
