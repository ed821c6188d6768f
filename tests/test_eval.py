"""Measurements against plain loops that score one token at a time, and what is shown of them."""

import json
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from eval import (
    comparability,
    default_lengths,
    evaluate_lengths,
    plot,
    ratio_and_error,
    table,
    window_spans,
    with_error,
    write_report,
)
from tests.helpers import random_tokens, small_model

ODD_SIZES = [50, 64, 65, 97]
LENGTHS = [8, 10, 24]


def loss_of_one_token(model, tokens, target, context):
    """-log p(tokens[target] | the `context` tokens before it), from a pass over just these."""
    logits = model(torch.from_numpy(tokens[None, target - context : target].astype(np.int64)))[0, -1]
    row = logits.tolist()
    return math.log(sum(math.exp(value) for value in row)) - row[tokens[target]]


def slow_nonoverlapping(model, tokens, length):
    """[(loss, window)] of every token but the first; its context is what lies before it in its window of `length`."""
    return [
        (loss_of_one_token(model, tokens, target, (target - 1) % length + 1), (target - 1) // length)
        for target in range(1, len(tokens))
    ]


def slow_sliding(model, tokens, length, longest, stride):
    """[(loss, window)] of the targets that every length scores; context grows by one within each block of `stride`."""
    first, scored = longest - stride + 1, []
    for target in range(first, len(tokens)):
        block, within = divmod(target - first, stride)
        in_block = min(stride, len(tokens) - first - block * stride)
        scored.append((loss_of_one_token(model, tokens, target, length - in_block + 1 + within), block))
    return scored


def slow_error(scored):
    """The ratio estimator's standard error, written out."""
    windows = sorted({window for _, window in scored})
    mean = sum(loss for loss, _ in scored) / len(scored)
    total = 0.0
    for window in windows:
        inside = [loss for loss, at in scored if at == window]
        total += (sum(inside) - mean * len(inside)) ** 2
    return math.sqrt(total * len(windows) / (len(windows) - 1)) / len(scored)


@pytest.fixture(scope="module")
def model():
    return small_model({"name": "rope"}, train_length=8)


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding"])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_every_number_is_the_slow_loops(model, size, protocol, stride):
    tokens = random_tokens(model, 1, size)[0].numpy()
    rows = evaluate_lengths(model, tokens, LENGTHS, protocol=protocol, stride=stride)
    assert [row["length"] for row in rows] == LENGTHS
    for row in rows:
        if protocol == "sliding":
            scored = slow_sliding(model, tokens, row["length"], max(LENGTHS), stride)
            assert row["scored"] == size - (max(LENGTHS) - stride + 1)
        else:
            scored = slow_nonoverlapping(model, tokens, row["length"])
            assert row["scored"] == size - 1
        assert row["scored"] == len(scored)
        mean = sum(loss for loss, _ in scored) / len(scored)
        assert row["nll"] == pytest.approx(mean, abs=1e-9)
        assert row["perplexity"] == pytest.approx(math.exp(mean), rel=1e-9)
        assert row["stderr"] == pytest.approx(slow_error(scored), rel=1e-6)


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding"])
def test_results_do_not_depend_on_batches_dtypes_or_the_kind_of_array(model, protocol):
    tokens = random_tokens(model, 1, 97)[0]
    expected = evaluate_lengths(model, tokens, LENGTHS, protocol, 3)
    for given in (tokens.numpy().astype(np.uint16), tokens.int()):
        assert evaluate_lengths(model, given, LENGTHS, protocol, 3) == expected
    for batch_tokens in (1, 30, 50):
        for row, wanted in zip(
            evaluate_lengths(model, tokens, LENGTHS, protocol, 3, batch_tokens=batch_tokens), expected, strict=True
        ):
            assert row["nll"] == pytest.approx(wanted["nll"], abs=1e-12)
            assert row["stderr"] == pytest.approx(wanted["stderr"], abs=1e-12)


def test_two_windows_of_unequal_size_are_weighted_by_their_tokens():
    """A mean of window means would say 1.5."""
    nll, stderr = ratio_and_error(np.array([9.0, 2.0]), np.array([9, 1]))
    assert nll == pytest.approx(1.1)
    # residuals 9 - 9.9 and 2 - 1.1: ±0.9, so sqrt(2 · (0.81 + 0.81)) / 10
    assert stderr == pytest.approx(math.sqrt(2 * 1.62) / 10)
    assert ratio_and_error(np.array([3.0]), np.array([2])) == (1.5, None)


def test_equal_windows_have_the_textbook_error():
    rng = np.random.default_rng(0)
    losses = rng.normal(8.0, 1.0, 50)
    nll, stderr = ratio_and_error(losses, np.full(50, 4))
    assert nll == pytest.approx(losses.mean() / 4)
    assert stderr == pytest.approx(losses.std(ddof=1) / math.sqrt(50) / 4)


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding"])
def test_a_cap_keeps_windows_spread_over_the_text_and_the_same_at_all_lengths(protocol):
    for length in LENGTHS:
        everything = window_spans(1000, LENGTHS, length, protocol, 4).tolist()
        capped = window_spans(1000, LENGTHS, length, protocol, 4, max_targets=80).tolist()
        assert all(span in everything for span in capped)
        assert capped[0] == everything[0]
        assert capped[-1] == everything[-1]
        assert sum(scored for _, _, scored in capped) <= 80
    ends = {
        tuple(
            start + size - scored for start, size, scored in window_spans(1000, LENGTHS, n, "sliding", 4, 80).tolist()
        )
        for n in LENGTHS
    }
    assert len(ends) == 1


def test_learned_positions_end_with_their_table():
    model = small_model({"name": "learned"}, train_length=10)
    tokens = random_tokens(model, 1, 97)[0].numpy()
    rows = evaluate_lengths(model, tokens, LENGTHS, "sliding", 3, bytes_per_token=np.ones(61, dtype=np.int64))
    past = {"nll": None, "perplexity": None, "stderr": None, "bits_per_byte": None, "scored": 0}
    assert rows[2] == {"length": 24, "note": "table ends at 10", **past}
    # the other lengths score the tokens that all lengths score, so that runs can be compared
    scored = slow_sliding(model, tokens, 10, 24, 3)
    assert rows[1]["nll"] == pytest.approx(sum(loss for loss, _ in scored) / len(scored), abs=1e-9)


def test_bits_per_byte_count_the_bytes_of_scored_tokens(model):
    tokens = random_tokens(model, 1, 50)[0].numpy()
    sizes = np.arange(61)
    row = evaluate_lengths(model, tokens, [10], "nonoverlapping", bytes_per_token=sizes)[0]
    n_bytes = sum(int(token) for token in tokens[1:])
    assert row["bits_per_byte"] == pytest.approx(row["nll"] * 49 / math.log(2) / n_bytes)


def test_evaluation_leaves_the_model_as_it_was():
    model = small_model({"name": "rope"}, dropout=0.5).train()
    tokens = random_tokens(model, 1, 50)[0]
    state = torch.get_rng_state()
    assert evaluate_lengths(model, tokens, [10], stride=5) == evaluate_lengths(model, tokens, [10], stride=5)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": []}, r"lengths=\[\]"),
        ({"lengths": [0]}, r"lengths=\[0\]"),
        ({"lengths": [2.5]}, r"lengths=\[2\.5\]"),
        ({"lengths": [50]}, "window of 50 .* 50 tokens"),
        ({"protocol": "slide"}, "sliding or nonoverlapping"),
        ({"stride": 0}, "stride=0"),
        ({"stride": 9}, "stride=9.* 8"),
        ({"max_targets": 0}, "max_targets=0"),
        ({"tokens": torch.zeros((2, 50), dtype=torch.int64)}, "one dimension"),
        ({"tokens": torch.zeros(50)}, "integers"),
        ({"tokens": torch.full((50,), 61)}, "token id 61"),
    ],
    ids=str,
)
def test_evaluation_refuses(model, change, words):
    given = {"tokens": random_tokens(model, 1, 50)[0], "lengths": [8, 16], "stride": 4, **change}
    with pytest.raises(ValueError, match=words):
        evaluate_lengths(model, **given)


