"""The network's public functions given anything: a right answer or a ValueError, and no state left half-changed."""

import inspect
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from model import GPT, GPTConfig
from model.convert import main as convert_main
from model.diagnosis import main as rope_main
from model.hf import main as hf_main
from model.positions import SCHEMES
from model.registry import lookup
from model.rope import rope_frequencies, rotate
from model.sampling import continuations, sample
from model.scaling import SCALINGS
from tests.fuzzing import examples, in_time, scalars, spellings, spoilt, typed
from tests.helpers import ALL_SCHEMES, small_model

V, LENGTH = 13, 16
SHAPE = {"vocab_size": V, "n_layer": 2, "n_head": 2, "head_dim": 8, "train_length": LENGTH}
MODELS = [small_model(pos, **SHAPE) for pos in ALL_SCHEMES]
DTYPES = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.bfloat16,
    torch.complex64,
]

models = st.integers(0, len(MODELS) - 1).map(MODELS.__getitem__)
seeds = st.integers(0, 99)
sizes = st.integers(1, 4)
batches = st.builds(
    lambda b, t, seed: torch.randint(V, (b, t), generator=torch.Generator().manual_seed(seed)), sizes, sizes, seeds
)
odd_tensors = st.builds(
    lambda shape, dtype, high, device: (torch.arange(math.prod(shape)) % high).reshape(shape).to(dtype).to(device),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(1, 300),
    st.sampled_from(["cpu", "cpu", "cpu", "meta"]),
)
odd_batches = odd_tensors | st.sampled_from(
    [[[1, 2]], np.ones((1, 2), dtype=np.int64), "ab", None, -torch.ones((1, 2), dtype=torch.int64)]
)


@st.composite
def scalings(draw, planes: int = 4) -> dict:
    """A right one, by the keys that the registry has."""
    name = draw(st.sampled_from(["none", *SCALINGS]))
    known = {} if name == "none" else lookup("scaling", SCALINGS, {"name": name})[1]
    found = {"name": name}
    for key, default in known.items():
        if default is inspect.Parameter.empty:
            found[key] = draw(st.lists(st.floats(1, 8), min_size=planes, max_size=planes))
        else:
            found[key] = draw(st.none() | st.floats(1, 8)) if default is None else default * draw(st.floats(0.6, 1.6))
    return found


def odd_dicts(keys: list[str], names: list[str]):
    """What may stand for a scheme or a scaling, most of it nearly right."""
    some = st.dictionaries(st.sampled_from(keys), scalars | st.lists(scalars, max_size=4), max_size=2)
    return st.builds(lambda name, given: {"name": name, **given}, st.sampled_from(names), some)


POS_KEYS = ["name", "nope", *{key for name in SCHEMES for key in lookup("pos", SCHEMES, {"name": name})[1]}]
SCALING_KEYS = ["name", "nope", *{key for name in SCALINGS for key in lookup("scaling", SCALINGS, {"name": name})[1]}]
ODD = {"pos": odd_dicts(POS_KEYS, [*SCHEMES]), "scaling": odd_dicts(SCALING_KEYS, [*SCALINGS])}
CONFIG = {
    "vocab_size": st.integers(1, 70), "n_layer": sizes, "n_head": st.just(4), "n_kv_head": st.sampled_from([1, 2]),
    "head_dim": st.just(8), "width": st.sampled_from([None, 32]), "train_length": st.integers(2, 20),
    "attention": st.sampled_from(["softmax", "softmax", "linear"]), "bias": st.booleans(), "dropout": st.floats(0, 0.9),
    "pos": st.sampled_from(ALL_SCHEMES), "scaling": st.none() | scalings(), "original_length": st.none() | sizes,
}  # fmt: skip


def refused(call, *beginnings: str):
    """What it returns, or None where it raises a ValueError, whose message begins with the setting's name."""
    try:
        return call()
    except ValueError as error:
        if not str(error).startswith(beginnings):
            raise AssertionError(f"{error} names no setting") from error
        return None


