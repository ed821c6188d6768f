"""The run folder: where it lies, what it says of itself, its metrics."""

import atexit
import contextlib
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure.statistics import finite
from model.checkpoint import write_text
from model.safety import check_folder
from runs.processes import torchrun
from runs.trust import redacted

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

CHECKOUT = Path(__file__).parents[1]
LONGEST_ROW = 1 << 20  # characters of a row of metrics.jsonl


def run_dir(resume: str | None, repeat: str | None, name: str) -> str:
    """Where Hydra puts a run's log: the folder of the run to resume, or a new one under outputs/.

    The processes of a torchrun job other than the first get a temporary place: the first one's folder is the run's.
    """
    if not torchrun().first:
        folder = tempfile.mkdtemp(prefix="ropewalk-rank-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    # Else the error must not make the folder, nor be written through a link that a stranger has put in its place.
    if resume and ((source := Path(resume).expanduser()) / "config.yaml").is_file():
        with contextlib.suppress(ValueError):
            check_folder(source, to_write=True)
            return str(source)
    if repeat:
        name = f"repeat_of_{Path(repeat).expanduser().resolve().name}"
    stem = Path("outputs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name.replace(os.sep, '_')}"
    for count in itertools.count(1):
        folder = stem if count == 1 else stem.with_name(f"{stem.name}_{count}")
        try:  # made here, so that of two runs started in the same second each has its own
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            continue


def latest_run(root: Path) -> Path:
    """The run under `root` whose checkpoint is the newest. FileNotFoundError where there is none."""
    found = [path for path in root.glob("[!.]*/checkpoint/*.safetensors") if (path.parents[1] / "config.yaml").exists()]
    if not found:
        raise FileNotFoundError(f"no run with a checkpoint under {root}/; train one first, or give runs=[<folder>]")
    return max(found, key=lambda path: path.lstat().st_mtime_ns).parents[1]


PACKAGES = ("torch", "numpy", "tiktoken", "datasets", "hydra-core", "wandb", "safetensors")


def provenance() -> dict:
    """Where a number came from, as far as the program can know: what ran, and of which source."""
    packages = {name: _version(name) for name in PACKAGES}
    here = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    return {"command": shlex.join(redacted(sys.argv)), **here, "packages": packages, **_source()}


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _source() -> dict:
    """The commit of this checkout, and whether its files differ from it; None where git does not know."""

    def git(*words: str) -> str | None:
        try:
            # No optional locks: many runs may start at once, and none should write here.
            command = ["git", "--no-optional-locks", *words]
            done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("rev-parse", "--show-toplevel") != str(CHECKOUT.resolve()):  # a copy inside another project's checkout
        return {"commit": None, "dirty": None}
    changed = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Around a training. ValueError where another process trains in this folder: both would write the same files."""
    with open(folder / "train.log", "a", encoding="utf-8") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder}: another process is training in it; wait for it, or end it first") from error
        except OSError:  # a file system without locks
            pass
        yield


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, without what is none: the last line of a killed run may be half a line."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in iter(lambda: file.readline(LONGEST_ROW), ""):
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
    return rows


def is_reported(folder: Path, step: int) -> bool:
    """Whether a training has made its report after this step, its last.

    Before max_steps was raised it has made one of another step, and eval.py, which logs no row, may have made any.
    """
    metrics, report = folder / "metrics.jsonl", folder / "extrapolation.json"
    if not (metrics.exists() and report.exists()):
        return False
    logged = any(row["step"] == step and "extrapolation/length" in row for row in read_metrics(metrics))
    return logged and f'"step_{step:06d}"' in report.read_text(encoding="utf-8", errors="replace")


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with its step, whatever wandb does."""

    def __init__(self, path: Path, keep: Callable[[dict], bool]):
        """Rows that a resumed run makes again, those it does not `keep`, are dropped."""
        self.path = path
        kept = [row for row in read_metrics(path) if keep(row)] if path.exists() else []
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row: dict) -> None:
        """Add a row, whole or not at all. OSError, naming the file, where it cannot be written."""
        size = self.path.stat().st_size
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(finite(row)) + "\n")
        except OSError as error:
            os.truncate(self.path, size)
            raise OSError(f"{self.path}: cannot be written ({error.strerror})") from error

    def sync(self) -> None:
        """Once this returns, all rows are safely on the disk."""
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
