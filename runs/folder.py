"""The run folder: where it lies, what it says of itself, its metrics."""

import atexit
import itertools
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

from measure.statistics import finite
from model.checkpoint import write_text
from runs.processes import torchrun


def run_dir(resume: str | None, name: str) -> str:
    """Where Hydra puts a run's log: the folder of the run to resume, or a new one under outputs/.

    The processes of a torchrun job other than the first get a temporary place: the first one's folder is the run's.
    """
    if not torchrun().first:
        folder = tempfile.mkdtemp(prefix="ropewalk-rank-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    if resume and (Path(resume).expanduser() / "config.yaml").is_file():  # else the error must not make the folder
        return str(Path(resume).expanduser())
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
    return max(found, key=lambda path: path.stat().st_mtime_ns).parents[1]


def provenance() -> dict:
    """Where a number came from, as far as the program can know."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return {"command": shlex.join(sys.argv), **versions, "machine": f"{platform.system()} {platform.machine()}"}


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with its step, whatever wandb does."""

    def __init__(self, path: Path, keep: Callable[[dict], bool]):
        """Rows that a resumed run makes again, those it does not `keep`, are dropped."""
        self.path, rows = path, []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a killed run may be half a line
                continue
            if keep(row):
                rows.append(line + "\n")
        write_text(path, "".join(rows))

    def write(self, row: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")
