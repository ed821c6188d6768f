"""Passes whose first token is not at position 0, against shifting by hand."""

import math

import pytest
import torch

import model.attention
from tests.helpers import ABSOLUTE, ALL_SCHEMES, random_tokens, scheme_id, small_model


def shifted_pass(net, tokens, first, **settings):
    return net(tokens, positions=first + torch.arange(tokens.shape[1]), **settings)


RELATIVE = [pos for pos in ALL_SCHEMES if pos["name"] not in ABSOLUTE]


@pytest.mark.parametrize("block", [1, 2**23])
@pytest.mark.parametrize("first", [1, 7, 5000])
@pytest.mark.parametrize("pos", RELATIVE, ids=scheme_id)
def test_only_distances_count(pos, first, block, monkeypatch):
    """100 tokens: far past every scheme's clipping, and several blocks of queries."""
    monkeypatch.setattr(model.attention, "BLOCK", block)
    net = small_model(pos, n_kv_head=2)
    tokens = random_tokens(net, 2, 100)
    with torch.no_grad():
        torch.testing.assert_close(shifted_pass(net, tokens, first), net(tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("first", [1, 7, 5000])
def test_only_distances_count_in_linear_attention(first):
    net = small_model({"name": "rope"}, attention="linear")
    tokens = random_tokens(net, 2, 150)
    with torch.no_grad():
        torch.testing.assert_close(shifted_pass(net, tokens, first), net(tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_learned_positions_read_the_rows_further_down(attention):
    net = small_model({"name": "learned"}, attention=attention)
    tokens = random_tokens(net, 2, 20)
    shifted = shifted_pass(net, tokens, 12)
    with torch.no_grad():
        net.pos.table.copy_(net.pos.table.roll(-12, dims=0))
    torch.testing.assert_close(shifted, net(tokens), rtol=0, atol=1e-12)


def test_sinusoids_are_those_of_the_later_positions(monkeypatch):
    net, first = small_model({"name": "sinusoidal"}), 1000
    tokens, D = random_tokens(net, 2, 9), net.config.width
    shifted = shifted_pass(net, tokens, first)
    angles = [[(first + t) / 10000 ** (2 * (i // 2) / D) for i in range(D)] for t in range(9)]
    table = torch.tensor(
        [[math.cos(angle) if i % 2 else math.sin(angle) for i, angle in enumerate(row)] for row in angles],
        dtype=torch.float64,
    )
    monkeypatch.setattr(net.pos, "embed", lambda rows, positions: rows * math.sqrt(D) + table)
    torch.testing.assert_close(shifted, net(tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_no_later_token_is_seen(pos):
    net = small_model(pos)
    tokens = random_tokens(net, 1, 20)
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 7) % 61
    before, after = (shifted_pass(net, tokens, 12), shifted_pass(net, changed, 12))
    torch.testing.assert_close(after[:, :11], before[:, :11], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 11:], before[:, 11:])


@pytest.mark.parametrize("name", ["dynamic", "yarn", "linear"])
def test_the_length_decides_the_frequencies_not_the_position(name):
    net = small_model({"name": "rope"}, scaling={"name": name}, train_length=32)
    for length in (20, 70):
        tokens = random_tokens(net, 1, length)
        torch.testing.assert_close(shifted_pass(net, tokens, 500), net(tokens), rtol=0, atol=1e-9)
    declared = net(tokens, scaling_length=300)
    assert not torch.allclose(declared, net(tokens))
    torch.testing.assert_close(shifted_pass(net, tokens, 500, scaling_length=300), declared, rtol=0, atol=1e-9)


def test_losses_and_gradients_follow():
    net = small_model({"name": "learned"})
    tokens = random_tokens(net, 1, 20)
    loss = net(tokens[:, :-1], targets=tokens[:, 1:], positions=torch.arange(5, 24))
    expected = torch.nn.functional.cross_entropy(
        net(tokens[:, :-1], positions=torch.arange(5, 24))[0], tokens[0, 1:], reduction="none"
    )
    torch.testing.assert_close(loss[0], expected)
    loss.mean().backward()
    assert net.pos.table.grad.abs().sum(dim=1).nonzero().flatten().tolist() == list(range(5, 24))


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([-1, 0, 1], "grow from at least 0"),
        ([0, 2, 2], "grow from at least 0"),
        ([0, 1], r"positions \(2,\) must be \(T,\)"),
        ([0.0, 1.0, 2.0], "positions must be a tensor of integers"),
    ],
)
def test_what_are_no_positions_is_refused(positions, words):
    net = small_model({"name": "rope"})
    with pytest.raises(ValueError, match=words):
        net(random_tokens(net, 1, 3), positions=torch.tensor(positions))


@pytest.mark.parametrize("settings", [{"pos": {"name": "alibi"}}, {"layers": ["window", "nope"], "window": 4}], ids=str)
def test_a_bias_and_windows_need_positions_without_gaps(settings):
    net = small_model(**{"pos": {"name": "rope"}, **settings})
    net(random_tokens(net, 1, 3), positions=torch.tensor([4, 5, 6]))
    with pytest.raises(ValueError, match="grow one by one"):
        net(random_tokens(net, 1, 3), positions=torch.tensor([4, 5, 7]))


def test_a_cache_and_a_tables_end_are_refused():
    net = small_model({"name": "learned"})
    tokens = random_tokens(net, 1, 5)
    with pytest.raises(ValueError, match="positions and scaling_length are the cache's own"):
        net(tokens, cache=net.new_cache(1, 10), positions=torch.arange(5))
    net(tokens, positions=torch.arange(27, 32))
    with pytest.raises(ValueError, match="position 32 is past the learned table"):
        net(tokens, positions=torch.arange(28, 33))


@pytest.mark.parametrize("name", ["rope", "sinusoidal", "none"])
def test_positions_may_be_given(name):
    net = small_model({"name": name})
    tokens, positions = random_tokens(net, 2, 5), torch.tensor([0, 3, 4, 9, 30])
    given = net(tokens, positions=positions)
    embed, rotation = net.pos.embed, net.pos.rotation
    net.pos.embed = lambda rows, _: embed(rows, positions)
    net.pos.rotation = lambda _, length: rotation(positions, length)
    torch.testing.assert_close(net(tokens), given)
