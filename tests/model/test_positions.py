"""Promises of the position schemes, over the registry: a new scheme is tested by being in it."""

import pytest
import torch

from model import GPT, GPTConfig
from model.checks import complete
from model.positions import SCHEMES, PositionScheme
from tests.helpers import ALL_SCHEMES, cached_logits, random_tokens, scheme_id, small_model

every_scheme = pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15}  # of logits whose spread is about 2


def longest(model: GPT) -> int:
    """Past the training length where the scheme goes there."""
    limit = model.pos.max_length
    return limit if limit is not None else 2 * model.config.train_length + 1


@every_scheme
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunks", [[], [5, 3, 20]], ids=str)
@pytest.mark.parametrize("n_kv_head", [4, 1])
def test_cached_pass_equals_the_full_pass(pos, dtype, chunks, n_kv_head):
    model = small_model(pos, dtype, n_kv_head=n_kv_head)
    tokens = random_tokens(model, 2, longest(model))
    with torch.no_grad():
        full = model(tokens)
    torch.testing.assert_close(cached_logits(model, tokens, chunks), full, rtol=0, atol=TOLERANCE[dtype])


@every_scheme
def test_one_chunk_through_the_cache_equals_the_full_pass(pos):
    model = small_model(pos)
    tokens = random_tokens(model, 3, longest(model))
    torch.testing.assert_close(
        cached_logits(model, tokens, [tokens.shape[1]]), model(tokens).detach(), rtol=0, atol=1e-9
    )


@every_scheme
def test_cache_under_autocast_holds_what_the_full_pass_computes(pos):
    model = small_model(pos, torch.float32)
    tokens = random_tokens(model, 2, longest(model))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.new_cache(2, 4).keys.dtype == torch.bfloat16
        full, cached = model(tokens), cached_logits(model, tokens, [5, 3])
    torch.testing.assert_close(cached.float(), full.float(), rtol=0, atol=TOLERANCE[torch.bfloat16])