@examples(250)
@given(spoilt(CONFIG, ODD))
def test_a_config_is_refused_or_is_that_of_a_model(given):
    assert CONFIG.keys() == GPTConfig.__dataclass_fields__.keys()
    with in_time():
        config = refused(lambda: GPTConfig(**given), "model.", "pos", "scaling")
    if config is None:
        return
    assert GPTConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config
    if config.num_parameters() < 10**6:
        model = GPT(config).eval()
        assert model.num_parameters() == config.num_parameters()
        tokens = torch.zeros((1, min(5, config.train_length)), dtype=torch.int64)
        assert model(tokens).isfinite().all()


@pytest.mark.parametrize("pos", SCHEMES)
@pytest.mark.parametrize("scaling", [0, 3, "yarn", [], {}, {"name": None}, {"name": "nope"}], ids=str)
def test_no_scheme_takes_what_is_no_scaling(pos, scaling):
    with pytest.raises(ValueError, match=r"^scaling"):
        GPTConfig(**SHAPE, pos={"name": pos}, scaling=scaling)


@pytest.mark.parametrize(
    "given",
    [
        {"n_layer": 10**9}, {"n_layer": 10**7}, {"head_dim": 10**7}, {"n_head": 10**6}, {"vocab_size": 10**10},
        {"train_length": 10**9, "pos": {"name": "learned"}}, {"n_layer": 10**400}, {"head_dim": 2**53},
        {"n_head": 20, "pos": {"name": "t5", "buckets": 10**9, "max_distance": 10**9}},
        {"pos": {"name": "shaw", "max_distance": 10**12}},
    ],
    ids=lambda given: "-".join(given),
)  # fmt: skip
def test_a_model_past_the_machines_memory_is_refused_at_once(given, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}.get)  # 16 GiB
    with in_time(), pytest.raises(ValueError, match=r"parameters|at most|machine"):
        GPT(GPTConfig(**{**SHAPE, **given}))


def slow_losses(logits: torch.Tensor, targets: torch.Tensor) -> list[list[float]]:
    rows = [[math.log(sum(map(math.exp, row))) for row in sequence] for sequence in logits.tolist()]
    return [
        [0.0 if t == -100 else total - logits[b, i, t].item() for i, (t, total) in enumerate(zip(*row, strict=True))]
        for b, row in enumerate(zip(targets.tolist(), rows, strict=True))
    ]


PASS = {
    "tokens": batches,
    "targets": st.none() | batches,
    "scaling_length": st.none() | st.integers(1, 99),
    "first_position": st.integers(0, LENGTH - 4),
}


@examples(300)
@given(models, spoilt(PASS, {"tokens": odd_batches, "targets": odd_batches}), seeds)
def test_a_pass_gives_the_losses_of_its_logits_or_is_refused(model, given, seed):
    targets = given.pop("targets")
    try:
        logits = model(**given)
        nll = None if targets is None else model(targets=targets, **given)
    except ValueError:
        return
    assert logits.shape == (*given["tokens"].shape, V)
    assert logits.isfinite().all()
    if nll is not None:
        np.testing.assert_allclose(nll.detach().numpy(), slow_losses(logits, targets), rtol=0, atol=1e-12)


def test_some_targets_are_left_out_whatever_else_is_asked():
    for model in MODELS:
        tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[-100, 4, -100]])
        nll = model(tokens, targets=targets).detach()
        np.testing.assert_allclose(nll.numpy(), slow_losses(model(tokens), targets), rtol=0, atol=1e-12)
        for wrong in (-1, -99, -101, V, 2**40):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                model(tokens, targets=torch.tensor([[1, wrong, 2]]))


