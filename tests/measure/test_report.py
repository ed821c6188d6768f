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
from PIL import Image

from measure.plots import plot_lengths, plot_positions
from measure.protocols import Scored, cut, no_row, stretches
from measure.report import Report, comparability
from measure.results import Measurement, paired
from measure.tables import Table, difference, digits, ratio, settings_apart, with_error

LENGTHS = (256, 512)


def measurement(name="rope_seed0", nll=(1.18, 1.87), seed=0, key=None, limit=None, **change) -> Measurement:
    """A made-up result: the losses of each length are nll a token, with noise that both lengths share."""
    rng, scored, rows = np.random.default_rng(3), {}, []
    for length, mean in zip(LENGTHS, nll, strict=True):
        if limit and length > limit:
            rows.append(no_row(length, limit, with_bytes=True))
            continue
        windows = cut(stretches(5000, 512), length, 512, "sliding", 128)
        noise = rng.normal(0, 0.1, len(windows.spans))
        scored[length] = Scored(windows, windows.counts * (mean + noise))
        rows.append(scored[length].row(np.arange(5001)))
        if length != 256:
            rows[-1]["against_train_length"] = paired([scored[length]], [scored[256]])
    bins = [{"from": 2**k - 1, "to": 2 ** (k + 1) - 1, "nll": 2 - k / 10, "stderr": 0.1, "scored": 9} for k in range(9)]
    common = {"protocol": "sliding", "train_length": 256, "tokenizer": "bytes", "corpus": "stdlib", "scaling": None}
    common |= {"fingerprint": "f1", "trained_on": "f1", "precision": "fp32", "documents": "within documents"}
    result = {"run": name, "folder": f"outputs/{name}", **common, "rows": rows, "by_position": bins, **change}
    return Measurement(result, scored, seed, key or name)


@pytest.mark.parametrize(
    ("perplexity", "stderr", "text"),
    [
        (3.25412, 0.01, "3.254 ± 0.033"),
        (3.25412, 0.1, "3.25 ± 0.33"),
        (1234.5, 0.1, "1234 ± 123"),
        (3.25412, None, "3.254"),
        (3.25412, 1e-6, "3.2541200 ± 0.0000033"),
        (3.25412, 0.0, "3.254"),
        (14.3, None, "14.30"),
        (1234.5, None, "1234"),
        (math.inf, 0.1, "inf"),
        (math.nan, math.nan, "nan"),
    ],
)
def test_no_more_digits_than_the_error_allows(perplexity, stderr, text):
    assert with_error({"nll": 1.0, "perplexity": perplexity, "stderr": stderr}) == text


def test_intervals_show_two_digits_of_their_half():
    pair = {"difference": math.log(1.1912), "low": math.log(1.1634), "high": math.log(1.2198), "spread": None}
    assert ratio(pair) == "1.191 [1.163, 1.220]"
    assert ratio({**pair, "low": None, "high": None}) == "1.19"
    assert ratio({"difference": 900.0, "low": 800.0, "high": 1000.0, "spread": None}) == "inf"
    pair = {"difference": -0.5, "low": -0.7, "high": -0.3, "spread": 0.0123}
    assert difference(pair) == "−0.50 ± 0.20 (0.012)"
    assert difference({"difference": 0.5, "low": None, "high": None, "spread": None}) == "+0.5000"
    assert difference({"difference": 0.0, "low": 0.0, "high": 0.0, "spread": None}) == "+0.000"
    assert difference({"difference": -0.0001, "low": -0.0211, "high": 0.0209, "spread": None}) == "+0.000 ± 0.021"
    assert (ratio(None), difference(None)) == ("–", "–")
    assert digits(12.345, 0.5, show_error=False) == "12.35"


def test_table_of_one_run():
    lines = Report([measurement()]).text().splitlines()
    assert lines[0] == "sliding windows"
    assert lines[1].split() == ["length", "perplexity", "bits/byte", "÷", "at", "256", "[95", "%]", "scored"]
    assert re.fullmatch(r" +256 +3\.\d+ ± 0\.0\d+ +1\.\d+ +1 +\d,\d{3}", lines[2])
    assert re.fullmatch(r" +512 +6\.\d+ ± 0\.\d+ +2\.\d+ +1\.9\d+ \[1\.\d+, 2\.\d+\] +\d,\d{3}", lines[3])


