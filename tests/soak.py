"""Train, checkpoint, resume, measure and sample over and over in one process: does anything grow? (Linux)

    python tests/soak.py minutes=30

A line a minute, and at the end the growth a cycle: the slope of a line through the second half of the cycles.
"""

import contextlib
import gc
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.update(NETRC=os.devnull, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from eval import EvalConfig, sample_text
from model import load_run
from model.positions import SCHEMES
from runs import Ranks
from tests.trained import TINY, composed, measure, run


def resident(pid: int | str = "self") -> int:
    """kB of memory that a process holds; 0 where there is none."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024
    return 0


def services() -> list[int]:
    """wandb's service processes of this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if name == "wandb-core" and int(rest.split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def state(temporary: Path) -> dict[str, int]:
    return {
        "memory_kB": resident(),
        "service_kB": sum(map(resident, services())),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "temporary_files": sum(1 for _ in temporary.rglob("*")),
        "objects": len(gc.get_objects()),
    }


def cycle(number: int, place: Path, corpus: list[str]) -> None:
    """One run from its start to a sample of text; wandb offline and disabled by turns, each scheme in its turn."""
    pos, mode = list(SCHEMES)[number % len(SCHEMES)], ("offline", "disabled")[number // len(SCHEMES) % 2]
    settings = [*TINY[:-1], *corpus, f"wandb.mode={mode}", f"pos={pos}"]
    folder = place / "outputs" / f"run{number}"
    run(folder, *settings)
    run(folder, *settings, "train.max_steps=6", resume=True)
    ours = [f"runs={folder}", f"cache={place / 'cache'}"]
    measure(*ours, "protocol=both", "lengths=[8,16]", f"wandb.mode={mode}")
    given = [*ours, "task=sample", "prompt='document 1'", "tokens=5", "device=cpu"]
    sample_text(composed(*given, name="eval", schema=EvalConfig), Ranks())
    load_run(folder).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    shutil.rmtree(place / "outputs")
    shutil.rmtree(place / "cache" / "measurements")


def main(minutes: float) -> None:
    logging.disable(logging.INFO)
    place = Path(tempfile.mkdtemp(prefix="ropewalk-soak-"))
    temporary, seen = place / "tmp", []
    temporary.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    os.environ["HOME"] = str(place)
    rows = [{"text": f"document {i}: " + " ".join(str(i * j % 97) for j in range(40))} for i in range(40)]
    (place / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = [f"data.path={place / 'text.jsonl'}", f"data.cache={place / 'cache'}"]
    begun = told = time.monotonic()
    try:
        while time.monotonic() < begun + 60 * minutes or len(seen) < 4:
            with contextlib.redirect_stdout(io.StringIO()):
                cycle(len(seen), place, corpus)
            gc.collect()
            seen.append(state(temporary))
            if time.monotonic() >= told + 60:
                told += 60
                print(f"{(told - begun) / 60:3.0f} min, {len(seen):5d} cycles: {json.dumps(seen[-1])}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    half = range(len(seen) // 2, len(seen))
    slopes = {key: np.polyfit(half, [seen[i][key] for i in half], 1)[0] for key in seen[-1]}
    growth = ", ".join(f"{key} {slope:+.2f}" for key, slope in slopes.items())
    print(f"growth a cycle over the last {len(half)} of {len(seen)} cycles: {growth}")


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    if words.keys() - {"minutes"}:
        sys.exit(f"{' '.join(sys.argv[1:])}: only minutes=<number> is known")
    main(float(words.get("minutes", 30)))
