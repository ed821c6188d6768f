"""How fast, beside others and beside what the machine could do. Ratios count; absolute times are for reading.

    python tests/benchmark.py [device=cpu] [rounds=7] [peer=<a checkout of nanoGPT>]
                              [rows=train,decode,sweep,schemes,memory]

Every contender is a process of its own (tests/contenders.py); all of a row do one piece of work per round, in a
shuffled order, so that a busy machine slows all alike. Shown: medians over the rounds, and the quartiles of the ratios.
The limits are measured in the same rounds: the rate of square matrix products for training, that of reading memory for
decoding one sequence, which reads every weight once a token.
"""

import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from contenders import MODELS

WORKER = Path(__file__).with_name("contenders.py")


class Contender:
    def __init__(self, device: str, **words: str):
        self.words = {"device": device, **words}
        command = [sys.executable, str(WORKER), *(f"{key}={value}" for key, value in self.words.items())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []

    def ready(self) -> None:
        self.worth = json.loads(self._line())

    def once(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.seconds.append(float(self._line()))

    def _line(self) -> str:
        line = self.process.stdout.readline()
        while line and not line.startswith(("{", *"0123456789")):  # others greet
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.words} ended early")
        return line

    def end(self) -> None:
        self.process.stdin.close()
        self.peak = int(self._line())
        self.process.wait()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return tuple(ordered[round(part * (len(ordered) - 1))] for part in (0.25, 0.5, 0.75))


def race(contenders: dict[str, Contender], rounds: int, warm: int = 2) -> None:
    """All contenders of a row, `rounds` times after 1 + `warm` that do not count; each in a new order."""
    for contender in contenders.values():
        contender.ready()
    with ThreadPoolExecutor() as pool:  # a first piece at once: on CUDA each compiles, which takes a minute
        list(pool.map(Contender.once, contenders.values()))
    for number in range(rounds + warm):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            time.sleep(0.1)  # threads of the one before may still wait for work, and take a core to do so
            contenders[name].once()
    for contender in contenders.values():
        contender.end()
        contender.seconds = contender.seconds[1 + warm :]


def rates(contender: Contender, of: str) -> list[float]:
    return [contender.worth[of] / seconds for seconds in contender.seconds]


def show(title: str, contenders: dict[str, Contender], base: str, limit: str | None, of: str | None) -> None:
    """tokens/s, its ratio to `base`'s, and the part of the limit's rate (`of`: operations or bytes) that is reached."""
    print(f"\n{title:44} {'tokens/s':>10}   ÷ {base} (quartiles){'':10} {'of the limit':>13} {'peak, MB':>9}")
    theirs = rates(contenders[base], "tokens")
    for name, contender in contenders.items():
        if name == limit:
            continue
        mine = rates(contender, "tokens")
        low, middle, high = quartiles([a / b for a, b in zip(mine, theirs, strict=True)])
        reached = ""
        if limit and of in contender.worth:
            parts = [a / b for a, b in zip(rates(contender, of), rates(contenders[limit], of), strict=True)]
            reached = f"{median(parts):.0%}"
        peak = contender.peak / 1e6
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"{name:44} {median(mine):10,.0f}   {ratio:34} {reached:>13} {peak:9,.0f}")
    if limit:
        print(f"{limit:44} {median(rates(contenders[limit], of)) / 1e9:10,.0f} G {of} a second")


def others(device: str, peer: str | None, **words: str) -> dict[str, Contender]:
    found = {"transformers": Contender(device, who="transformers", **words)}
    if peer:
        found["nanoGPT"] = Contender(device, who="nanogpt", peer=peer, **words)
    return found


def training(device: str, rounds: int, peer: str | None) -> None:
    cuda = device.startswith("cuda")
    for shape in ("gpt2",) if cuda else ("small", "wide"):
        words = {"work": "train", "shape": shape}
        field = {name: Contender(device, who="ropewalk", pos=name, **words) for name in ("learned", "rope")}
        if cuda:
            field["rope, twice the windows"] = Contender(device, who="ropewalk", pos="rope", windows="32", **words)
            field |= {name: Contender(device, who="ropewalk", pos=name, **words) for name in ("alibi", "t5")}
        field |= others(device, peer, **words) | {"products": Contender(device, work="products", who="machine")}
        race(field, rounds, warm=4)
        show(f"training step, shape {shape}", field, "nanoGPT" if peer else "transformers", "products", "operations")
        state = field["learned"].worth["state"] / 1e6
        print(f"  (of the peak, weights, gradients and moments in float32 take {state:,.0f} MB)")


def decoding(device: str, rounds: int, peer: str | None) -> None:
    for shape in ("small", "gpt2"):
        words = {"work": "decode", "shape": shape}
        field = {name: Contender(device, who="ropewalk", pos=name, **words) for name in ("learned", "rope", "alibi")}
        if device.startswith("cuda"):
            field["rope, bf16"] = Contender(device, who="ropewalk", pos="rope", dtype="bf16", **words)
        slow = peer if shape == "small" else None  # without a cache, minutes for the large one
        field |= others(device, slow, **words) | {"reading": Contender(device, work="read", who="machine")}
        race(field, rounds, warm=1)
        show(f"decoding one sequence, shape {shape}, float32", field, "transformers", "reading", "bytes")


def sweeping(device: str, rounds: int) -> None:
    field = {
        f"{pos}, {what}": Contender(device, work="sweep", who="ropewalk", shape="small", pos=pos, **bare)
        for pos in ("rope", "alibi")
        for what, bare in (("measured", {}), ("bare passes", {"bare": "yes"}))
    }
    race(field, rounds, warm=1)
    print(f"\n{'length sweep 1x to 8x, both protocols':44} {'seconds':>10}   ÷ bare passes (quartiles)")
    for pos in ("rope", "alibi"):
        measured, bare = (field[f"{pos}, {what}"].seconds for what in ("measured", "bare passes"))
        low, middle, high = quartiles([a / b for a, b in zip(measured, bare, strict=True)])
        print(f"{pos:44} {median(measured):10.2f}   {middle:.2f} ({low:.2f} to {high:.2f})")


def schemes(device: str, rounds: int) -> None:
    field = {n: Contender(device, work="train", who="ropewalk", shape="small", pos=n) for n in MODELS}
    race(field, rounds, warm=3)
    show("training step of every scheme, shape small", field, "learned", None, None)


def memory(device: str) -> None:
    added = {}
    for name in MODELS:
        if name != "learned":  # its table ends
            words = (f"device={device}", "work=long_pass", "who=ropewalk", f"pos={name}")
            command = [sys.executable, str(WORKER), *words]
            added[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"\n{'pass over 8,192 tokens, 12 heads, float32':44} {'peak, MB':>10}   ÷ rope")
    for name, peak in added.items():
        print(f"{name:44} {peak / 1e6:10,.0f}   {peak / added['rope']:.2f}")


def main() -> None:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    device = words.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    rounds, peer = int(words.get("rounds", 7)), words.get("peer")
    rows = words.get("rows", "train,decode,sweep,schemes,memory").split(",")
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    print(f"{device} ({name}), torch {torch.__version__}", flush=True)
    if "train" in rows:
        training(device, rounds, peer)
    if "decode" in rows:
        decoding(device, rounds, peer)
    if "sweep" in rows:
        sweeping(device, rounds)
    if "schemes" in rows:
        schemes(device, rounds)
    if "memory" in rows:
        memory(device)


if __name__ == "__main__":
    main()
