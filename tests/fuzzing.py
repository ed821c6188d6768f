"""What the fuzz tests share: how many examples, values of every kind, and commands run in this process.

FUZZ=100 pytest tests/model/test_fuzz.py      a hundred times the examples, others each time
"""

import contextlib
import io
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("FUZZ", "1"))
# The same examples each time, so that a change is what makes a test fail; nothing is kept on the disk.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("repeatable")
SECONDS = 120  # what answers later hangs


def examples(count: int) -> settings:
    return settings(max_examples=count * TIMES)


@st.composite
def spoilt(draw, good: dict, odd: dict | None = None) -> dict:
    """Arguments drawn from `good`, strategies by name, up to two of them replaced: by odd[name], or by anything."""
    drawn = draw(st.fixed_dictionaries(good))
    for name in draw(st.lists(st.sampled_from(sorted(good)), max_size=2, unique=True)):
        drawn[name] = draw((odd or {}).get(name, values) | values)
    return drawn


ENDS = [0, 1, 2, 3, -1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30]
FLOATS = [-0.0, 0.5, 1.0, 1.0000001, 1.5, 1e-320, 1e-30, 1e308, 3.4e38, math.nan, math.inf, -math.inf, -1e-9]
TEXTS = ["", " ", "a b", "a=b", "a,b", "[", "{", "}", "${", "${x}", "#", "a\nb", "'", '"', "\\", "~", "🧵", "é", "-"]
TEXTS += ["\u202eabc", "x" * 10_000, "None", "null", "true", "1", "1e3", "nan", "..", "/", "/proc/x", "%s", "\x07"]

numbers = st.sampled_from(ENDS) | st.sampled_from(FLOATS) | st.integers(-10, 40) | st.floats()
texts = st.sampled_from(TEXTS) | st.text(st.characters(exclude_characters="\0"), max_size=8)
scalars = st.one_of(numbers, texts, st.none(), st.booleans())
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2), max_leaves=4
)


def typable(word: str) -> bool:
    """Whether a shell can give it to a program: text without NUL, bytes that are no text as half surrogate pairs."""
    try:
        return b"\0" not in word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


spellings = (scalars.map(str) | st.lists(scalars, max_size=3).map(lambda many: ",".join(map(str, many)))).filter(
    typable
)


@dataclass(frozen=True)
class Answer:
    """What a command said, and how it ended."""

    status: int
    out: str
    error: str


class Hang(BaseException):
    """No answer in time."""


@contextlib.contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    def late(*_):
        raise Hang(f"no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def typed(command, name: str, words: list[str], folder: Path) -> Answer:
    """A command as if typed in `folder`, but in this process, and what it leaves behind in it put back."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # strict, as a terminal's is
    error = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    argv, handlers, level, status = sys.argv, logging.root.handlers[:], logging.root.level, 0
    sys.argv = [name, *words]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), in_time():
            try:
                command()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = argv
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
        for handler in set(logging.root.handlers) - {*handlers}:
            handler.close()
        logging.root.handlers[:], logging.root.level = handlers, level
    texts = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, error))
    return Answer(status, *texts)
