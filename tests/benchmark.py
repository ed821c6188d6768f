"""What a position scheme costs: training steps side by side, and the memory of a long pass. Ratios are what counts.

    python tests/benchmark.py [device=cuda] [rounds=20]

Step times: the shape of model=small (4 layers, 4 heads of 64, 16 windows of 256 bytes), precision auto, forward,
backward, clipping and AdamW; one step of every scheme a round, in a shuffled order, so that a busy machine slows all
alike. Memory: the peak that a forward pass over 8,192 tokens adds, one layer of 12 heads, float32, each in a process of
its own (on the CPU: of the process, from Linux's /proc; on CUDA: of the allocator).
"""

import random
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from model import GPT, GPTConfig
from model.positions import SCHEMES
from runs import autocast, pick_device, pick_precision

MODELS = {name: {"pos": {"name": name}} for name in SCHEMES}
MODELS["rope, linear attention"] = {"pos": {"name": "rope"}, "attention": "linear"}


class Contender:
    def __init__(self, settings: dict, device: torch.device):
        torch.manual_seed(0)
        shape = {"vocab_size": 257, "n_layer": 4, "n_head": 4, "train_length": 256}
        self.model = GPT(GPTConfig(**shape, **settings)).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.optimizer_groups(0.1), lr=1e-3, fused=True)
        self.tokens = torch.randint(257, (16, 257), device=device)
        self.device, self.precision, self.seconds = device, pick_precision("auto", device), []

    def step(self) -> None:
        start = time.perf_counter()
        with autocast(self.device, self.precision):
            loss = self.model(self.tokens[:, :-1], targets=self.tokens[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return tuple(ordered[round(part * (len(ordered) - 1))] for part in (0.25, 0.5, 0.75))


def step_times(device: torch.device, rounds: int) -> None:
    contenders = {name: Contender(settings, device) for name, settings in MODELS.items()}
    for round_number in range(rounds + 3):
        for name in random.Random(round_number).sample(list(contenders), len(contenders)):
            contenders[name].step()
    print(f"{'training step':24} {'ms':>8} {'tokens/s':>9}   ÷ learned (median, quartiles of the rounds)")
    base = contenders["learned"].seconds[3:]  # the first rounds warm up
    for name, contender in contenders.items():
        seconds = contender.seconds[3:]
        ratios = quartiles([mine / theirs for mine, theirs in zip(seconds, base, strict=True)])
        middle = quartiles(seconds)[1]
        shown = f"{ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})"
        print(f"{name:24} {middle * 1e3:8.1f} {16 * 256 / middle:9,.0f}   {shown}")


def long_pass(name: str, device: torch.device) -> None:
    """Print the bytes that a pass over 8,192 tokens adds to the peak. Run in a process of its own."""

    def peak() -> int:
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        status = Path("/proc/self/status").read_text()  # getrusage's peak would include the starting process'
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])

    config = GPTConfig(vocab_size=257, n_layer=1, n_head=12, train_length=64, **MODELS[name])
    model = GPT(config).eval().to(device)
    with torch.inference_mode():
        model(torch.zeros((1, 64), dtype=torch.int64, device=device))
        before = peak()
        model(torch.zeros((1, 8192), dtype=torch.int64, device=device))
    print(peak() - before)


def memory(device: torch.device) -> None:
    added = {}
    for name in MODELS:
        if name != "learned":  # its table ends
            command = [sys.executable, __file__, f"device={device.type}", f"long_pass={name}"]
            added[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"\n{'pass over 8,192 tokens':24} {'peak, MB':>8}   ÷ rope")
    for name, peak in added.items():
        print(f"{name:24} {peak / 1e6:8.0f}   {peak / added['rope']:.2f}")


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    chosen = pick_device(words.get("device", "auto"))
    if "long_pass" in words:
        long_pass(words["long_pass"], chosen)
    else:
        print(f"{chosen}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
        step_times(chosen, int(words.get("rounds", 20)))
        memory(chosen)