def test_tables_side_by_side_say_where_a_table_ends():
    text = Report([measurement(), measurement("learned", limit=256)]).text()
    assert "sliding windows: perplexity\n" in text
    assert "sliding windows: bits per byte\n" in text
    learned = next(line for line in text.splitlines() if line.startswith("learned "))
    assert learned.endswith("–")
    assert "learned: table ends at 256" in text


def test_seeds_are_one_line_with_their_spread():
    seeds = [measurement(f"rope_seed{seed}", (1.0 + seed / 10, 2.0), seed, "rope") for seed in range(3)]
    report = Report([*seeds, measurement("alibi", (1.0, 1.0))])
    assert [line.split()[:2] for line in report.text().splitlines()[1:4]] == [
        ["model", "seeds"],
        ["rope", "3"],
        ["alibi", "1"],
    ]
    group = report.document()["groups"][0]
    values = [result["rows"][0]["perplexity"] for result in report.results[:3]]
    assert group["rows"][0]["perplexity_error"] == pytest.approx(np.std(values, ddof=1))
    assert report.labels == {"rope": "rope", "alibi": "alibi"}


def test_tables_are_sorted_by_any_column():
    table = Table("", ["model", "256"], [["b", "10.1 ± 0.2"], ["c", "–"], ["a", "9.2 ± 0.1"], ["d", "−0.3 [−1, 0]"]])
    assert [row[0] for row in table.sorted("256").rows] == ["d", "a", "b", "c"]
    assert [row[0] for row in table.sorted("model").rows] == ["a", "b", "c", "d"]
    runs = [measurement("b", (1.0, 3.0)), measurement("a", (2.0, 1.0))]
    first = lambda sort: Report(runs, sort=sort).tables[0].rows[0][0]  # noqa: E731
    assert (first(None), first("model"), first("256"), first("512")) == ("b", "a", "b", "a")


def test_the_reference_can_be_chosen():
    runs = [measurement("a", (1.0, 1.0)), measurement("b", (2.0, 2.0))]
    assert Report(runs).paired[0]["difference"] == pytest.approx(1.0)
    assert Report(runs, reference="b").paired[0]["difference"] == pytest.approx(-1.0)


def test_the_tables_say_what_the_pairs_say():
    runs = [measurement("a", (1.0, 1.0)), measurement("b", (1.5, 2.0)), measurement("c", (3.0, 3.0))]
    report = Report(runs, reference="b")
    table = next(table for table in report.tables if "minus those of b" in table.title)
    assert [(row[0], row[1].split()[0], row[2].split()[0]) for row in table.rows] == [
        ("a", "−0.5000", "−1.000"),
        ("c", "+1.500", "+1.000"),
    ]


def test_probes_are_averaged_over_seeds():
    rows = lambda gain: [  # noqa: E731
        {"distance": 16, "nll": 6.0, "stderr": 0.1, "control_nll": 6.0 + gain, "gain": gain, "gain_stderr": 0.1}
    ]
    runs = [measurement(f"rope_seed{s}", seed=s, key="rope", recall=rows(1.0 + s)) for s in range(3)]
    table = next(table for table in Report(runs).tables if "recall" in table.title)
    assert table.rows == [["rope", "2.0 ± 1.0"]]
    (alone,) = Report(runs[:1]).tables[1].rows
    assert alone == ["rope_seed0", "1.00 ± 0.10"]


def test_different_tokenizers_share_no_picture_of_losses_a_token(tmp_path):
    recall = [{"distance": 16, "nll": 6.0, "stderr": 0.1, "control_nll": 6.0, "gain": 0.0, "gain_stderr": 0.1}]
    report = Report([measurement("a", recall=recall), measurement("b", tokenizer="gpt2", recall=recall)])
    report.write(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.svg")} == {"extrapolation"}
    assert next(table.title for table in report.tables) == "sliding windows: bits per byte"
    assert not [table for table in report.tables if "nats" in table.title]


def test_settings_that_differ_are_shown():
    table = settings_apart({"a": {"pos": {"name": "rope"}, "lr": 1}, "b": {"pos": {"name": "alibi", "x": 2}, "lr": 1}})
    assert table.header == ["run", "pos.name", "pos.x"]
    assert table.rows == [["a", "rope", "–"], ["b", "alibi", "2"]]
    assert settings_apart({"a": {"lr": 1}, "b": {"lr": 1}}) is None


def test_reports_are_whole_files(tmp_path):
    learned = measurement("learned", limit=256)
    Report([learned]).write(tmp_path / "one", html=False)
    written = json.loads((tmp_path / "one" / "extrapolation.json").read_text())
    assert written["rows"][1] == {**learned.result["rows"][1]}
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"extrapolation.json", "extrapolation.png"}
    Report([measurement(), learned]).write(tmp_path / "two")
    names = {path.name for path in (tmp_path / "two").iterdir()}
    plots = {f"{stem}.{ending}" for stem in ("extrapolation", "by_position") for ending in ("png", "svg")}
    assert names == {"extrapolation.json", "report.html"} | plots
    for path in tmp_path.rglob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 500
    for path in tmp_path.rglob("*.svg"):
        assert path.read_text().startswith("<?xml")


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
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **keys: (figures.append(self), real(self, *args, **keys))
    )
    return figures


