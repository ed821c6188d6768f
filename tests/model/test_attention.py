"""The attention functions: blocks of queries, and linear attention against its definition."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import model.attention
import model.linear_attention
from model import GPTConfig
from model.attention import View, attention_weights, softmax_attention
from model.linear_attention import linear_attention
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
def test_attention_is_values_weighed_by_attention_weights(pos):
    """The fused kernel against the weights written out, a chunk of queries after earlier keys."""
    net = small_model(pos)
    q, k, v = (torch.randn(2, 4, length, 16, dtype=torch.float64) for length in (9, 30, 30))
    view = View(net.pos, torch.arange(21, 30), torch.arange(30))
    weights = attention_weights(q, k, view)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 9, dtype=torch.float64))
    assert not weights.masked_select(torch.arange(30) > torch.arange(21, 30)[:, None]).any()
    expected = weights @ v
    if net.pos.weighs_values:
        expected = expected + net.pos.values(weights, view.positions, view.key_positions)
    torch.testing.assert_close(softmax_attention(q, k, v, view), expected, rtol=0, atol=1e-10)


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


@pytest.mark.parametrize("pos", BIASED, ids=scheme_id)
def test_layers_without_gradients_may_cut_other_blocks(pos):
    """In bfloat16 layers that are trained take plain products, in smaller blocks; only equal blocks share a bias."""
    tokens, model = random_tokens(small_model(pos), 1, 400), small_model(pos, torch.float32, train_length=512).train()
    for part in (model.embedding, model.pos, model.blocks[0]):
        part.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(tokens[:, :-1], targets=tokens[:, 1:])
    exact = small_model(pos, train_length=512)(tokens[:, :-1], targets=tokens[:, 1:])
    assert (losses - exact).norm() < 0.03 * exact.norm()


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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_a_long_pass_with_a_bias_needs_little_more_memory_than_ropes():
    """At 12 heads and 8,192 tokens one whole bias would be 3.2 GB."""
    # glibc keeps freed blocks, more or fewer by chance, unless they are large; so every block counts as large.
    how = {"cwd": Path(__file__).parents[2], "env": os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}}

    def peak(pos):
        command = [sys.executable, "-c", PEAK, pos]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, **how).stdout)

    rope = peak("rope")
    for pos in BIASED:
        if len(pos) == 1:
            assert peak(pos["name"]) < 1.5 * rope, pos


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
    monkeypatch.setattr(model.linear_attention, "CHUNK", chunk)
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
def test_a_running_state_equals_the_full_pass(pos, dtype, tolerance):
    net = small_model(pos, dtype, attention="linear", n_kv_head=2)
    tokens = random_tokens(net, 2, net.pos.max_length or 140)
    with torch.no_grad():
        full = net(tokens)
    for chunks in ([5, 3], [20, tokens.shape[1] - 25]):
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
    net = small_model({"name": "rope"}, attention="linear", scaling={"name": "yarn", "factor": 4.0})
    assert net.pos.frequencies(8)[1] == 1.0  # a softmax's temperature would only scale outputs
    net = small_model({"name": "rope"}, attention="linear")
    sizes = set()
    cache = net.new_cache(1, 60)
    for t in range(60):
        net(random_tokens(net, 1, 1, seed=t), cache=cache)
        sizes.add(sum(part.numel() for state in cache.states.values() for part in state))
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
    assert {part.dtype for state in cache.states.values() for part in state} == {torch.float32}
