"""Measurements against plain loops that score one token at a time."""

import math

import numpy as np
import pytest
import torch

from measure import Scoring, Text, evaluate_lengths, measure
from measure.windows import cut, widening_edges
from tests.helpers import random_tokens, small_model

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


@pytest.mark.parametrize("size", [50, 65, 97])
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
def test_results_do_not_depend_on_batches_dtypes_or_the_kind_of_array(model, protocol, monkeypatch):
    tokens = random_tokens(model, 1, 97)[0]
    expected = evaluate_lengths(model, tokens, LENGTHS, protocol, 3)
    for given in (tokens.numpy().astype(np.uint16), tokens.int()):
        assert evaluate_lengths(model, given, LENGTHS, protocol, 3) == expected
    for batch_tokens in (1, 30, 50):
        monkeypatch.setattr("measure.windows.BATCH_TOKENS", batch_tokens)
        for row, wanted in zip(evaluate_lengths(model, tokens, LENGTHS, protocol, 3), expected, strict=True):
            assert row["nll"] == pytest.approx(wanted["nll"], abs=1e-12)
            assert row["stderr"] == pytest.approx(wanted["stderr"], abs=1e-12)


@pytest.mark.parametrize(("protocol", "block"), [("nonoverlapping", 24), ("sliding", 4)])
@pytest.mark.parametrize("cap", [1, 2, 20, 5000])
def test_a_cap_keeps_windows_spread_over_the_text_and_the_same_targets_at_all_lengths(protocol, block, cap):
    pieces = np.array([[0, 30], [40, 300], [300, 1000]])
    scored = {}
    for length in LENGTHS:
        everything, capped = (cut(pieces, length, max(LENGTHS), protocol, 4, most) for most in (None, cap))
        targets = [t for _, first, end in capped.tolist() for t in range(first, end)]
        assert len(set(targets)) == len(targets)
        all_targets = {t for _, first, end in everything.tolist() for t in range(first, end)}
        assert set(targets) <= all_targets
        assert min(cap * block, len(all_targets) - 3 * block) - block < len(targets) <= cap * block
        sizes = {end - first for _, first, end in capped.tolist()}
        assert protocol == "sliding" or length < block or sizes == {block}  # the longest are all full
        assert min(targets) == min(all_targets)
        if cap > 1:  # up to the last, or the last whole window
            assert max(targets) > max(all_targets) - block
        for start, first, end in capped.tolist():
            assert end - 1 - start <= length
            assert any(low <= start and end <= high for low, high in pieces.tolist())
            assert protocol == "sliding" or first == start + 1
        scored[length] = set(targets)
    assert scored[8] == scored[10] == scored[24]


def test_capped_windows_are_evenly_spread_and_shorter_ones_begin_with_them():
    whole = np.array([[0, 2401]])  # 100 windows of 24
    assert cut(whole, 24, 24, "nonoverlapping", 1, 4)[:, 0].tolist() == [0, 33 * 24, 66 * 24, 99 * 24]
    assert cut(whole, 10, 24, "nonoverlapping", 1, 1).tolist() == [[0, 1, 11], [10, 11, 21], [20, 21, 25]]
    assert cut(whole, 10, 24, "sliding", 8, 3).tolist() == [[14, 17, 25], [1198, 1201, 1209], [2390, 2393, 2401]]


def test_learned_positions_end_with_their_table():
    model = small_model({"name": "learned"}, train_length=10)
    tokens = random_tokens(model, 1, 97)[0].numpy()
    rows = evaluate_lengths(model, tokens, LENGTHS, "sliding", 3, bytes_per_token=np.ones(61, dtype=np.int64))
    past = dict.fromkeys(("nll", "perplexity", "stderr", "low", "high", "bits_per_byte")) | {"scored": 0}
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
        ({"lengths": [0]}, "lengths=0"),
        ({"lengths": [2.5]}, r"lengths=2\.5"),
        ({"lengths": [50]}, "window of 50 .* 50 tokens"),
        ({"protocol": "slide"}, "sliding or nonoverlapping"),
        ({"stride": 0}, "stride=0"),
        ({"stride": 9}, "stride=9.* 8"),
        ({"stride": 2.5}, r"stride=2\.5"),
        ({"max_windows": 2.5}, r"max_windows=2\.5"),
        ({"bytes_per_token": np.ones(60, dtype=np.int64)}, "60 entries for 61 ids"),
        ({"max_windows": 0}, "max_windows=0"),
        ({"tokens": torch.zeros((2, 50), dtype=torch.int64)}, "one dimension"),
        ({"tokens": torch.zeros(50)}, "integers"),
        ({"tokens": torch.full((50,), 61)}, "token id 61"),
        ({"documents": [0, 16, 32, 48]}, "no document holds a window of 16 .*documents=across"),
        ({"documents": [0, 50, 40]}, "growing"),
        ({"documents": [0, 60]}, "from 0 to 50 at most"),
    ],
    ids=str,
)
def test_evaluation_refuses(model, change, words):
    given = {"tokens": random_tokens(model, 1, 50)[0], "lengths": [8, 16], "stride": 4, **change}
    with pytest.raises(ValueError, match=words):
        evaluate_lengths(model, **given)


def test_the_bins_widen():
    assert widening_edges(1) == [0, 1]
    assert widening_edges(40) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]


DOCUMENTS = np.array([0, 30, 41, 75, 120])