CASES = [
    (pos, attention)
    for pos in ALL_SCHEMES
    for attention in ("softmax", "linear")
    if attention == "softmax" or not SCHEMES[pos["name"]].biased
]
MISTAKES = [
    lambda model, cache: model(torch.zeros((cache.batch_size + 1, 1), dtype=torch.int64), cache=cache),
    lambda model, cache: model(torch.zeros((cache.batch_size, 99), dtype=torch.int64), cache=cache),
    lambda model, cache: model(torch.full((cache.batch_size, 1), V), cache=cache),
    lambda model, cache: model(torch.zeros((cache.batch_size, 0), dtype=torch.int64), cache=cache),
    lambda model, cache: model(torch.zeros((cache.batch_size, 1)), cache=cache),
    lambda model, cache: model(torch.zeros((cache.batch_size, 1), dtype=torch.int64), cache=cache, scaling_length=77),
    lambda model, cache: model(torch.zeros((cache.batch_size, 1), dtype=torch.int64), cache=cache, first_position=1),
]


@examples(150)
@given(st.data())
def test_any_chunks_give_the_full_pass_of_two_sequences_and_after_mistakes(data):
    """Every scheme, scaling and attention; the two caches take turns, and mistakes between them change nothing."""
    pos, attention = data.draw(st.sampled_from(CASES))
    scaling = data.draw(scalings()) if SCHEMES[pos["name"]].rotates else None
    if scaling is not None and pos.get("rotary_fraction", 1) != 1:
        scaling = {"name": "linear", "factor": 3.0}
    settings = {**SHAPE, "train_length": 6, "n_kv_head": data.draw(st.sampled_from([1, 2]))}
    model = small_model(pos, attention=attention, scaling=scaling, **settings)
    limit = min(model.pos.max_length or 12, 12)
    declared = data.draw(st.none() | st.integers(1, 20))
    work = []
    for _ in range(2):
        length, batch = data.draw(st.integers(1, limit)), data.draw(st.integers(1, 2))
        seed = data.draw(seeds)
        tokens = torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))
        work.append((tokens, model.new_cache(batch, length, declared)))
    while open_ones := [(tokens, cache) for tokens, cache in work if cache.length < tokens.shape[1]]:
        tokens, cache = data.draw(st.sampled_from(open_ones))
        if data.draw(st.booleans()):
            before = cache.length
            with pytest.raises(ValueError, match=r"."):
                data.draw(st.sampled_from(MISTAKES))(model, cache)
            assert cache.length == before
        at = cache.length
        end = at + data.draw(st.integers(1, tokens.shape[1] - at))
        found = model(tokens[:, at:end], cache=cache)
        with torch.no_grad():  # of the rows of an earlier chunk the frequencies may have been others
            full = model(tokens[:, :end], scaling_length=declared)[:, at:]
        torch.testing.assert_close(found, full, rtol=0, atol=1e-9)


GENERATE = {
    "tokens": batches, "max_new_tokens": st.integers(0, 6), "temperature": st.floats(0, 3),
    "top_k": st.none() | st.integers(1, 20), "top_p": st.none() | st.floats(0.01, 1), "use_cache": st.booleans(),
    "generator": st.none() | st.builds(lambda seed: torch.Generator().manual_seed(seed), seeds),
    "scaling_length": st.none() | st.integers(1, 99),
}  # fmt: skip
SMALL = st.integers(-2, 9)  # a right number of tokens that takes minutes is no mistake


@examples(250)
@given(models, spoilt(GENERATE, {"tokens": odd_batches, "max_new_tokens": SMALL}))
def test_generation_is_of_the_vocabulary_or_refused(model, given):
    new = given["max_new_tokens"]
    assume(type(new) is not int or new < 100)
    try:
        out = model.generate(**given)
    except ValueError:
        return
    tokens = given["tokens"]
    assert out.shape == (len(tokens), tokens.shape[1] + new)
    assert torch.equal(out[:, : tokens.shape[1]], tokens)
    assert 0 <= out.min() <= out.max() < V
    if given["temperature"] == 0 or given["top_k"] == 1:
        for t in range(tokens.shape[1], out.shape[1]):
            best = model(out[:, :t], scaling_length=given["scaling_length"])[:, -1].argmax(dim=-1)
            assert torch.equal(out[:, t], best)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 10**12}, {"max_new_tokens": 2**63}], ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_text_without_end_is_refused_at_once(settings, use_cache):
    with in_time(), pytest.raises(ValueError, match="max_new_tokens"):
        MODELS[0].generate(torch.tensor([[1]]), use_cache=use_cache, **settings)


