"""Ctrl-C and SIGTERM: the work stops where nothing is lost; a second Ctrl-C leaves at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

REPEATED = 3.0  # seconds: torchrun passes on the Ctrl-C that a terminal has sent to its processes already


class Stopped(KeyboardInterrupt):
    """The process was asked to stop; its exit status is that of a shell for the signal: 130 or 143."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.status = 128 + signum


class Stop:
    """A context in which SIGINT and SIGTERM raise Stopped, at once or, within `deferred`, where the work asks."""

    def __init__(self) -> None:
        self.signum, self._deferred, self._when, self._before = 0, False, 0.0, {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {signum: signal.signal(signum, self._received) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _received(self, signum: int, frame: object) -> None:
        if not self.signum:
            self.signum, self._when = signum, time.monotonic()
            if not self._deferred:
                raise Stopped(signum)
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, b"\nstopping after this step; once more Ctrl-C to leave at once\n")
        elif signum == signal.SIGINT and not self._is_repeated():
            os._exit(128 + signum)

    def _is_repeated(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._when < REPEATED

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, a signal is only noted: in `signum`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
