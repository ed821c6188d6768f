"""What the machine can do, and where the time of a run goes."""

import contextlib
import ctypes
import logging
import os
import re
import time
from pathlib import Path

import torch

log = logging.getLogger("ropewalk")

# Dense bfloat16 operations a second, by the vendors' data sheets; the first of these words in the device's name counts.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device, given: float | None) -> float | None:
    """What the device could do a second at most: as given (train.peak_flops), else by its name, else not known."""
    if given is not None or device.type != "cuda":
        return given
    name = torch.cuda.get_device_name(device)
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def seconds_since_launch() -> float:
    """Since this process began, as Linux tells; elsewhere since this file was read."""
    try:
        began = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _READ


_READ = time.perf_counter()


def profiler(folder: Path, device: torch.device) -> torch.profiler.profile:
    """A context that records the third to the fifth step: profile.json (chrome://tracing), and the costliest ten."""

    def ready(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(folder / "profile.json"))
        order = f"self_{device.type}_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=10)
        (folder / "profile.txt").write_text(table, encoding="utf-8")
        log.info("profile  %s, and the ten most expensive operators beside it", folder / "profile.json")

    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3), on_trace_ready=ready, acc_events=True
    )


def keep_memory(keep: bool = True) -> None:
    """Have glibc keep what is freed: else every step's large tensors come from the kernel, zeroed page by page.

    That takes up to a third of a training step on a CPU (tests/benchmark.md). Not to keep it takes less memory, far
    less where large tensors of many sizes come and go. Other C libraries are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0 if keep else 2**16)  # M_MMAP_MAX: nothing in mappings of its own, or as many as by default
        libc.mallopt(-1, -1 if keep else 2**17)  # M_TRIM_THRESHOLD: give nothing back, or what is as large
        if not keep:
            libc.mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: what is as large has a mapping of its own
            libc.malloc_trim(0)
