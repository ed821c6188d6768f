"""Batches, against their definition spelt out as a plain loop.

In most tests the stream counts upwards, so that a token is its own place and the windows can be read off the batches.
"""

from collections import Counter

import numpy as np
import pytest

from data import draw_batch

# stream, window: windows that fill the stream, a remainder, the shortest legal stream, windows of one token
SHAPES = [(81, 8), (101, 8), (9, 8), (16, 8), (12, 1), (2, 1), (1000, 7)]


def starts(tokens, length, batch_size, seed, steps, **ranks):
    """Where the windows of these steps begin, step by step in the order of their rows."""
    found = []
    for step in steps:
        inputs, _ = draw_batch(tokens, length, batch_size, seed, step, **ranks)
        found += inputs[:, 0].tolist()
    return found


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize(("size", "length"), SHAPES)
def test_rows_are_pieces_of_the_stream(size, length, dtype):
    tokens = np.random.default_rng(0).integers(250, size=size).astype(dtype)
    text = tokens.tolist()
    pieces = [text[i : i + length + 1] for i in range(size - length)]
    for step in range(5):
        inputs, targets = draw_batch(tokens, length, 6, seed=1, step=step)
        assert inputs.shape == targets.shape == (6, length)
        assert inputs.dtype == targets.dtype == np.int64
        for row, follow in zip(inputs.tolist(), targets.tolist(), strict=True):
            # the whole row with its target stands in the stream, so each target is the token after its input
            assert [*row, follow[-1]] in pieces
            assert follow[:-1] == row[1:]


@pytest.mark.parametrize(("size", "length"), SHAPES)
def test_targets_follow_inputs(size, length):
    for step in range(20):
        inputs, targets = draw_batch(np.arange(size), length, 3, seed=0, step=step)
        for row, follow in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert row == list(range(row[0], row[0] + length))
            assert follow == list(range(row[0] + 1, row[0] + length + 1))
            assert follow[-1] < size


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize(("size", "length"), SHAPES)
def test_an_epoch_visits_every_window_once(size, length, batch_size):
    windows, slack = (size - 1) // length, (size - 1) % length
    epochs = 4
    drawn = starts(np.arange(size), length, batch_size, seed=5, steps=range(-(-epochs * windows // batch_size)))
    for epoch in range(epochs):
        visited = sorted(drawn[epoch * windows : (epoch + 1) * windows])
        assert 0 <= visited[0] <= slack
        assert visited == [visited[0] + i * length for i in range(windows)]


def test_epochs_differ_in_order_and_offset():
    windows, length, count = 100, 10, 40
    drawn = starts(np.arange(1004), length, windows, seed=0, steps=range(count))  # four places to begin at
    epochs = [drawn[i * windows : (i + 1) * windows] for i in range(count)]
    assert {min(epoch) for epoch in epochs} == {0, 1, 2, 3}
    orders = {tuple(start // length for start in epoch) for epoch in epochs}
    assert len(orders) == count
    assert all(epoch != sorted(epoch) for epoch in epochs)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_draw_what_one_rank_draws(world_size):
    tokens, length, batch_size = np.arange(103), 5, 8  # 20 windows: batches span the epochs' ends
    for step in range(15):
        alone = starts(tokens, length, batch_size, 3, [step])
        shares = [
            starts(tokens, length, batch_size, 3, [step], rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert [len(share) for share in shares] == [batch_size // world_size] * world_size
        assert Counter(start for share in shares for start in share) == Counter(alone)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_window_twice_within_an_epoch_over_all_ranks(world_size):
    tokens, length, batch_size, windows = np.arange(104), 4, 8, 25
    drawn = []
    for step in range(25):  # 200 windows, 8 epochs
        for rank in range(world_size):
            drawn += starts(tokens, length, batch_size, 2, [step], rank=rank, world_size=world_size)
    for epoch in range(8):
        assert len(set(drawn[epoch * windows : (epoch + 1) * windows])) == windows


def test_a_batch_that_spans_two_epochs():
    windows, batch_size = 5, 4
    drawn = starts(np.arange(51), 10, batch_size, 0, range(5))  # no slack, so windows begin at the tens
    assert sorted(drawn[:windows]) == sorted(drawn[windows : 2 * windows]) == [0, 10, 20, 30, 40]
    # step 1 holds one window of the first epoch and three of the second
    assert drawn[4] == ({0, 10, 20, 30, 40} - set(drawn[:4])).pop()
    assert len(set(drawn[5:8])) == 3


def test_a_batch_larger_than_an_epoch():
    drawn = starts(np.arange(31), 10, 12, 0, [0, 1])
    assert Counter(drawn) == {0: 8, 10: 8, 20: 8}


def test_batches_do_not_depend_on_what_was_asked_before():
    tokens = np.random.default_rng(0).integers(250, size=200).astype(np.uint8)
    calls = [(seed, step, rank) for seed in (0, 1) for step in range(12) for rank in (0, 1)]

    def draw(seed, step, rank):
        return [array.tolist() for array in draw_batch(tokens, 7, 4, seed, step, rank, world_size=2)]

    first = {call: draw(*call) for call in calls}
    shuffled = [calls[i] for i in np.random.default_rng(1).permutation(len(calls))]
    for call in shuffled:
        draw_batch(np.arange(50), 3, 4, call[0], call[1])  # another stream in between
        assert draw(*call) == first[call]


def test_a_batch_is_not_a_view():
    tokens = np.arange(101)
    inputs, _ = draw_batch(tokens, 10, 4, 0, 0)
    again = inputs.copy()
    inputs += 1000  # what a caller does to a batch must not reach the stream, or a later batch
    assert tokens.tolist() == list(range(101))
    assert draw_batch(tokens, 10, 4, 0, 0)[0].tolist() == again.tolist()


def test_a_memory_map_gives_the_same_batches(tmp_path):
    tokens = np.random.default_rng(0).integers(50000, size=300).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    for step in range(3):
        for one, other in zip(draw_batch(mapped, 16, 4, 0, step), draw_batch(tokens, 16, 4, 0, step), strict=True):
            assert one.tolist() == other.tolist()


def test_seeds_differ():
    orders = {tuple(starts(np.arange(501), 10, 50, seed, [0])) for seed in range(10)}
    assert len(orders) == 10


def test_the_shortest_legal_stream():
    for step in range(3):
        inputs, targets = draw_batch(np.array([7, 8, 9]), 2, 2, 0, step)
        assert inputs.tolist() == [[7, 8]] * 2
        assert targets.tolist() == [[8, 9]] * 2


@pytest.mark.parametrize("size", [0, 1, 7, 8])
def test_a_stream_shorter_than_a_window_and_its_target(size):
    with pytest.raises(ValueError, match=f"8 tokens.*{size} tokens"):
        draw_batch(np.arange(size), 8, 1, 0, 0)


@pytest.mark.parametrize(("batch_size", "world_size"), [(3, 2), (8, 3), (1, 2)])
def test_a_batch_the_ranks_cannot_share(batch_size, world_size):
    with pytest.raises(ValueError, match=rf"train\.batch_size={batch_size}.*{world_size} processes"):
        draw_batch(np.arange(100), 8, batch_size, 0, 0, rank=0, world_size=world_size)
