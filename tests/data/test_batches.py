"""Batches, against their definition spelt out as a plain loop.

In most tests the stream counts upwards, so that a token is its own place and the windows can be read off the batches.
"""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from data import draw_batch, draw_positions

# stream, window: windows that fill the stream, a remainder, the shortest legal stream, windows of one token
SHAPES = [(81, 8), (101, 8), (9, 8), (12, 1), (2, 1), (1000, 7)]


def starts(tokens, length, batch_size, seed, steps, **ranks):
    """Where the windows of these steps begin, step by step in the order of their rows."""
    batches = [draw_batch(tokens, length, batch_size, seed, step, **ranks)[0] for step in steps]
    return [start for inputs in batches for start in inputs[:, 0].tolist()]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize(("size", "length"), SHAPES)
def test_rows_are_pieces_of_the_stream_and_targets_follow_inputs(size, length, dtype):
    tokens = np.random.default_rng(0).integers(250, size=size).astype(dtype)
    text = tokens.tolist()
    pieces = [text[i : i + length + 1] for i in range(size - length)]
    for step in range(5):
        inputs, targets = draw_batch(tokens, length, 6, seed=1, step=step)
        assert inputs.shape == targets.shape == (6, length)
        assert inputs.dtype == targets.dtype == np.int64
        for row, follow in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert [*row, follow[-1]] in pieces
            assert follow[:-1] == row[1:]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize(("size", "length"), SHAPES)
def test_an_epoch_visits_every_window_once(size, length, batch_size):
    windows, slack = (size - 1) // length, (size - 1) % length
    drawn = starts(np.arange(size), length, batch_size, seed=5, steps=range(-(-4 * windows // batch_size)))
    for epoch in range(4):
        visited = sorted(drawn[epoch * windows : (epoch + 1) * windows])
        assert 0 <= visited[0] <= slack
        assert visited == [visited[0] + i * length for i in range(windows)]


def test_epochs_and_seeds_differ_in_order_and_offset():
    windows, length = 100, 10
    drawn = [starts(np.arange(1004), length, windows, seed, range(20)) for seed in (0, 1)]  # four places to begin at
    epochs = [one[i * windows : (i + 1) * windows] for one in drawn for i in range(20)]
    assert {min(epoch) for epoch in epochs} == {0, 1, 2, 3}
    assert len({tuple(start // length for start in epoch) for epoch in epochs}) == 40
    assert all(epoch != sorted(epoch) for epoch in epochs)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_draw_what_one_rank_draws(world_size):
    tokens = np.arange(103)  # 20 windows of 5: batches span the epochs' ends
    for step in range(15):
        shares = [starts(tokens, 5, 8, 3, [step], rank=rank, world_size=world_size) for rank in range(world_size)]
        assert [len(share) for share in shares] == [8 // world_size] * world_size
        assert Counter(chain.from_iterable(shares)) == Counter(starts(tokens, 5, 8, 3, [step]))


def test_a_batch_may_span_or_exceed_an_epoch():
    drawn = starts(np.arange(51), 10, 4, 0, range(5))  # five windows, at the tens
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == [0, 10, 20, 30, 40]
    assert Counter(starts(np.arange(31), 10, 12, 0, [0, 1])) == {0: 8, 10: 8, 20: 8}


def test_batches_do_not_depend_on_what_was_asked_before(tmp_path):
    np.random.default_rng(0).integers(50_000, size=200).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    calls = [(seed, step, rank) for seed in (0, 1) for step in range(12) for rank in (0, 1)]
    first = {call: draw_batch(np.array(tokens), 7, 4, *call, world_size=2) for call in calls}
    for i in np.random.default_rng(1).permutation(len(calls)):
        draw_batch(np.arange(50), 3, 4, *calls[i][:2])  # another stream in between
        assert np.array_equal(draw_batch(tokens, 7, 4, *calls[i], world_size=2), first[calls[i]])


def test_randomised_positions_grow_within_their_range_and_depend_on_the_step():
    first, again, other = (draw_positions(50, 4, seed=0, step=step) for step in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert (np.diff(first) > 0).all()
    assert 0 <= first[0] <= first[-1] < 200
    assert draw_positions(50, 1, seed=0, step=3) is None
    counts = np.bincount(np.concatenate([draw_positions(50, 4, 0, step) for step in range(400)]), minlength=200)
    assert abs(counts - 100).max() < 50  # each of the 200 is drawn in a quarter of the steps: 6 standard deviations