DRAW = {
    "temperature": st.floats(0.3, 3) | st.sampled_from([0, 1e-320, 1e-30, 1e300]),
    "top_k": st.none() | st.integers(1, 9) | st.just(10**30),
    "top_p": st.none() | st.floats(0.05, 1) | st.just(1),
    "generator": st.just(None),
}


@examples(300)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=6, unique=True), seeds, spoilt(DRAW))
def test_what_is_drawn_is_of_the_set_that_it_is_drawn_from(logits, seed, given):
    """The set by its definition in float64, for logits so far apart that no rounding decides."""
    assume(type(given["generator"]) is not torch.Generator)
    given["generator"] = torch.Generator().manual_seed(seed) if given["generator"] is None else given["generator"]
    try:
        drawn = sample(torch.tensor([logits] * 8, dtype=torch.float32), **given).flatten().tolist()
    except ValueError:
        return
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if given["temperature"] == 0:
        assert drawn == order[:1] * 8
        return
    kept = order[: given["top_k"]]
    shares = [math.exp(max((logits[i] - logits[order[0]]) / given["temperature"], -745)) for i in kept]
    if given["top_p"] is not None:
        before = [sum(shares[:n]) / sum(shares) for n in range(len(shares))]
        kept = [i for i, mass in zip(kept, before, strict=True) if mass < given["top_p"] + 1e-5]
    assert set(drawn) <= set(kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_token_is_drawn_from_logits_that_are_no_numbers(bad):
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite"):
            sample(torch.tensor([[0.0, 1.0], [bad, bad]]), temperature)
        model = small_model({"name": "rope"}, **SHAPE)
        with torch.no_grad():
            model.norm.weight[0] = bad
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="not finite"):
                model.generate(torch.tensor([[1, 2]]), 3, temperature, use_cache=use_cache)
    assert sample(torch.tensor([[0.0, -math.inf]]), 1.0).tolist() == [[0]]  # a token that is ruled out


CONTINUE = {
    "prompts": st.lists(st.builds(lambda t: torch.arange(t) % V, st.integers(1, 5)), min_size=1, max_size=3),
    "max_new_tokens": st.integers(1, 5), "seed": seeds, "stop": st.none() | st.integers(0, V),
    **{key: GENERATE[key] for key in ("temperature", "top_k", "top_p", "scaling_length")},
}  # fmt: skip


@examples(150)
@given(models, spoilt(CONTINUE, {"prompts": st.lists(odd_batches, max_size=2), "max_new_tokens": SMALL}))
def test_prompts_are_continued_as_each_alone_or_refused(model, given):
    assume(type(given["max_new_tokens"]) is not int or given["max_new_tokens"] < 100)
    try:
        steps = list(continuations(model, **given))
    except ValueError:
        return
    assert all(0 <= token < V for step in steps for token in step.values())
    if given["temperature"] == 0:
        for i, prompt in enumerate(given["prompts"]):
            drawn = [step[i] for step in steps if i in step]
            alone = model.generate(prompt[None], len(drawn), scaling_length=given["scaling_length"])[0, len(prompt) :]
            assert drawn == alone.tolist()


@examples(100)
@given(models, spoilt({"batch_size": sizes, "max_length": sizes, "scaling_length": st.none() | sizes}))
def test_a_cache_is_refused_or_empty(model, given):
    assume(not any(type(value) is int and value > 100 for value in given.values()))
    cache = refused(lambda: model.new_cache(**given), "batch_size=", "max_length=", "scaling_length=")
    if cache is None:
        return
    assert (cache.length, cache.batch_size, cache.max_length) == (0, given["batch_size"], given["max_length"])


