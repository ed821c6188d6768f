"""Window losses kept on the disk: an interrupted sweep goes on where it stopped, and a repeated one costs nothing.

A file is named by a hash of all that its numbers depend on: the weights, the settings, the text, the windows, the
device and this program's own source. It holds one float64 a window, NaN where there is none yet.
"""

import hashlib
import json
import logging
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch

from model.checkpoint import write_file

log = logging.getLogger("ropewalk")
SAVE_EVERY = 10.0  # seconds


@cache
def source_digest() -> str:
    """A hash of the code that computes losses: after a change to a scheme its old numbers must not come back."""
    root = Path(__file__).parents[1]
    files = [*sorted((root / "model").glob("*.py")), root / "measure" / "protocols.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class Losses:
    """The losses of one job, saved every few seconds."""

    def __init__(self, folder: Path, identity: dict, empty: np.ndarray, fresh: bool = False):
        """folder: where the files lie. identity: see above, as JSON. empty: NaN for each window. fresh: forget."""
        key = {**identity, "source": source_digest(), "torch": str(torch.__version__)}
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self.path, self.values, self.saved = folder / f"{name}.npy", empty, time.monotonic()
        if not fresh and self.path.is_file():
            try:
                found = np.load(self.path, allow_pickle=False)
            except Exception:  # whatever a damaged file happens to trigger: measured again
                return
            if found.shape == empty.shape and found.dtype == empty.dtype:
                self.values = found

    @property
    def complete(self) -> bool:
        return not np.isnan(self.values).any()

    def save(self, now: bool = False) -> None:
        """Write what there is, if the last time is a while ago."""
        if not (now or time.monotonic() - self.saved > SAVE_EVERY):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, lambda temporary: _write(temporary, self.values))
        except OSError as error:  # measuring goes on: it only cannot be continued
            log.warning("note: what is measured cannot be kept: %s", error)
        self.saved = time.monotonic()


def _write(path: Path, values: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, values, allow_pickle=False)