def test_a_text_of_one_window_is_enough(model):
    tokens = random_tokens(model, 1, 9)[0].numpy()
    for protocol in ("sliding", "nonoverlapping"):
        row = evaluate_lengths(model, tokens, [8], protocol, stride=8)[0]
        assert (row["scored"], row["stderr"]) == (8, None)


def result(name="rope", **change):
    rows = [
        {"length": 256, "nll": math.log(3.254), "perplexity": 3.254, "stderr": 0.01, "scored": 9, "bits_per_byte": 1.7},
        {"length": 512, "nll": math.log(6.508), "perplexity": 6.508, "stderr": 0.02, "scored": 9, "bits_per_byte": 2.7},
    ]
    common = {"protocol": "sliding", "train_length": 256, "tokenizer": "bytes", "corpus": "stdlib"}
    common |= {"fingerprint": "f1", "trained_on": "f1"}
    return {"run": name, "folder": f"outputs/{name}", **common, "rows": rows, **change}


def ended(name="learned"):
    gone = {"nll": None, "perplexity": None, "stderr": None, "bits_per_byte": None, "scored": 0}
    return result(name, rows=[result()["rows"][0], {"length": 512, **gone, "note": "table ends at 256"}])


@pytest.mark.parametrize(
    ("perplexity", "stderr", "text"),
    [
        (3.25412, 0.01, "3.254 ± 0.033"),
        (3.25412, 0.1, "3.25 ± 0.33"),
        (1234.5, 0.1, "1234 ± 123"),
        (3.25412, None, "3.254"),
        (3.25412, 1e-6, "3.2541200 ± 0.0000033"),
        (3.25412, 0.0, "3.254"),
        (math.inf, 0.1, "inf"),
    ],
)
def test_no_more_digits_than_the_error_allows(perplexity, stderr, text):
    assert with_error({"nll": math.log(perplexity), "perplexity": perplexity, "stderr": stderr}) == text


