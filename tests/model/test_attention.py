"""The attention functions: blocks of queries, and linear attention against its definition."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import model.attention
from model import GPTConfig
from model.attention import linear_attention
from model.positions import SCHEMES
from tests.helpers import ALL_SCHEMES, cached_logits, random_tokens, scheme_id, small_model

BIASED = [pos for pos in ALL_SCHEMES if SCHEMES[pos["name"]].biased]
LINEAR = [pos for pos in ALL_SCHEMES if not SCHEMES[pos["name"]].biased]


@pytest.mark.parametrize("pos", BIASED, ids=scheme_id)
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_blocks_of_queries_change_nothing(pos, n_kv_head, monkeypatch):
    whole = small_model(pos, n_kv_head=n_kv_head)
    tokens = random_tokens(whole, 2, 100)
    expected = whole(tokens)
    expected.square().mean().backward()
    gradient = {name: parameter.grad.clone() for name, parameter in whole.named_parameters()}
    whole.zero_grad()
    monkeypatch.setattr(model.attention, "BLOCK", 1)  # the smallest blocks there are
    logits = whole(tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(cached_logits(whole, tokens, [40, 3]), expected.detach(), rtol=0, atol=1e-9)
    logits.square().mean().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_plain_products_are_the_fused_kernel(pos, n_kv_head, monkeypatch):
    """What a CPU trains on in bfloat16, in float64 here, against torch's kernel: losses and every gradient."""
    found = []
    whole = small_model(pos, n_kv_head=n_kv_head, train_length=512).train()
    tokens = random_tokens(whole, 2, 301)
    for plain in (False, True):
        monkeypatch.setattr(model.attention, "_plain_is_faster", lambda q, plain=plain: plain)
        whole.zero_grad()
        losses = whole(tokens[:, :-1], targets=tokens[:, 1:])
        losses.square().mean().backward()
        found.append([losses.detach(), *(parameter.grad for parameter in whole.parameters())])
    for fused, product in zip(*found, strict=True):
        torch.testing.assert_close(product, fused, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("pos", [pos for pos in BIASED if SCHEMES[pos["name"]].shared], ids=scheme_id)
def test_a_bias_by_distance_is_formed_once_a_pass(pos, monkeypatch):
    network, calls = small_model(pos), []
    real = network.pos.by_distance
    monkeypatch.setattr(network.pos, "by_distance", lambda distances: calls.append(len(distances)) or real(distances))
    with torch.no_grad():
        network(random_tokens(network, 2, 20))
    assert calls == [39]


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_run_again_for_their_gradients(pos, reentrant, monkeypatch):
    """Activation checkpointing of blocks, from outside: each layer's graph has to be its own."""
    network = small_model(pos).train()
    tokens = random_tokens(network, 2, 30)
    gradients = []
    for again in (False, True):
        if again:
            for block in network.blocks:
                inner = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=reentrant)
                monkeypatch.setattr(block, "forward", inner)
        network.zero_grad()
        network(tokens).square().mean().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_layers_of_different_dtypes(pos):
    class Exact(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block.double()

        def forward(self, x, step):
            return self.block(x.double(), step).float()

    network = small_model(pos, torch.float32)
    tokens = random_tokens(network, 2, 30)
    with torch.no_grad():
        expected = network(tokens)
        network.blocks[1] = Exact(network.blocks[1])
        torch.testing.assert_close(network(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_layers_in_blocks_of_different_sizes(pos):
    """In bfloat16 on a CPU a frozen layer attends by the fused kernel, at once, and the next by products, in blocks."""
    network = small_model(pos, torch.float32, train_length=600).train()
    for part in (network.embedding, network.pos, network.blocks[0]):
        part.requires_grad_(False)
    tokens = random_tokens(network, 1, 601)
    with torch.autocast("cpu", torch.bfloat16):
        losses = network(tokens[:, :-1], targets=tokens[:, 1:])
        losses.mean().backward()
        with torch.no_grad():
            torch.testing.assert_close(
                network(tokens[:, :-1], targets=tokens[:, 1:]).mean(), losses.mean(), atol=0.02, rtol=0
            )


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_training_in_bfloat16_is_near_float64(pos):
    exact = small_model(pos).train()
    rounded = small_model(pos, torch.float32).train()
    rounded.load_state_dict(exact.state_dict())
    tokens = random_tokens(exact, 4, 33)
    exact(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        losses = rounded(tokens[:, :-1], targets=tokens[:, 1:])
    losses.mean().backward()
    mine, theirs = (torch.cat([p.grad.flatten() for p in m.parameters()]).double() for m in (rounded, exact))
    assert (mine - theirs).norm() < 0.03 * theirs.norm()


# VmHWM is the peak of this program alone; getrusage's would start from the peak of the one that started it.
PEAK = """
import re, sys, torch
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
from model import GPT, GPTConfig
torch.manual_seed(0)
config = GPTConfig(vocab_size=257, n_layer=1, n_head=12, train_length=64, pos={"name": sys.argv[1]})
model = GPT(config).eval()
with torch.inference_mode():
    model(torch.zeros((1, 64), dtype=torch.int64))
    before = peak()
    model(torch.zeros((1, 8192), dtype=torch.int64))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_a_long_pass_with_a_bias_needs_no_more_than_twice_ropes_memory():
    """At 12 heads and 8,192 tokens one whole bias would be 3.2 GB."""
    repository = Path(__file__).parents[2]

    def peak(pos):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, pos], cwd=repository, capture_output=True, text=True, check=True, timeout=200
        )
        return int(done.stdout)

    rope = peak("rope")
    for pos in BIASED:
        if len(pos) == 1:
            assert peak(pos["name"]) < 2 * rope, pos


def linear_by_hand(q, k, v, angles):
    """Su et al. 2021, equation 19, one head, one query and one key at a time; planes are (i, i + half)."""

    def phi(x):
        return torch.tensor([value + 1 if value > 0 else math.exp(value) for value in x.tolist()], dtype=x.dtype)

    def turn(x, position):
        out, half = x.clone(), len(angles)
        for i, theta in enumerate(angles):
            c, s = math.cos(position * theta), math.sin(position * theta)
            out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i] * s + x[i + half] * c
        return out

    rows = []
    for m in range(len(q)):
        top, bottom = torch.zeros_like(v[0]), 0.0
        for n in range(m + 1):
            top += (turn(phi(q[m]), m) @ turn(phi(k[n]), n)) * v[n]
            bottom += (phi(q[m]) @ phi(k[n])).item()
        rows.append(top / bottom)
    return torch.stack(rows)


@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_linear_attention_is_its_definition(chunk, monkeypatch):
    monkeypatch.setattr(model.attention, "CHUNK", chunk)
    torch.manual_seed(0)
    scheme = small_model({"name": "rope"}, head_dim=8).pos
    q, k, v = (torch.randn(2, 3, 11, 8, dtype=torch.float64) for _ in range(3))
    y, (sums, norms) = linear_attention(q, k, v, scheme.rotation(torch.arange(11), 11))
    angles = [10000.0 ** (-2 * i / 8) for i in range(4)]
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(y[b, h], linear_by_hand(q[b, h], k[b, h], v[b, h], angles), rtol=1e-9, atol=1e-9)
    assert sums.shape == (2, 3, 8, 8)
    torch.testing.assert_close(norms, (torch.nn.functional.elu(k) + 1).sum(dim=2))


@pytest.mark.parametrize("pos", LINEAR, ids=scheme_id)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_a_running_state_equals_the_full_pass(pos, dtype, tolerance, n_kv_head):
    net = small_model(pos, dtype, attention="linear", n_kv_head=n_kv_head)
    tokens = random_tokens(net, 2, net.pos.max_length or 150)
    with torch.no_grad():
        full = net(tokens)
    for chunks in ([], [5, 3], [20]):
        torch.testing.assert_close(cached_logits(net, tokens, chunks), full, rtol=0, atol=tolerance)


def test_the_normaliser_never_rounds_to_zero():
    far = torch.full((1, 1, 4, 8), -20.0, requires_grad=True)  # elu(x) + 1 is exactly 0 in float32
    values = torch.arange(32.0).view(1, 1, 4, 8)
    y, _ = linear_attention(far, far, values, lambda x: x)
    expected = values.cumsum(dim=2) / torch.arange(1, 5)[:, None]  # equal keys: the mean so far
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert far.grad.isfinite().all()


def test_a_running_state_does_not_grow():
    net = small_model({"name": "rope"}, attention="linear")
    sizes = set()
    cache = net.new_cache(1, 60)
    for t in range(60):
        net(random_tokens(net, 1, 1, seed=t), cache=cache)
        sizes.add(sum(part.numel() for state in cache.states for part in state))
    assert sizes == {2 * 4 * (16 * 16 + 16)}


@pytest.mark.parametrize("pos", LINEAR, ids=scheme_id)
def test_linear_attention_sees_no_later_token(pos):
    net = small_model(pos, attention="linear")
    tokens = random_tokens(net, 1, 30)
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 7) % 61
    torch.testing.assert_close(net(changed)[:, :15], net(tokens)[:, :15], rtol=0, atol=1e-12)
    assert not torch.allclose(net(changed)[:, 15:], net(tokens)[:, 15:])


@pytest.mark.parametrize("pos", BIASED, ids=scheme_id)
def test_linear_attention_refuses_schemes_that_need_a_score_matrix(pos):
    with pytest.raises(ValueError, match=rf"model\.attention=linear with pos={pos['name']}.*score matrix"):
        GPTConfig(vocab_size=61, pos=pos, attention="linear")
    with pytest.raises(ValueError, match=r"model\.attention='fast': known are softmax, linear"):
        GPTConfig(vocab_size=61, attention="fast")


def test_linear_attention_is_kept_in_float32_under_autocast():
    net = small_model({"name": "rope"}, torch.float32, attention="linear")
    tokens = random_tokens(net, 1, 40)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = net.new_cache(1, 40)
        net(tokens, cache=cache)
    assert {part.dtype for state in cache.states for part in state} == {torch.float32}