def test_the_plot_has_a_curve_a_model_and_a_line_at_the_training_length(tmp_path, drawn):
    runs = [measurement(), measurement("learned", limit=256)]
    plot_lengths(Report(runs).protocols, "perplexity", tmp_path / "plot.png")
    axes = drawn[0].axes[0]
    assert axes.get_xscale() == "log"
    labels = [text.get_text().strip("\u200b") for text in axes.get_legend().get_texts()]
    assert labels == ["rope_seed0", "learned (table ends at 256)"]
    curves = [container.lines[0].get_xdata().tolist() for container in axes.containers]
    assert curves == [[256, 512], [256]]
    assert any(line.get_linestyle() == "--" and set(line.get_xdata()) == {256} for line in axes.lines)


def test_seeds_are_a_curve_with_a_band(tmp_path, drawn):
    seeds = [measurement(f"rope_seed{seed}", (1.0 + seed, 2.0), seed, "rope") for seed in range(3)]
    report = Report(seeds)
    plot_lengths(report.protocols, "perplexity", tmp_path / "plot.svg")
    plot_positions(report.protocols["sliding"], tmp_path / "positions.svg")
    (axes,) = drawn[0].axes
    (band,) = axes.collections
    values = [result["rows"][0]["perplexity"] for result in report.results]
    at_256 = [y for x, y in band.get_paths()[0].vertices if x == 256]
    assert max(at_256) - min(at_256) == pytest.approx(2 * np.std(values, ddof=1))
    curve = drawn[1].axes[0].lines[0]
    assert curve.get_xdata()[:3].tolist() == [1.0, 2.5, 5.5]  # context of 1; 2 and 3; 4 to 7
    assert curve.get_ydata()[:3].tolist() == pytest.approx([2.0, 1.9, 1.8])


@pytest.mark.parametrize("name", ["cost$\\alp$", "_hidden", "größe=3 {x} %s", "<b>&amp;", "\x07\x1b", "x" * 400])
def test_any_name_can_be_shown(name, tmp_path):
    Report([measurement(name), measurement("other")]).write(tmp_path)
    assert (tmp_path / "extrapolation.png").stat().st_size > 5000
    assert "<b>" not in (tmp_path / "report.html").read_text()
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)  # a browser shows nothing of what is no XML


def test_what_cannot_be_compared_is_said():
    result = lambda **change: measurement(**change).result  # noqa: E731
    assert comparability([result(), result()]) == []
    assert (
        "not all of these runs are measured on the same data"
        in comparability([result(), result(fingerprint="f2", trained_on="f2")])[0]
    )
    assert "bits per byte only" in comparability([result(), result(tokenizer="gpt2")])[0]
    assert "was trained on data f1" in comparability([result(fingerprint="f2")])[0]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_page_opens_in_a_browser_with_its_images_and_without_a_request(tmp_path):
    seeds = [measurement(f"rope_seed{seed}", (1.0 + seed, 2.0), seed, "rope") for seed in range(2)]
    runs = [*seeds, measurement("alibi", (1.0, 1.1))]
    settings = {"rope_seed0": {"seed": 0}, "alibi": {"seed": 0, "pos": "alibi"}}
    Report(runs, commands=["train.py <pos=rope>"], settings=settings).write(tmp_path)
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
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(re.search("<title>(.*?)</title>", done.stdout)[1])
    assert found == {"images": [True, True], "fetched": [], "order": ["alibi", "rope"], "tables": 5}
