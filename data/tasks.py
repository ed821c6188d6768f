"""Tasks with a right answer: strings drawn as a function of (seed, step), no file on disk.

As in Huang et al. 2024, "A Formal Framework for Understanding Length Generalization in Transformers": begin, input,
separator, answer, end; only the answer and the end are targets. `mqar` (Arora et al. 2023, "Zoology") has its answers
inside the string, each after its query. A new task is one function and one line in TASKS.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.random import Generator

from model.checks import check_whole, is_number, lookup

BEGIN, SEPARATOR, END, PAD, SYMBOL = range(5)  # SYMBOL: the id of a task's first symbol
HELD_OUT = 8  # one string of so many is for tests only
LARGE = 2**20  # so many strings of a length are enough to hold some of them out
KEYS = VALUES = 64  # of mqar

String = tuple[list[int], list[bool]]  # ids, and which of them are targets


def framed(given: np.ndarray, answer: np.ndarray) -> String:
    """Symbols, counted from 0, as a whole string."""
    ids = [BEGIN, *(SYMBOL + given).tolist(), SEPARATOR, *(SYMBOL + answer).tolist(), END]
    return ids, [False] * (len(given) + 2) + [True] * (len(answer) + 1)


def repeat_copy(rng: Generator, length: int, symbols: int) -> String:
    """Symbols out of two; the same again."""
    given = rng.integers(symbols, size=length)
    return framed(given, given)


def majority(rng: Generator, length: int, symbols: int) -> String:
    """Bits, whose number of ones is uniform; the bit that most of them are. No ties."""
    ones = int(rng.integers(length + 1))
    while 2 * ones == length:
        ones = int(rng.integers(length + 1))
    return framed(rng.permutation(length) < ones, np.array([2 * ones > length]))


def parity(rng: Generator, length: int, symbols: int) -> String:
    """Bits, whose number of ones is uniform; whether that is odd, as a symbol of its own: 2 (even) or 3."""
    ones = int(rng.integers(length + 1))
    return framed(rng.permutation(length) < ones, np.array([2 + ones % 2]))


def addition(rng: Generator, length: int, symbols: int) -> String:
    """Two binary numbers without leading zeros and a plus (2); their sum. length counts the plus and the separator."""
    digits = int(rng.integers(1, length - 2))
    numbers = [rng.integers(2, size=size) for size in (digits, length - 2 - digits)]
    for number in numbers:
        number[0] |= len(number) > 1
    total = sum(int("".join(map(str, number)), 2) for number in numbers)
    return framed(np.concatenate((numbers[0], [2], numbers[1])), np.array([int(digit) for digit in f"{total:b}"]))


def mqar(rng: Generator, length: int, symbols: int) -> String:
    """A pair of a key and its value for every eight tokens, 64 at most; then each again, in random order among blanks
    (symbol 0), its value a target. length counts all but the begin."""
    pairs = min(KEYS, max(1, length // 8))
    keys, values = 1 + rng.permutation(KEYS)[:pairs], 1 + KEYS + rng.integers(VALUES, size=pairs)
    again = SYMBOL + np.stack((keys, values), axis=1)
    ids, targets = [BEGIN, *again.ravel().tolist()], [False] * (1 + 2 * pairs)
    for place in rng.permutation(length - 3 * pairs):  # a place is a blank, or one of the pairs again
        ids += again[place].tolist() if place < pairs else [SYMBOL]
        targets += [False, True] if place < pairs else [False]
    return ids, targets


def distinct(rng: Generator, length: int, symbols: int, answer: Callable[[np.ndarray], np.ndarray]) -> String:
    """Distinct symbols, and what `answer` makes of them."""
    given = rng.permutation(symbols)[:length]
    return framed(given, answer(given))


@dataclass(frozen=True)
class Kind:
    """A task: its function, how many symbols it has, how many ids a string has at most, how many strings there are."""

    draw: Callable[[Generator, int, int], String]
    symbols: int | None = None  # None: as many as the longest length, as in the paper
    size: Callable[[int], int] = lambda length: 2 * length + 3
    count: Callable[[int, int], int] = lambda length, symbols: math.perm(symbols, length)
    shortest: int = 1


TASKS = {
    "copy": Kind(partial(distinct, answer=lambda given: given)),
    "reverse": Kind(partial(distinct, answer=lambda given: given[::-1])),
    "sort": Kind(partial(distinct, answer=np.sort)),
    "repeat_copy": Kind(repeat_copy, 2, count=lambda n, _: 2**n),
    "majority": Kind(majority, 2, lambda n: n + 4, lambda n, _: 2**n),
    "parity": Kind(parity, 4, lambda n: n + 4, lambda n, _: 2**n, shortest=0),
    "addition": Kind(addition, 3, lambda n: 2 * n, lambda n, _: 2 ** (n - 4), shortest=4),
    "mqar": Kind(mqar, 1 + KEYS + VALUES, lambda n: n + 1, lambda n, _: (KEYS * VALUES) ** (n // 8), shortest=4),
}


@dataclass
class Task:
    """A task's settings and its strings. ValueError, naming the setting, for what is wrong."""

    name: str
    train_max: int = 50  # lengths in training are uniform up to it
    test: list[list[int]] = field(default_factory=lambda: [[1, 50], [51, 100], [101, 150]])  # [lowest, highest] each
    strings: int = 2000  # test strings of each range, their lengths uniform in it
    random_offset: bool = False  # training steps begin at random positions, and so cover all that the tests need
    stop_at: float | None = None  # training ends at this exact match in the first range

    def __post_init__(self):
        lookup("task", {name: kind.draw for name, kind in TASKS.items()}, {"name": self.name})
        self.kind = TASKS[self.name]
        least = max(1, self.kind.shortest)
        check_whole("task.train_max", self.train_max, least)
        check_whole("task.strings", self.strings)
        if self.stop_at is not None and not (is_number(self.stop_at) and 0 < self.stop_at <= 1):
            raise ValueError(f"task.stop_at={self.stop_at}: must be above 0 and at most 1, or null to train to the end")
        fit = [len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] >= least for bounds in self.test]
        if not fit or not all(fit):
            raise ValueError(f"task.test={self.test}: must be [lowest, highest] lengths, the highest at least {least}")
        longest = max(self.train_max, *(high for _, high in self.test))
        self.symbols = self.kind.symbols or longest
        self.vocab_size = SYMBOL + self.symbols
        self.fingerprint = f"{self.name}_{self.train_max}_{self.symbols}"  # training strings depend on it, and the seed
        self.width = self.kind.size(self.train_max) - 1  # inputs of a training string, padding included
        # Positions that training covers, which are the rows of a learned table.
        self.train_length = self.kind.size(longest if self.random_offset else self.train_max)

    @property
    def summary(self) -> str:
        tests = ", ".join(f"{low}-{high}" for low, high in self.test)
        return f"task {self.name}, training lengths to {self.train_max}, {self.strings} test strings of each of {tests}"

    def batch(self, size: int, seed: int, step: int, rank: int = 0, ranks: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (-100: none) of a step, int64 (size / ranks, width), the same for any number of ranks.

        The shortest come first, so that the strings of a micro-batch have similar lengths.
        """
        rng = np.random.default_rng([0, seed, step])
        lengths = rng.integers(self.kind.shortest, self.train_max + 1, size=size)
        strings = [self.draw(rng, length, test=False) for length in lengths.tolist()]
        return padded(sorted(strings, key=lambda string: len(string[0]))[rank::ranks], self.width)

    def positions(self, seed: int, step: int) -> np.ndarray:
        """Of a step's inputs with random_offset, int64 (width,): counting up from a random first one."""
        last = self.train_length - self.width - 1
        return int(np.random.default_rng([2, seed, step]).integers(last + 1)) + np.arange(self.width)

    def test_batches(self, bounds: tuple[int, int], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Inputs and targets of a range's strings, in batches of similar lengths."""
        strings = sorted(self.test_strings(*bounds), key=lambda string: len(string[0]))
        for part in (strings[i : i + size] for i in range(0, len(strings), size)):
            yield padded(part, len(part[-1][0]) - 1)

    def test_strings(self, low: int, high: int) -> list[String]:
        """The strings of a range, the same for every seed of a training."""
        rng = np.random.default_rng([1, low, high])
        lengths = rng.integers(max(low, self.kind.shortest), high + 1, size=self.strings)
        return [self.draw(rng, length, test=True) for length in lengths.tolist()]

    def draw(self, rng: Generator, length: int, test: bool) -> String:
        """A string for training or for tests. Where there are many of its length, a hash decides which it is for."""
        shared = length > self.train_max or self.kind.count(length, self.symbols) < LARGE
        while True:
            ids, targets = self.kind.draw(rng, length, self.symbols)
            if shared or (zlib.crc32(np.array(ids, np.int32).tobytes()) % HELD_OUT == 0) == test:
                return ids, targets


def padded(strings: list[String], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (n, width) and what follows each of them where that is a target, else -100."""
    inputs, targets = np.full((len(strings), width), PAD), np.full((len(strings), width), -100)
    for row, (ids, wanted) in enumerate(strings):
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = np.where(wanted[1:], ids[1:], -100)
    return inputs, targets