@every_scheme
def test_no_token_sees_the_ones_after_it(pos):
    model = small_model(pos)
    tokens = random_tokens(model, 1, longest(model))
    logits = model(tokens)
    for t in (0, 1, tokens.shape[1] // 2, tokens.shape[1] - 2):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 7) % model.config.vocab_size
        torch.testing.assert_close(model(changed)[:, : t + 1], logits[:, : t + 1], rtol=0, atol=1e-12)
        assert not torch.allclose(model(changed)[:, t + 1 :], logits[:, t + 1 :])  # the check can see a change


@every_scheme
def test_same_seed_gives_the_same_weights_outside_the_scheme(pos):
    def state(pos):
        torch.manual_seed(3)
        return GPT(GPTConfig(vocab_size=61, n_layer=2, n_head=4, head_dim=16, train_length=32, pos=pos)).state_dict()

    plain = state({"name": "none"})
    given = state(pos)
    assert {name for name in given if not name.startswith("pos.")} == set(plain)
    assert all(torch.equal(given[name], plain[name]) for name in plain)


@every_scheme
def test_all_parameters_get_a_gradient(pos):
    model = small_model(pos).train()
    length = model.config.train_length
    tokens = random_tokens(model, 2, length + 1)
    model(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
    untouched = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert untouched == []
    for name, parameter in model.pos.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@every_scheme
def test_hooks_keep_shapes(pos):
    model = small_model(pos)
    positions = torch.arange(3, 8)
    rows, heads = torch.randn(2, 5, 64).double(), torch.randn(2, 4, 5, 16).double()
    assert model.pos.embed(rows, positions).shape == rows.shape
    assert model.pos.rotation(positions, 8)(heads).shape == heads.shape
    if model.pos.biased:
        assert model.pos.bias(heads, positions, torch.arange(8)).shape in ((4, 5, 8), (2, 4, 5, 8))
    if model.pos.weighs_values:
        assert model.pos.values(torch.rand(2, 4, 5, 8).double(), positions, torch.arange(8)).shape == heads.shape


@pytest.mark.parametrize("pos", [pos for pos in ALL_SCHEMES if SCHEMES[pos["name"]].biased], ids=scheme_id)
def test_layers_share_a_bias_exactly_where_it_does_not_see_the_queries(pos):
    model = small_model(pos, n_layer=3)
    biases = [
        model.pos.bias(torch.randn(2, model.config.n_head, 5, model.config.head_dim).double(), *places)
        for places in [(torch.arange(7, 12), torch.arange(12))] * 2
    ]
    assert torch.equal(*biases) != model.pos.bias_sees_queries
    called = []
    model.pos.bias = lambda *inputs, bias=model.pos.bias: called.append(0) or bias(*inputs)
    model(random_tokens(model, 2, 9))
    assert len(called) == (3 if model.pos.bias_sees_queries else 1)


def test_learned_positions_end_with_their_table():
    model = small_model({"name": "learned"}, train_length=32)
    assert model.pos.table.shape == (32, 64)
    model(random_tokens(model, 1, 32))
    with pytest.raises(ValueError, match=r"position 32 .* ends at 32"):
        model(random_tokens(model, 1, 33))
    cache = model.new_cache(1, 64)
    model(random_tokens(model, 1, 32), cache=cache)
    with pytest.raises(ValueError, match=r"position 32 .* ends at 32"):
        model(random_tokens(model, 1, 1), cache=cache)
    assert cache.length == 32


def test_learned_row_is_added_to_the_token_row():
    model = small_model({"name": "learned"})
    rows = torch.randn(1, 3, 64).double()
    moved = model.pos.embed(rows, torch.tensor([7, 0, 31]))
    for t, position in enumerate((7, 0, 31)):
        assert torch.equal(moved[0, t], rows[0, t] + model.pos.table[position])


@pytest.mark.parametrize("pos", [{"name": "rope"}, {"name": "rope", "layout": "interleaved"}], ids=scheme_id)
def test_rope_logits_depend_on_distances_only(pos):
    model = small_model(pos)
    tokens = random_tokens(model, 1, 20)
    expected = model(tokens)
    real = model.pos.rotation
    model.pos.rotation = lambda positions, length: real(positions + 100_000, length)
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-8)


# The two classic bugs of a rotary cache: the check above has to see both.


@pytest.mark.parametrize("chunks", [[], [5, 3]], ids=str)
def test_check_sees_new_keys_rotated_from_position_zero(chunks, monkeypatch):
    model = small_model({"name": "rope"})
    tokens = random_tokens(model, 2, 24)
    full = model(tokens)
    real = model.pos.rotation
    monkeypatch.setattr(model.pos, "rotation", lambda positions, length: real(positions - positions[0], length))
    assert (model(tokens) - full).abs().max() < 1e-12  # invisible without a cache
    assert (cached_logits(model, tokens, chunks) - full).abs().max() > 0.01


@pytest.mark.parametrize("chunks", [[], [5, 3]], ids=str)
def test_check_sees_cached_keys_rotated_again(chunks, monkeypatch):
    model = small_model({"name": "rope"})
    tokens = random_tokens(model, 2, 24)
    full = model(tokens)
    from model.cache import Cache

    real = Cache.append

    def again(self, layer, start, k, v):
        held = self.keys[layer, :, :, : self.length]
        held.copy_(model.pos.rotation(torch.arange(self.length), self.length)(held))
        return real(self, layer, start, k, v)

    monkeypatch.setattr(Cache, "append", again)
    assert (cached_logits(model, tokens, [24]) - full).abs().max() < 1e-9  # invisible in a single chunk
    assert (cached_logits(model, tokens, chunks) - full).abs().max() > 0.01


@pytest.mark.parametrize("alone", [True, False])
def test_a_new_scheme_needs_one_class_and_one_line(alone, monkeypatch):
    """The README's example: a linear distance penalty (Press et al. 2021) with one slope for all heads."""

    class Slope(PositionScheme):
        def __init__(self, config, *, slope: float = 0.1):
            super().__init__(config)
            self.slope, self.n_head = slope, config.n_head

        if alone:  # decided by distance and head alone

            def by_distance(self, distances):
                return (-self.slope * distances.float()).expand(self.n_head, -1)

        else:

            def bias(self, queries, query_positions, key_positions):
                distance = (query_positions[:, None] - key_positions).float()
                return (-self.slope * distance).expand(self.n_head, -1, -1)

    monkeypatch.setitem(SCHEMES, "slope", Slope)
    model = small_model({"name": "slope", "slope": 0.25})
    assert model.config.pos == {"name": "slope", "slope": 0.25}
    tokens = random_tokens(model, 2, 40)
    full = model(tokens)
    torch.testing.assert_close(cached_logits(model, tokens, [5, 3]), full, rtol=0, atol=1e-6)  # a float32 bias
    assert not torch.allclose(full, small_model({"name": "none"})(tokens))
    alibi = small_model({"name": "alibi"})
    monkeypatch.setattr(alibi.pos, "slopes", lambda device: torch.full((4,), 0.25, device=device))
    torch.testing.assert_close(full, alibi(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("pos", "words"),
    [
        ({"name": "rop"}, "known names are .*rope"),
        ({}, "must be a mapping"),
        ("rope", "must be a mapping"),
        ({"name": "rope", "bas": 10.0}, r"pos\.bas.*base"),
        ({"name": "learned", "base": 10.0}, r"pos\.base"),
        ({"name": "rope", "base": "10"}, r"pos\.base='10'"),
        ({"name": "rope", "base": True}, r"pos\.base=True"),
        ({"name": "rope", "base": 0}, r"pos\.base=0"),
        ({"name": "rope", "layout": "both"}, "half, interleaved"),
        ({"name": "rope", "rotary_fraction": 0.0}, "rotary_fraction"),
        ({"name": "rope", "rotary_fraction": 1.5}, "rotary_fraction"),
        ({"name": "rope", "rotary_fraction": 0.2}, "pairs"),
    ],
    ids=str,
)
def test_schemes_refuse(pos, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(vocab_size=61, n_layer=1, n_head=2, head_dim=16, pos=pos)


def test_defaults_are_filled_in():
    wanted = {"name": "rope", "base": 500.0, "layout": "half", "rotary_fraction": 1.0, "turning": 1.0}
    assert complete("pos", SCHEMES, {"name": "rope", "base": 500}) == wanted