def measured(model, tokens, **scoring):
    text = Text(tokens, DOCUMENTS, np.arange(61), {"corpus": "text", "fingerprint": "f", "tokenizer": "t"})
    return measure(model, text, Scoring(**{"lengths": (8, 10, 24), "stride": 3, **scoring}), {"run": "rope"})


def by_document(scored):
    """Sums of [(loss, target)] over the documents that the targets lie in."""
    found = {}
    for loss, target in scored:
        document = int(np.searchsorted(DOCUMENTS, target, side="right"))
        found[document] = found.get(document, 0.0) + loss
    return [found[document] for document in sorted(found)]


@pytest.mark.parametrize("documents", ["within", "across"])
def test_a_measurement_keeps_the_losses_of_each_document(model, documents):
    """Tokens belong to documents, not windows, which may lie across a border: a plain loop over tokens."""
    tokens = random_tokens(model, 1, 120)[0].numpy()
    both = measured(model, tokens, protocols=("sliding", "nonoverlapping"), documents=documents)
    pieces = [(0, 120)] if documents == "across" else [(0, 30), (41, 75), (75, 120)]
    for length in (8, 10, 24):
        sliding, side_by_side = [], []
        for begin, end in pieces:
            piece = tokens[begin:end]
            losses = [loss for loss, _ in slow_sliding(model, piece, length, 24, 3)]
            sliding += [(loss, begin + 22 + i) for i, loss in enumerate(losses)]
            losses = [loss for loss, _ in slow_nonoverlapping(model, piece, length)]
            side_by_side += [(loss, begin + 1 + i) for i, loss in enumerate(losses)]
        for measurement, scored in zip(both, (sliding, side_by_side), strict=True):
            assert measurement.losses[length][0].tolist() == pytest.approx(by_document(scored), abs=1e-9)
            assert measurement.counts.tolist() == by_document([(1, target) for _, target in scored])
            assert measurement.n_bytes.tolist() == by_document([(tokens[target], target) for _, target in scored])
            row = measurement.row(length)
            assert row["nll"] == pytest.approx(sum(loss for loss, _ in scored) / len(scored), abs=1e-9)
            assert row["stderr"] is None  # four documents say too little of a fifth


def test_the_loss_by_position_is_that_of_the_token_after_it(model):
    tokens = random_tokens(model, 1, 120)[0].numpy()
    (found,) = measured(model, tokens, by_position=True, documents="across")
    windows = [tokens[start : start + 25] for start in range(0, 96, 24)]  # four full ones of 24, and their targets
    rows = found.result["by_position"]
    assert [(row["from"], row["to"]) for row in rows][-3:] == [(8, 12), (12, 16), (16, 24)]
    for row in rows:
        losses = [loss_of_one_token(model, w, p + 1, p + 1) for w in windows for p in range(row["from"], row["to"])]
        assert (row["nll"], row["scored"]) == (pytest.approx(sum(losses) / len(losses), abs=1e-9), len(losses))


def test_documents_are_kept_whole_where_ten_are_long_enough():
    ten = [*range(0, 401, 40)]
    text = Text(np.arange(400) % 61, np.array(ten), np.ones(61), {})
    for lengths, documents, words in (
        ((8, 32), None, "within documents: 10 of 10 hold a window of 32"),
        ((8, 40), None, "across the borders of 10 documents"),
        ((8, 32), "across", "across the borders of 10 documents"),
    ):
        assert Scoring(lengths, documents=documents, stride=4).pieces(text)[1] == words
    nine = Text(text.tokens, np.array(ten[:-1]), text.bytes_per_token, {})
    assert Scoring((8, 32), stride=4).pieces(nine)[1] == "across the borders of 9 documents"
    with pytest.raises(ValueError, match="documents='inside': use within or across"):
        Scoring((8, 32), documents="inside", stride=4).pieces(text)


def test_windows_within_documents_are_scored_by_them(model):
    """evaluate_lengths with documents: the slow loop over each one that is long enough, its error over documents."""
    tokens, borders = random_tokens(model, 1, 120)[0].numpy(), [0, 30, 41, 75, 120]
    (row,) = evaluate_lengths(model, tokens, [24], "sliding", 3, documents=borders)
    pieces = [(0, 30), (41, 75), (75, 120)]
    scored = [(loss, i) for i, (a, b) in enumerate(pieces) for loss, _ in slow_sliding(model, tokens[a:b], 24, 24, 3)]
    assert row["nll"] == pytest.approx(sum(loss for loss, _ in scored) / len(scored), abs=1e-9)
    assert row["stderr"] == pytest.approx(slow_error(scored), rel=1e-9)


def test_lengths_with_other_frequencies_are_passed_apart():
    """Under dynamic scaling every length past the training length has its own frequencies."""
    model = small_model({"name": "rope"}, train_length=8, scaling={"name": "dynamic"})
    tokens = random_tokens(model, 1, 97)[0]
    together = evaluate_lengths(model, tokens, LENGTHS, "nonoverlapping")
    for length, row in zip(LENGTHS, together, strict=True):
        assert row == pytest.approx(evaluate_lengths(model, tokens, [length], "nonoverlapping")[0], abs=1e-12)


def test_a_text_of_one_window_is_enough(model):
    tokens = random_tokens(model, 1, 9)[0].numpy()
    for protocol in ("sliding", "nonoverlapping"):
        row = evaluate_lengths(model, tokens, [8], protocol, stride=8)[0]
        assert (row["scored"], row["stderr"]) == (8, None)
