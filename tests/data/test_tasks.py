"""Every answer against an oracle that reads the string alone; what is held out; batches by (seed, step, rank)."""

from collections import Counter

import numpy as np
import pytest

from data.tasks import BEGIN, END, HELD_OUT, PAD, SEPARATOR, SYMBOL, TASKS, Task, padded


def parted(ids):
    """The input and the answer of a framed string, as symbols."""
    middle = ids.index(SEPARATOR)
    assert (ids[0], ids[-1], Counter(ids)[SEPARATOR]) == (BEGIN, END, 1)
    given, answer = ids[1:middle], ids[middle + 1 : -1]
    assert min([*given, *answer]) >= SYMBOL
    return [i - SYMBOL for i in given], [i - SYMBOL for i in answer]


def added(given):
    left, right = "".join("01+"[i] for i in given).split("+")
    assert all(len(number) == 1 or number[0] == "1" for number in (left, right))
    digits, carry = [], 0
    for place in range(1, max(len(left), len(right)) + 1):  # by hand, from the last digit
        carry += sum(int(number[-place]) for number in (left, right) if place <= len(number))
        digits.insert(0, carry % 2)
        carry //= 2
    return [carry, *digits] if carry else digits


def distinct(given):
    assert len(set(given)) == len(given)
    return given


ORACLES = {
    "copy": distinct,
    "reverse": lambda given: [given[-1 - i] for i in range(len(distinct(given)))],
    "sort": lambda given: sorted(distinct(given)),
    "repeat_copy": lambda given: given,
    "majority": lambda given: [Counter(given).most_common(1)[0][0]],
    "parity": lambda given: [3 if given.count(1) % 2 else 2],
    "addition": added,
}


@pytest.mark.parametrize("name", ORACLES)
def test_answers_are_right(name):
    task, rng = Task(name), np.random.default_rng(0)
    for length in [*range(task.kind.shortest, 60), 100, 150] * 3:
        ids, targets = task.draw(rng, length, test=length % 2 == 0)
        given, answer = parted(ids)
        assert len(given) == length - (name == "addition")
        assert answer == ORACLES[name](given)
        assert targets == [False] * (len(given) + 2) + [True] * (len(answer) + 1)
        assert len(ids) <= task.kind.size(length)
        assert max(ids) < task.vocab_size
        assert name != "majority" or 2 * given.count(1) != length


def test_queries_of_mqar_have_the_values_of_their_pairs():
    task, rng = Task("mqar"), np.random.default_rng(0)
    for length in [*range(4, 70), 150, 600] * 3:
        ids, targets = task.draw(rng, length, test=False)
        pairs = min(64, max(1, length // 8))
        assert len(ids) == len(targets) == length + 1 == task.kind.size(length)
        memory = dict(zip(ids[1 : 1 + 2 * pairs : 2], ids[2 : 2 + 2 * pairs : 2], strict=True))
        assert len(memory) == pairs  # all of them whole, no key twice
        rest, wanted = ids[1 + 2 * pairs :], targets[1 + 2 * pairs :]
        asked = {rest[i - 1]: rest[i] for i in range(len(rest)) if wanted[i]}
        assert asked == memory  # each once, with its value
        assert sum(targets) == pairs == sum(wanted)
        assert rest.count(SYMBOL) == len(rest) - 2 * pairs  # blanks at all other places
        assert not {SYMBOL} & {*memory, *memory.values()}


@pytest.mark.parametrize("name", TASKS)
def test_no_test_string_is_drawn_in_training_where_there_are_many(name):
    task = Task(name, strings=300)
    training = Counter()
    for step in range(60):
        for row in task.batch(64, 0, step)[0]:
            training[tuple(row[row != PAD])] += 1
    split = lambda length: task.kind.count(length, task.symbols) >= 2**20  # noqa: E731
    tests = [tuple(ids[:-1]) for ids, _ in task.test_strings(1, 50)]
    lengths = {"addition": lambda ids: ids.index(SEPARATOR), "mqar": lambda ids: len(ids)}
    length_of = lengths.get(name, lambda ids: ids.index(SEPARATOR) - 1)
    many = [ids for ids in tests if split(length_of(ids))]
    assert len(many) > 100
    assert not any(training[ids] for ids in many)
    # by construction: whatever is drawn for training longer on the other side of the hash is never a test
    rng = np.random.default_rng(5)
    sides = [tuple(task.draw(rng, 40, test=test)[0]) for test in (False, True) for _ in range(50)]
    assert not {*sides[:50]} & {*sides[50:]}
    assert HELD_OUT > 1


def test_a_batch_is_a_function_of_seed_step_and_rank():
    task = Task("copy", random_offset=True)
    whole = task.batch(8, 3, 7)
    again = [task.batch(8, 3, 7, rank, 2) for rank in range(2)]
    for part in range(2):
        assert np.array_equal(whole[part][0::2], again[0][part])
        assert np.array_equal(whole[part][1::2], again[1][part])
        assert whole[part].shape == (8, 102)
    sizes = (whole[0] != PAD).sum(axis=1).tolist()
    assert sizes == sorted(sizes)
    assert not np.array_equal(whole[0], task.batch(8, 3, 8)[0])
    assert not np.array_equal(whole[0], task.batch(8, 4, 7)[0])
    assert task.test_strings(51, 60)[:5] == Task("copy", train_max=20).test_strings(51, 60)[:5]


def test_lengths_and_offsets_cover_their_ranges():
    task = Task("majority", random_offset=True)
    lengths = Counter(int((row != PAD).sum()) - 3 for step in range(80) for row in task.batch(64, 0, step)[0])
    assert set(lengths) == {*range(1, 51)}
    assert max(lengths.values()) < 2 * min(lengths.values())
    offsets = {task.positions(0, step)[0] for step in range(2000)}
    assert (min(offsets), max(offsets), len(offsets)) == (0, 100, 101)  # as in the paper: 150 - 50
    assert (np.diff(task.positions(0, 7)) == 1).all()
    assert (task.train_length, Task("copy", random_offset=True).train_length) == (154, 303)  # the paper's tables
    tests = [len(ids) - 4 for ids, _ in task.test_strings(51, 100)]
    assert (min(tests), max(tests), len(tests)) == (51, 100, 2000)


def test_targets_follow_their_inputs():
    inputs, targets = padded([([0, 9, 1, 9, 2], [False] * 3 + [True] * 2), ([0, 1, 2], [False, False, True])], 5)
    assert inputs.tolist() == [[0, 9, 1, 9, PAD], [0, 1, PAD, PAD, PAD]]
    assert targets.tolist() == [[-100, -100, 9, 2, -100], [-100, 2, -100, -100, -100]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "cop"}, "task='cop': known names are copy, "),
        ({"name": "copy", "train_max": 0}, r"task\.train_max=0: .* at least 1"),
        ({"name": "addition", "train_max": 3}, r"task\.train_max=3: .* at least 4"),
        ({"name": "copy", "strings": 0}, r"task\.strings=0"),
        ({"name": "copy", "stop_at": 2}, r"task\.stop_at=2"),
        ({"name": "copy", "test": []}, r"task\.test=\[\]"),
        ({"name": "copy", "test": [[5]]}, r"task\.test=\[\[5\]\]"),
        ({"name": "copy", "test": [[5, 3]]}, r"task\.test"),
        ({"name": "mqar", "test": [[1, 3]]}, r"task\.test.*at least 4"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        Task(**settings)
