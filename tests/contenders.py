"""What tests/benchmark.py measures, each in a process of its own: started once, it does one piece of work a line read.

    python tests/contenders.py work=train who=ropewalk pos=rope shape=small device=cpu     (not to be called by hand)

It prints what a piece is worth (tokens, operations, bytes), then the seconds of each, and at the end its peak memory.
"""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from model import GPT, GPTConfig
from model.positions import SCHEMES
from runs.devices import autocast, pick_device, pick_precision

SHAPES = {  # layers, heads of 64, ids, windows per step, tokens per window
    "small": (4, 4, 257, 16, 256),
    "wide": (4, 12, 50257, 4, 256),
    "gpt2": (12, 12, 50257, 16, 1024),
}
MODELS = {name: {"pos": {"name": name}} for name in SCHEMES}
MODELS["linear"] = {"pos": {"name": "rope"}, "attention": "linear"}
PROMPT, NEW = 16, 256


def build(words: dict, device: torch.device, length: int) -> torch.nn.Module:
    """The contender's model with 64 · heads dimensions and `length` positions, without dropout."""
    layers, heads, ids, _, _ = SHAPES[words["shape"]]
    torch.manual_seed(0)
    if words["who"] == "ropewalk":
        shape = {"vocab_size": ids, "n_layer": layers, "n_head": heads, "train_length": length}
        model = GPT(GPTConfig(**shape, **MODELS[words["pos"]]))
    elif words["who"] == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"n_positions": length, "n_embd": 64 * heads, "n_layer": layers, "n_head": heads}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=ids, bos_token_id=0, eos_token_id=None, **shape, **no_dropout))
    else:
        spec = importlib.util.spec_from_file_location("peer", Path(words["peer"]) / "model.py")
        peer = sys.modules["peer"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(peer)
        shape = {"block_size": length, "n_embd": 64 * heads, "n_layer": layers, "n_head": heads}
        model = peer.GPT(peer.GPTConfig(vocab_size=ids, bias=True, dropout=0.0, **shape))
    return model.to(device)


def train(words: dict, device: torch.device):
    """Forward, backward, clipping and AdamW, in the precision that train.py picks; on CUDA compiled, if not HF's."""
    _, _, ids, windows, length = SHAPES[words["shape"]]
    windows = int(words.get("windows", windows))
    model, who = build(words, device, length).train(), words["who"]
    tokens = torch.randint(ids, (windows, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    precision = pick_precision("auto", device)
    if who == "nanogpt":
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    else:
        groups = model.optimizer_groups(0.1) if who == "ropewalk" else model.parameters()
        optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    compiles = device.type == "cuda" and who != "transformers"
    forward = torch.compile(model) if compiles else model
    loss = {
        "ropewalk": lambda: forward(inputs, targets=targets).sum() / targets.numel(),
        "transformers": lambda: forward(input_ids=inputs, labels=inputs).loss,
        "nanogpt": lambda: forward(inputs, targets)[1],
    }[who]

    def step() -> None:
        with autocast(device, precision):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    worth = {"tokens": windows * length}
    if who == "ropewalk":
        worth["operations"] = 3 * model.flops_per_token(length) * windows * length
        worth["state"] = 16 * sum(p.numel() for p in model.parameters())  # weights, gradients, two moments: float32
    return step, worth


def decode(words: dict, device: torch.device):
    """One sequence, greedily, float32; on CUDA also bf16 (dtype=bf16)."""
    model = build(words, device, 1024).eval()
    if words.get("dtype") == "bf16":
        model = model.bfloat16()
    prompt = torch.randint(SHAPES[words["shape"]][2], (1, PROMPT), device=device)
    greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    generate = {
        "ropewalk": lambda: model.generate(prompt, NEW),
        "transformers": lambda: model.generate(prompt, min_new_tokens=NEW, use_cache=True, **greedy),
        "nanogpt": lambda: model.generate(prompt, NEW, top_k=1),
    }[words["who"]]
    return generate, {"tokens": NEW, "bytes": NEW * sum(p.numel() * p.element_size() for p in model.parameters())}


def sweep(words: dict, device: torch.device):
    """Lengths of 1 to 8 times 256, 8,192 targets each: by evaluate_lengths, or the bare passes over as many windows."""
    from eval import evaluate_lengths

    model, precision = build(words, device, 256).eval(), pick_precision("auto", device)
    text = torch.randint(257, (50_000,))
    lengths, stride, targets = [256, 320, 384, 512, 1024, 2048], 128, 8192

    def measured() -> None:
        for protocol, scored in (("sliding", stride), ("nonoverlapping", max(lengths))):
            evaluate_lengths(model, text, lengths, protocol, stride, max_windows=targets // scored)

    @torch.inference_mode()
    def passes() -> None:
        for length in lengths:
            for scored in (stride, length):
                left = -(-targets // scored)
                while left:
                    batch = min(left, max(1, 16384 // length))
                    left -= batch
                    tokens = torch.randint(257, (batch, length + 1), device=device)
                    goals = tokens[:, 1:].clone()
                    goals[:, : length - scored] = -100
                    model(tokens[:, :-1], targets=goals).cpu()

    work = passes if words.get("bare") else measured

    def once() -> None:
        with autocast(device, precision):
            work()

    return once, {"tokens": 2 * len(lengths) * targets}


def products(words: dict, device: torch.device):
    """The machine's own limit for training: square matrix products in the precision that train.py picks."""
    bf16 = pick_precision("auto", device) == "bf16"
    size = 8192 if device.type == "cuda" else 2048
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    return (lambda: a @ a), {"operations": 2 * size**3}


def read(words: dict, device: torch.device):
    """The machine's own limit for decoding: a sum over 1 GiB reads it once."""
    data = torch.randn(2**28, device=device)
    return data.sum, {"bytes": 2**30}


def peak_memory(device: torch.device) -> int:
    """Bytes: of the process on the CPU, from Linux's /proc; of the allocator on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()  # getrusage's peak would include the starting process'
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def long_pass(words: dict, device: torch.device) -> None:
    """Print the bytes that a pass over 8,192 tokens adds to the peak: one layer of 12 heads, float32."""
    config = GPTConfig(vocab_size=257, n_layer=1, n_head=12, train_length=64, **MODELS[words["pos"]])
    model = GPT(config).eval().to(device)
    with torch.inference_mode():
        model(torch.zeros((1, 64), dtype=torch.int64, device=device))
        before = peak_memory(device)
        model(torch.zeros((1, 8192), dtype=torch.int64, device=device))
    print(peak_memory(device) - before)


def main() -> None:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    # Ours is set up as train.py and eval.py do it; the others are left as they come.
    device = pick_device(words["device"]) if words["who"] == "ropewalk" else torch.device(words["device"])
    if words["work"] == "long_pass":
        return long_pass(words, device)
    work = {"train": train, "decode": decode, "sweep": sweep, "products": products, "read": read}[words["work"]]
    once, worth = work(words, device)
    print(json.dumps(worth), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        print(time.perf_counter() - start, flush=True)
    print(peak_memory(device))


if __name__ == "__main__":
    main()
