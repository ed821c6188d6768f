"""evaluate_lengths on any text and settings: the numbers of a plain loop over its docstring, or a ValueError."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from measure.protocols import PROTOCOLS, evaluate_lengths
from tests.fuzzing import examples, in_time, scalars, spoilt
from tests.helpers import small_model

V, LIMIT = 13, 8
SHAPE = {"vocab_size": V, "n_layer": 1, "n_head": 2, "head_dim": 4, "train_length": LIMIT}
POS = [{"name": "rope"}, {"name": "learned"}, {"name": "alibi"}, {"name": "none"}]
MODELS = [small_model(pos, **SHAPE) for pos in POS]
MODELS += [small_model({"name": "rope"}, scaling={"name": name}, **SHAPE) for name in ("dynamic", "yarn")]
models = st.integers(0, len(MODELS) - 1).map(MODELS.__getitem__)


def loss(model, tokens, start, target, length) -> float:
    """-log p(tokens[target] | tokens[start:target]), the frequencies being those of a window of `length`."""
    inputs = torch.from_numpy(tokens[start:target].astype(np.int64))[None]
    with torch.no_grad():
        row = model(inputs, scaling_length=length)[0, -1].tolist()
    return math.log(sum(map(math.exp, row))) - row[tokens[target]]


def windows(begin, end, length, longest, protocol, stride) -> list[tuple[int, range]]:
    """Where each window of one piece of text starts, and the targets it scores."""
    if protocol == "nonoverlapping":
        return [(start, range(start + 1, min(start + length, end - 1) + 1)) for start in range(begin, end - 1, length)]
    blocks = [range(first, min(first + stride, end)) for first in range(begin + longest - stride + 1, end, stride)]
    return [(block[-1] - length, block) for block in blocks]


def slow_row(model, tokens, length, longest, protocol, stride, documents, sizes) -> dict:
    pieces = list(pairwise(documents)) if documents is not None else [(0, len(tokens))]
    of_window, clusters = [], []
    for i, (begin, end) in enumerate(pieces):
        if end - begin > longest:
            found = windows(begin, end, length, longest, protocol, stride)
            of_window += found
            clusters += [i] * len(found)
    if documents is None:
        clusters = range(len(of_window))
    elif len(set(clusters)) < 10:
        clusters = [targets[0] // longest for _, targets in of_window]
    losses = [[loss(model, tokens, start, target, length) for target in targets] for start, targets in of_window]
    count = sum(map(len, losses))
    nll = sum(map(sum, losses)) / count
    off = dict.fromkeys(clusters, 0.0)
    for cluster, values in zip(clusters, losses, strict=True):
        off[cluster] += sum(values) - nll * len(values)
    n = len(off)
    stderr = math.sqrt(sum(value**2 for value in off.values()) * n / (n - 1)) / count if n > 1 else None
    row = {"length": length, "nll": nll, "perplexity": math.exp(nll), "stderr": stderr, "scored": count}
    if sizes is not None:
        n_bytes = sum(int(sizes[tokens[target]]) for _, targets in of_window for target in targets)
        row["bits_per_byte"] = nll * count / math.log(2) / n_bytes if n_bytes else None
    return row


integers = st.sampled_from([np.int64, np.int32, np.uint16, np.uint8])
corpora = st.builds(
    lambda size, seed, dtype: np.random.default_rng(seed).integers(0, V, size).astype(dtype),
    st.integers(14, 60), st.integers(0, 99), integers,
)  # fmt: skip
GOOD = {
    "tokens": corpora,
    "lengths": st.lists(st.integers(3, 10), min_size=1, max_size=3),
    "protocol": st.sampled_from(PROTOCOLS),
    "stride": st.integers(1, 3),
    "max_targets": st.none() | st.integers(1, 80),
    "bytes_per_token": st.none() | st.lists(st.integers(0, 3), min_size=V, max_size=V).map(np.array),
    "batch_tokens": st.integers(1, 99),
    "documents": st.none() | st.lists(st.integers(0, 13), max_size=3, unique=True).map(lambda at: [*sorted(at), 14]),
}
ODD = {
    "tokens": st.sampled_from([
        [], np.zeros((3, 30), dtype=int), np.zeros(30), np.full(30, V), np.full(30, -1), np.zeros(30, dtype=bool),
        "text", torch.zeros(30, dtype=torch.bfloat16), np.full(30, 2**63, dtype=np.uint64), [[1], [1, 2]], [1, 2] * 9,
        7, None,
    ]),
    "lengths": st.lists(scalars, max_size=3) | st.sampled_from([
        (5, 5, 4), [12, 3], np.array([4, 8]), np.array([[4]]), [np.int64(4)], [4.0], range(3, 6), {4}, [2**62], [True],
        np.array([]), [4.5],
    ]),
    "stride": st.sampled_from([1.5, 2.0, np.int64(2), np.float32(3), True, "1", 99]),
    "max_targets": st.sampled_from([1.5, 20.0, np.int64(20), True, "9", 10**30]),
    "bytes_per_token": st.sampled_from([[1] * V, [1.0] * V, [1] * 3, np.ones((V, 1), dtype=int), [1] * 99]),
    "batch_tokens": st.sampled_from([1.5, 20.0, np.int64(20), True, "9", 10**30]),
    "documents": st.lists(st.integers(-3, 70), max_size=5) | st.sampled_from([
        np.array([0, 14]), [0.0, 14.0], [0, 0, 14], [14, 0], [[0, 14]], np.array([0, 2**63], dtype=np.uint64), "0,14",
    ]),
}  # fmt: skip


@examples(120)
@given(models, spoilt(GOOD, ODD))
def test_rows_are_those_of_a_plain_loop_or_refused(model, given):
    try:
        with in_time():
            rows = evaluate_lengths(model, **given)
    except ValueError:
        return
    tokens, protocol = np.asarray(given["tokens"]), given["protocol"]
    lengths, documents, cap = [int(length) for length in given["lengths"]], given["documents"], given["max_targets"]
    assert [row["length"] for row in rows] == lengths
    longest, fitting = max(lengths), [row for row in rows if row["nll"] is not None]
    assert [row["length"] for row in fitting] == [n for n in lengths if model.pos.max_length is None or n <= LIMIT]
    if cap is not None:  # which of the targets are kept is told by test_protocols
        block = longest if protocol == "nonoverlapping" else int(given["stride"])
        assert len({row["scored"] for row in fitting}) <= 1
        assert all(1 <= row["scored"] <= max(cap, block) for row in fitting)
        assert all(math.isfinite(row["nll"]) for row in fitting)
        return
    stride = int(given["stride"]) if protocol == "sliding" else 1
    for row in fitting:
        expected = slow_row(
            model, tokens, row["length"], longest, protocol, stride, documents, given["bytes_per_token"]
        )
        numbers = {key: value for key, value in expected.items() if value is not None}
        assert {key: row.get(key) for key in expected.keys() - numbers} == dict.fromkeys(expected.keys() - numbers)
        assert {key: row[key] for key in numbers} == pytest.approx(numbers, rel=1e-6, abs=1e-9)
        assert row.keys() == expected.keys()


def test_a_model_whose_weights_are_no_numbers_has_no_loss():
    model = small_model({"name": "rope"}, **SHAPE)
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    (row,) = evaluate_lengths(model, np.zeros(30, dtype=int), [8], stride=4)
    assert math.isnan(row["nll"])
