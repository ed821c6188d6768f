"""Measurements against plain loops that score one token at a time."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from measure import protocols
from measure.protocols import (
    cut,
    cut_by_position,
    evaluate_lengths,
    new_losses,
    plan_passes,
    score,
    split,
    stretches,
    widening_edges,
)
from model.positions import SCHEMES
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

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


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding"])
@pytest.mark.parametrize("cap", [4, 30, 80, 400])
def test_a_cap_keeps_windows_spread_over_the_text_and_the_same_at_all_lengths(protocol, cap):
    whole = stretches(1000, max(LENGTHS))
    for length in LENGTHS:
        everything = cut(whole, length, max(LENGTHS), protocol, 4).spans.tolist()
        capped = cut(whole, length, max(LENGTHS), protocol, 4, cap).spans.tolist()
        assert all(span in everything for span in capped)
        assert len({tuple(span) for span in capped}) == len(capped)
        assert capped[0] == everything[0]
        if len(capped) > 1:
            assert capped[-1] == everything[-1]
        block = length if protocol == "nonoverlapping" else 4
        assert len(capped) * block <= max(cap, block)
        assert len(capped) * block >= 0.5 * cap or block > cap  # not far below what was asked for
    scored = {tuple(map(tuple, cut(whole, n, max(LENGTHS), "sliding", 4, cap).spans[:, 1:].tolist())) for n in LENGTHS}
    assert len(scored) == 1


DOCUMENTS = [0, 30, 31, 40, 80, 105, 190]  # of them 30, 40, 25 and 85 tokens long are those that hold 24 and a target


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding"])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_inside_documents_are_the_slow_loops_of_each_document(model, protocol, stride):
    tokens = random_tokens(model, 1, 190)[0].numpy()
    long_enough = [(low, high) for low, high in pairwise(DOCUMENTS) if high - low > max(LENGTHS)]
    assert [high - low for low, high in long_enough] == [30, 40, 25, 85]
    rows = evaluate_lengths(model, tokens, LENGTHS, protocol, stride, documents=np.array(DOCUMENTS))
    for row in rows:
        scored = []
        for low, high in long_enough:
            text = tokens[low:high]
            if protocol == "sliding":
                own = slow_sliding(model, text, row["length"], max(LENGTHS), stride)
            else:
                own = slow_nonoverlapping(model, text, row["length"])
            scored += [(loss, (low, window)) for loss, window in own]
        assert row["scored"] == len(scored)
        assert row["nll"] == pytest.approx(sum(loss for loss, _ in scored) / len(scored), abs=1e-9)
        assert row["stderr"] == pytest.approx(slow_error(scored), rel=1e-6)  # 4 documents are too few to go by


def test_errors_are_over_documents_where_there_are_enough(model, monkeypatch):
    tokens = random_tokens(model, 1, 190)[0].numpy()
    monkeypatch.setattr(protocols, "ENOUGH_DOCUMENTS", 4)
    (row,) = evaluate_lengths(model, tokens, [24], "nonoverlapping", documents=torch.tensor(DOCUMENTS))
    scored = []
    for low, high in pairwise(DOCUMENTS):
        if high - low > 24:
            scored += [(loss, low) for loss, _ in slow_nonoverlapping(model, tokens[low:high], 24)]
    assert row["stderr"] == pytest.approx(slow_error(scored), rel=1e-6)


@pytest.mark.parametrize("size", [50, 97])
def test_loss_by_position_is_the_slow_loop(model, size):
    tokens, length = random_tokens(model, 1, size)[0].numpy(), 24
    bins = cut_by_position(stretches(size, length), widening_edges(length))
    passes = plan_passes(bins, model.pos, 64)
    score(model, tokens, passes, losses := new_losses(passes))
    of_position = {}
    for target in range(1, size - (size - 1) % length):  # full windows only
        of_position.setdefault((target - 1) % length, []).append(
            loss_of_one_token(model, tokens, target, (target - 1) % length + 1)
        )
    edges = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert widening_edges(length) == edges
    assert widening_edges(5) == [0, 1, 2, 3, 4, 5]
    for (low, high), windows, values in zip(pairwise(edges), bins, split(losses, bins), strict=True):
        expected = [loss for position in range(low, high) for loss in of_position[position]]
        assert windows.counts.sum() == len(expected)
        assert values.sum() == pytest.approx(sum(expected), abs=1e-8)


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_shared_passes_give_what_passes_of_their_own_give(pos):
    """Windows that start at the same token share a pass; both protocols and the positions at once."""
    model = small_model(pos, train_length=24)
    tokens, whole = random_tokens(model, 1, 120)[0].numpy(), stretches(120, 24)
    windows = [cut(whole, n, 24, protocol, 4) for protocol in protocols.PROTOCOLS for n in (8, 12, 24)]
    windows += cut_by_position(whole, widening_edges(24))
    together = plan_passes(windows, model.pos, 100)
    score(model, tokens, together, losses := new_losses(together))
    apart = 0
    for one, values in zip(windows, split(losses, windows), strict=True):
        alone = plan_passes([one], model.pos, 100)
        score(model, tokens, alone, own := new_losses(alone))
        np.testing.assert_allclose(values, own, atol=1e-9)
        apart += alone.tokens
    assert together.tokens < 0.5 * apart


def test_an_aligned_sliding_sweep_costs_little_more_than_its_longest_length():
    whole = stretches(100_000, 1024)
    scheme = small_model({"name": "rope"}).pos
    cost = lambda lengths: plan_passes([cut(whole, n, 1024, "sliding", 64) for n in lengths], scheme, 16384).tokens  # noqa: E731
    assert cost([256, 320, 384, 512, 1024]) < 1.01 * cost([1024])
    stretched = small_model({"name": "rope"}, scaling={"name": "ntk"}, train_length=256).pos
    assert plan_passes([cut(whole, n, 1024, "sliding", 64) for n in (512, 1024)], stretched, 16384).tokens > 1.4 * cost(
        [1024]
    )


def test_lengths_of_different_frequencies_share_nothing():
    model = small_model({"name": "rope"}, scaling={"name": "linear"}, train_length=8)
    tokens = random_tokens(model, 1, 97)[0].numpy()
    for row in evaluate_lengths(model, tokens, LENGTHS, "sliding", 2):
        stretched = small_model(
            {"name": "rope"}, scaling={"name": "linear", "factor": row["length"] / 8}, train_length=8
        )
        (alone,) = evaluate_lengths(stretched, tokens[24 - row["length"] :], [row["length"]], "sliding", 2)
        assert row["nll"] == pytest.approx(alone["nll"], abs=1e-9)


def test_interrupted_scoring_goes_on_to_the_same_numbers(model):
    tokens, whole = random_tokens(model, 1, 400)[0].numpy(), stretches(400, 24)
    windows = [cut(whole, n, 24, "sliding", 3) for n in LENGTHS]
    passes = plan_passes(windows, model.pos, 60)
    score(model, tokens, passes, expected := new_losses(passes))
    losses, calls = new_losses(passes), []

    def interrupt(passed):
        calls.append(passed)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(model, tokens, passes, losses, interrupt)
    assert 0 < np.isnan(losses).sum() < len(losses)
    score(model, tokens, passes, losses, calls.append)
    assert (losses == expected).all()
    assert sum(calls[5:]) == passes.tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pos", SCHEMES)
@pytest.mark.parametrize("protocol", protocols.PROTOCOLS)
def test_results_do_not_depend_on_the_device(pos, protocol):
    model = small_model({"name": pos}, torch.float32, train_length=24)
    tokens = random_tokens(model, 1, 400)[0].numpy()
    there = evaluate_lengths(model.cuda(), tokens, LENGTHS, protocol, 3)
    for row, wanted in zip(there, evaluate_lengths(model.cpu(), tokens, LENGTHS, protocol, 3), strict=True):
        assert row["nll"] == pytest.approx(wanted["nll"], abs=1e-4)
        assert row["stderr"] == pytest.approx(wanted["stderr"], abs=1e-4)


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
        ({"documents": [0, 16, 32, 48]}, "no document holds a window of 16 .*documents=across"),
        ({"documents": [0, 50, 40]}, "growing"),
        ({"documents": [0, 60]}, "0 to 60 in 50"),
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