FREQUENCIES = {
    "head_dim": st.just(8), "base": st.floats(1.1, 1e6), "scaling": st.none() | scalings(),
    "train_length": st.integers(2, 10**6), "length": st.none() | st.integers(1, 10**7),
}  # fmt: skip


@examples(300)
@given(spoilt(FREQUENCIES, ODD))
def test_frequencies_are_finite_or_refused(given):
    try:
        inv_freq, scale = rope_frequencies(**given)
    except ValueError:
        return
    assert inv_freq.isfinite().all()
    assert math.isfinite(scale)
    plain = [given["base"] ** (-2 * i / given["head_dim"]) for i in range(given["head_dim"] // 2)]
    if given["scaling"] is None or given["scaling"]["name"] == "none":
        np.testing.assert_allclose(inv_freq.numpy(), plain, rtol=1e-12)
        assert scale == 1
    elif given["scaling"]["name"] == "linear" and given["scaling"].get("factor") is not None:
        np.testing.assert_allclose(inv_freq.numpy() * given["scaling"]["factor"], plain, rtol=1e-12)


ROTATE = {
    "x": st.builds(lambda t, d, seed: torch.randn(t, 2 * d, generator=torch.Generator().manual_seed(seed)).double(),
                   st.just(3), st.integers(2, 4), seeds),
    "positions": st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3).map(torch.tensor),
    "inv_freq": st.lists(st.floats(0, 1), min_size=2, max_size=2).map(lambda f: torch.tensor(f, dtype=torch.float64)),
    "layout": st.sampled_from(["half", "interleaved"]), "attention_scale": st.floats(0, 2),
}  # fmt: skip
TENSORS = dict.fromkeys(("x", "positions", "inv_freq"), odd_tensors)


@examples(300)
@given(spoilt(ROTATE, TENSORS))
def test_rotation_is_a_product_of_complex_numbers_or_refused(given):
    try:
        y = rotate(**given)
    except ValueError:
        return
    x, planes = given["x"], len(given["inv_freq"])
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if x.dtype != torch.float64 or x.device.type == "meta" or given["inv_freq"].dtype != torch.float64:
        return
    first, second = (slice(0, planes), slice(planes, 2 * planes))
    if given["layout"] == "interleaved":
        first, second = slice(0, 2 * planes, 2), slice(1, 2 * planes, 2)
    angles = given["positions"].numpy()[:, None] * given["inv_freq"].numpy()
    turned = (x[..., first].numpy() + 1j * x[..., second].numpy()) * np.exp(1j * angles) * given["attention_scale"]
    expected = x.numpy().copy()
    expected[..., first], expected[..., second] = turned.real, turned.imag
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-9)


WORDS = {
    rope_main: ["head_dim", "train_length", "base", "scaling", "length", "positions", "plot", *SCALING_KEYS],
    convert_main: ["run", "layout", "out"],
    hf_main: ["run", "name", "out", "like"],
}


@pytest.mark.parametrize("main", WORDS, ids=lambda main: main.__module__)
@examples(60)
@given(data=st.data())
def test_a_command_answers_any_words_with_a_report_or_one_line(main, data, tmp_path_factory):
    good = {rope_main: ["head_dim=8", "train_length=16"], hf_main: [data.draw(st.sampled_from(["export", "import"]))]}
    pairs = st.builds(lambda key, value: f"{key}={value}", st.sampled_from(WORDS[main]), spellings)
    words = [*good.get(main, []), *data.draw(st.lists(pairs | spellings, max_size=3))]

    def command():
        raise SystemExit(main(words))

    folder = tmp_path_factory.mktemp("words")
    answer = typed(command, "command", words, folder)
    if answer.status:
        assert (answer.status, answer.out) == (2, "")
        assert answer.error.startswith("error: ")
        assert len(answer.error) < 1000 + 2 * sum(map(len, words))
        assert not list(folder.iterdir())
