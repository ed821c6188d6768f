"""Frequency scalings in a whole model: cached decoding stays exact where the frequencies change with the length."""

import pytest
import torch

from model import GPTConfig
from model.scaling import SCALINGS
from tests.helpers import random_tokens, small_model

ONES = [1.0] * 8
# keys a scaling needs or that are worth a test; one that is not listed is tested with an open and a given factor
NEEDED = {"longrope": {"short": ONES, "long": [1.0 + 0.7 * i for i in range(8)]}}
ALL_SCALINGS = [
    {"name": name, "factor": factor, **NEEDED.get(name, {})} for name in SCALINGS for factor in (None, 1.0, 2.5)
]
every_scaling = pytest.mark.parametrize("scaling", ALL_SCALINGS, ids=lambda s: f"{s['name']}-{s['factor']}")
every_attention = pytest.mark.parametrize("attention", ["softmax", "linear"])
T = 16  # the training length; sequences go to more than twice that


def scaled_model(scaling, **settings):
    return small_model({"name": "rope"}, scaling=scaling, train_length=T, **settings)


@every_scaling
@every_attention
@pytest.mark.parametrize("chunks", [[5, 3], [9, 9, 9]], ids=str)
def test_each_cached_step_is_the_last_row_of_a_full_pass_over_the_tokens_so_far(scaling, attention, chunks):
    """The headline: two layers, past the training length, however the prompt was chunked."""
    model = scaled_model(scaling, attention=attention)
    tokens = random_tokens(model, 2, 2 * T + 5)
    cache = model.new_cache(2, tokens.shape[1])
    done = 0
    with torch.no_grad():
        for size in chunks + [1] * (tokens.shape[1] - sum(chunks)):
            step = model(tokens[:, done : done + size], cache=cache)
            done += size
            full = model(tokens[:, :done])
            torch.testing.assert_close(step, full[:, -size:], rtol=0, atol=1e-9)


def passed_tokens(model):
    """A list to which every pass adds how many tokens it passed, seen where the first block gets them."""
    passed = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: passed.append(inputs[0].shape[1]))
    return passed


@every_scaling
@every_attention
def test_under_a_declared_length_the_ordinary_cache_is_exact(scaling, attention):
    model = scaled_model(scaling, attention=attention)
    tokens = random_tokens(model, 2, 2 * T + 5)
    full = model(tokens, scaling_length=3 * T).detach()
    cache = model.new_cache(2, tokens.shape[1], scaling_length=3 * T)
    passed = passed_tokens(model)
    steps = torch.cat([model(part, cache=cache) for part in tokens.split([5, 3, *[1] * 29], dim=1)], dim=1)
    torch.testing.assert_close(steps, full, rtol=0, atol=1e-9)
    assert passed == [5, 3, *[1] * 29]  # nothing was passed again


def test_which_tokens_are_passed_again():
    def passes(scaling):
        model = scaled_model(scaling)
        tokens, passed = random_tokens(model, 1, T + 4), passed_tokens(model)
        cache = model.new_cache(1, T + 4)
        for part in tokens.split([T - 1, *[1] * 5], dim=1):
            model(part, cache=cache)
        return passed

    once = [T - 1, 1, T + 1, 1, 1, 1]
    assert passes({"name": "longrope", "factor": 4.0, **NEEDED["longrope"]}) == once
    assert passes({"name": "dynamic"}) == [T - 1, 1, T + 1, T + 2, T + 3, T + 4]
    assert passes({"name": "yarn", "factor": 4.0}) == [T - 1, 1, 1, 1, 1, 1]


def test_the_check_sees_keys_that_keep_an_older_rotation(monkeypatch):
    model = scaled_model({"name": "dynamic", "factor": 4.0})
    tokens = random_tokens(model, 1, 2 * T)
    full = model(tokens)
    monkeypatch.setattr(model.pos, "regime", lambda length: None)
    cache = model.new_cache(1, 2 * T)
    steps = torch.cat([model(part, cache=cache) for part in tokens.split(1, dim=1)], dim=1)
    assert (steps - full)[:, -1].abs().max() > 1e-3


def test_a_shorter_sequence_after_a_longer_one_is_as_if_the_longer_had_never_been():
    model = scaled_model({"name": "dynamic"})
    tokens = random_tokens(model, 1, 3 * T)
    short = model(tokens[:, : T + 3])
    model(tokens)
    assert torch.equal(model(tokens[:, : T + 3]), short)


@every_scaling
def test_generation_is_the_same_with_and_without_cache(scaling):
    model = scaled_model(scaling)
    prompt = random_tokens(model, 2, 7)
    for scaling_length in (None, 3 * T):
        with_cache, without = (
            model.generate(prompt, 2 * T, use_cache=use_cache, scaling_length=scaling_length)
            for use_cache in (True, False)
        )
        assert torch.equal(with_cache, without)


@every_scaling
def test_factor_one_and_short_sequences_are_plain_rope_where_promised(scaling):
    plain, model = small_model({"name": "rope"}, train_length=T), scaled_model(scaling)
    tokens = random_tokens(model, 2, T)
    if scaling["name"] == "dynamic" or scaling["factor"] in (1.0, None):
        assert torch.equal(model(tokens), plain(tokens))
    else:
        assert not torch.equal(model(tokens), plain(tokens))


def test_a_failed_recomputation_loses_nothing(monkeypatch):
    model = scaled_model({"name": "dynamic"})
    tokens = random_tokens(model, 1, T + 3)
    cache = model.new_cache(1, T + 3)
    model(tokens[:, :T], cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens[:, T : T + 2], cache=cache)
    assert cache.length == T
    step = model(tokens[:, T:], cache=cache)
    torch.testing.assert_close(step, model(tokens)[:, T:].detach(), rtol=0, atol=1e-9)


def test_declared_lengths_that_do_not_fit_are_refused():
    model = scaled_model({"name": "dynamic"})
    tokens = random_tokens(model, 1, 4)
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="scaling_length"):
            model(tokens, scaling_length=wrong)
    with pytest.raises(ValueError, match="scaling_length are the cache's own"):
        model(tokens, cache=model.new_cache(1, 8, scaling_length=64), scaling_length=32)


@pytest.mark.parametrize("pos", ["learned", "alibi", "none"])
def test_a_scaling_needs_frequencies(pos):
    with pytest.raises(ValueError, match=rf"scaling='yarn' on pos={pos}.*scheme that rotates \(rope\)"):
        small_model({"name": pos}, scaling={"name": "yarn"})


def test_scaling_starts_from_the_original_length():
    long = GPTConfig(vocab_size=61, train_length=64, original_length=16, scaling={"name": "linear"})
    assert long.scaling == {"name": "linear", "factor": None}
    model = small_model({"name": "rope"}, scaling={"name": "linear"}, train_length=64, original_length=16)
    assert torch.equal(model.pos.frequencies(64)[0] * 4, model.pos.frequencies(16)[0])
    assert GPTConfig(vocab_size=61, scaling={"name": "none"}).scaling is None
