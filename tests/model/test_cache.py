"""The cache by itself, and decoding with it."""

import pytest
import torch

from model.sampling import sample
from tests.helpers import ALL_SCHEMES, random_tokens, small_model


def test_overflow_raises_and_changes_nothing():
    model = small_model({"name": "rope"})
    cache = model.new_cache(2, 10)
    tokens = random_tokens(model, 2, 12)
    model(tokens[:, :8], cache=cache)
    before = cache.keys.clone()
    with pytest.raises(ValueError, match=r"max_length=10 tokens, and holds 8"):
        model(tokens[:, 8:11], cache=cache)
    assert cache.length == 8
    assert torch.equal(cache.keys, before)
    model(tokens[:, 8:10], cache=cache)  # what fits still does
    assert cache.length == 10


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_a_failed_pass_leaves_the_cache_usable(attention, monkeypatch):
    model = small_model({"name": "rope"}, attention=attention)
    tokens = random_tokens(model, 1, 9)
    cache = model.new_cache(1, 9)
    model(tokens[:, :4], cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens[:, 4:6], cache=cache)
    assert cache.length == 4
    last = model(tokens[:, 4:], cache=cache)
    torch.testing.assert_close(last, model(tokens)[:, 4:].detach(), rtol=0, atol=1e-9)


def test_cache_refuses():
    model = small_model({"name": "rope"})
    cache = model.new_cache(2, 10)
    with pytest.raises(ValueError, match=r"tokens \(3, 4\) do not fit: the cache has room for 2 sequences"):
        model(random_tokens(model, 3, 4), cache=cache)
    for batch_size, max_length in ((0, 4), (1, 0), (1, 2.5)):
        with pytest.raises(ValueError, match="whole number"):
            model.new_cache(batch_size, max_length)


def test_keys_are_stored_once_and_never_touched_again():
    model = small_model({"name": "rope"})
    tokens = random_tokens(model, 1, 20)
    cache = model.new_cache(1, 20)
    model(tokens[:, :7], cache=cache)
    held = cache.keys[..., :7, :].clone()
    place = cache.keys.data_ptr()
    for t in range(7, 20):
        model(tokens[:, t : t + 1], cache=cache)
    assert torch.equal(cache.keys[..., :7, :], held)
    assert cache.keys.data_ptr() == place  # preallocated
    assert cache.keys.shape == (2, 1, 4, 20, 16)


def test_cached_logits_refuse_a_gradient_they_do_not_have():
    model = small_model({"name": "rope"})
    logits = model(random_tokens(model, 1, 5), cache=model.new_cache(1, 5))
    with pytest.raises(RuntimeError, match="does not require grad"):
        logits.sum().backward()


SAMPLING = [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.7}]


GENERATED = [(pos, {}) for pos in ALL_SCHEMES]
GENERATED += [({"name": name}, settings) for name in ("rope", "learned") for settings in SAMPLING]


@pytest.mark.parametrize(("pos", "settings"), GENERATED, ids=str)
def test_generation_is_the_same_with_and_without_cache(pos, settings):
    model = small_model(pos)
    prompt = random_tokens(model, 3, 5)
    room = model.pos.max_length or 48
    outputs = [
        model.generate(prompt, room - 5, use_cache=use_cache, generator=torch.Generator().manual_seed(4), **settings)
        for use_cache in (True, False)
    ]
    assert torch.equal(*outputs)
    assert outputs[0].shape == (3, room)
    assert torch.equal(outputs[0][:, :5], prompt)


def test_greedy_generation_is_the_argmax_of_full_passes():
    model = small_model({"name": "rope"})
    tokens = random_tokens(model, 2, 3)
    out = model.generate(tokens, 40)
    for _ in range(40):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(out, tokens)


def test_generation_stops_at_the_end_of_a_learned_table():
    model = small_model({"name": "learned"}, train_length=32)
    prompt = random_tokens(model, 1, 4)
    # the last token drawn is never fed back: one more than the table fits
    assert model.generate(prompt, 29).shape == (1, 33)
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=r"position 32 .* ends at 32"):
            model.generate(prompt, 30, use_cache=use_cache)


def test_generation_restores_the_mode_and_takes_no_tokens():
    model = small_model({"name": "rope"}, dropout=0.5).train()
    prompt = random_tokens(model, 1, 4)
    assert torch.equal(model.generate(prompt, 0), prompt)
    assert torch.equal(model.generate(prompt, 10), model.generate(prompt, 10))  # no dropout
    assert model.training


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 1.5}, r"max_new_tokens=1\.5"),
        ({"max_new_tokens": None}, "max_new_tokens=None: must be .* at least 0"),
        ({"max_new_tokens": 1, "temperature": -1.0}, r"temperature=-1\.0"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": 1, "temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"max_new_tokens": 1, "temperature": 1.0, "top_p": 0.0}, r"top_p=0\.0"),
        ({"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.5}, r"top_p=1\.5"),
    ],
    ids=str,
)
def test_generation_refuses(settings, words):
    model = small_model({"name": "rope"})
    with pytest.raises(ValueError, match=words):
        model.generate(random_tokens(model, 1, 4), **settings)
    for empty in ((1, 0), (0, 3)):
        with pytest.raises(ValueError, match="B and T of at least 1"):
            model.generate(torch.zeros(empty, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.generate(torch.full((1, 2), model.config.vocab_size), 0)


def frequencies(logits, n=4000, **settings):
    rows = torch.tensor(logits).log().expand(n, -1)
    drawn = sample(rows, generator=torch.Generator().manual_seed(0), **settings)
    return (torch.bincount(drawn.flatten(), minlength=len(logits)) / n).tolist()


def test_sampling_follows_the_distribution():
    p = [0.5, 0.3, 0.15, 0.05]
    assert frequencies(p, temperature=1.0) == pytest.approx(p, abs=0.03)
    assert frequencies(p, temperature=1.0, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    # 0.5 does not reach 0.6, 0.5 + 0.3 does
    assert frequencies(p, temperature=1.0, top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert frequencies(p, temperature=1.0, top_p=1e-6) == [1, 0, 0, 0]
    # temperature 1/2 squares the odds
    squared = [value**2 / sum(other**2 for other in p) for value in p]
    assert frequencies(p, temperature=0.5) == pytest.approx(squared, abs=0.03)
    assert frequencies(p) == [1, 0, 0, 0]


def test_top_k_keeps_k_of_equals_and_takes_more_than_there_are():
    assert sum(share > 0 for share in frequencies([0.25] * 4, temperature=1.0, top_k=2)) == 2
    assert frequencies([0.5, 0.5], temperature=1.0, top_k=99) == pytest.approx([0.5, 0.5], abs=0.03)


def test_cache_is_small_for_grouped_heads():
    one, four = (small_model({"name": "rope"}, n_kv_head=n).new_cache(1, 8) for n in (1, 4))
    assert one.keys.numel() * 4 == four.keys.numel()