def test_table_of_one_run():
    assert table([result()]).splitlines() == [
        "length     perplexity  bits/byte  ÷ at 256",
        "   256  3.254 ± 0.033      1.700         1",
        "   512    6.51 ± 0.13      2.700         2",
    ]


def test_table_side_by_side_says_where_a_table_ends():
    assert table([result(), ended()]).splitlines() == [
        "perplexity",
        "length           rope            learned",
        "   256  3.254 ± 0.033      3.254 ± 0.033",
        "   512    6.51 ± 0.13  table ends at 256",
        "",
        "bits per byte",
        "length   rope  learned",
        "   256  1.700    1.700",
        "   512  2.700         ",
    ]


def test_reports_are_whole_files(tmp_path):
    write_report([ended()], tmp_path / "one")
    written = json.loads((tmp_path / "one" / "extrapolation.json").read_text())
    assert written["rows"][1]["perplexity"] is None
    assert written["rows"][1]["note"] == "table ends at 256"
    write_report([result(), ended()], tmp_path / "two")
    assert [r["run"] for r in json.loads((tmp_path / "two" / "extrapolation.json").read_text())] == ["rope", "learned"]
    for folder in ("one", "two"):
        with Image.open(tmp_path / folder / "extrapolation.png") as image:
            assert min(image.size) > 500
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [
            "extrapolation.json",
            "extrapolation.png",
        ]


def test_infinite_perplexity_is_valid_json_and_can_be_drawn(tmp_path):
    rows = [{"length": 256, "nll": 900.0, "perplexity": math.inf, "stderr": 0.1, "scored": 9, "bits_per_byte": 1.0}]
    write_report([result(rows=rows)], tmp_path)
    assert json.loads((tmp_path / "extrapolation.json").read_text())["rows"][0]["perplexity"] is None
    assert "Infinity" not in (tmp_path / "extrapolation.json").read_text()


def test_the_plot_has_a_curve_a_run_and_a_line_at_the_training_length(tmp_path, monkeypatch):
    drawn, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **keys: (drawn.append(self), real(self, *args, **keys)))
    plot([result(), ended()], tmp_path / "plot.png")
    axes = drawn[0].axes[0]
    assert axes.get_xscale() == "log"
    labels = [text.get_text().strip("\u200b") for text in axes.get_legend().get_texts()]
    assert labels == ["rope", "learned (table ends at 256)"]
    curves = [container.lines[0].get_xdata().tolist() for container in axes.containers]
    assert curves == [[256, 512], [256]]
    assert any(line.get_linestyle() == "--" and set(line.get_xdata()) == {256} for line in axes.lines)


@pytest.mark.parametrize("name", ["cost$\\alp$", "_hidden", "größe=3 {x} %s"])
def test_any_name_can_be_drawn(name, tmp_path):
    plot([result(name)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_what_cannot_be_compared_is_said():
    assert comparability([result("a"), result("b")]) == []
    assert "cannot be compared" in comparability([result("a"), result("b", fingerprint="f2", trained_on="f2")])[0]
    assert "bits per byte" in comparability([result("a"), result("b", tokenizer="gpt2")])[0]
    assert "was trained on data f1" in comparability([result("a", fingerprint="f2")])[0]


def test_default_lengths():
    assert default_lengths(256) == [256, 320, 384, 512, 1024]
    assert default_lengths(1) == [1, 2, 4]
