"""Frequency scalings against transformers, against closed forms that share no code with them, and as a registry."""

import inspect
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.scaling import SCALINGS, Plain, complete_scaling, regime

T = 256  # the training length where a test does not need another


def plain(planes, base=10000.0):
    return torch.tensor([base ** (-2 * i / (2 * planes)) for i in range(planes)], dtype=torch.float64)


def keys_of(name):
    """The configuration keys of a scaling, and their defaults."""
    parameters = inspect.signature(SCALINGS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def required(name, planes, step=0.25):
    """Numbers for the keys that hold one per plane, none below 1 and none the same for two keys (step 0: all ones)."""
    keys = [key for key, default in keys_of(name).items() if default is inspect.Parameter.empty]
    return {key: [1 + step * n * (i + 1) for i in range(planes)] for n, key in enumerate(keys, 1)}


def scale(scaling, inv_freq, train_length=T, length=T, base=10000.0):
    """Complete a configuration and apply it."""
    keys = complete_scaling(scaling, inv_freq.shape[0])
    return SCALINGS[keys.pop("name")](Plain(inv_freq, base, train_length, length), **keys)


def same(one, other):
    return torch.equal(one[0], other[0]) and one[1] == other[1]


def close(found, wanted, rel=1e-12):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=rel, atol=0)


# --- transformers -----------------------------------------------------------------------------------------------------

OTHER_NAMES = {
    "short": "short_factor",
    "long": "long_factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "attention_scale": "attention_factor",
}


def transformers_scale(scaling, width, base, train_length, length, rope_type=None):
    """The same scaling of a head of which only the first half turns, by transformers, in float32."""
    parameters = {OTHER_NAMES.get(key, key): value for key, value in scaling.items() if key != "name"}
    parameters |= {"rope_type": rope_type or scaling["name"], "rope_theta": base, "partial_rotary_factor": 0.5}
    parameters["original_max_position_embeddings"] = train_length
    config = LlamaConfig(
        head_dim=2 * width,
        hidden_size=8 * width,
        num_attention_heads=4,
        max_position_embeddings=train_length,
        rope_parameters=parameters,
    )
    inv_freq, attention_scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    return inv_freq.double(), attention_scale


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.3, 32.0])
@pytest.mark.parametrize(("base", "train_length"), [(10000.0, 64), (10000.0, 1024), (500000.0, 8192), (10.0, 1024)])
@pytest.mark.parametrize("width", [8, 32, 64, 128])
@pytest.mark.parametrize(
    "keys",
    [
        {"name": "linear"},
        {"name": "dynamic"},
        {"name": "yarn"},
        {"name": "yarn", "beta_fast": 8.0, "beta_slow": 2.0, "attention_scale": 1.25},
        {"name": "longrope"},
        {"name": "llama3"},
        {"name": "llama3", "low": 2.0, "high": 9.0},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_as_transformers_has_it(keys, width, base, train_length, factor):
    defaults = {key: default for key, default in keys_of(keys["name"]).items() if isinstance(default, float)}
    scaling = {**defaults, **keys, **required(keys["name"], width // 2), "factor": factor}
    for length in (1, train_length, train_length + 1, 3 * train_length):
        found, attention_scale = scale(scaling, plain(width // 2, base), train_length, length, base)
        wanted, wanted_scale = transformers_scale(scaling, width, base, train_length, length)
        torch.testing.assert_close(found, wanted, rtol=5e-6, atol=0)
        assert attention_scale == pytest.approx(wanted_scale, rel=1e-12)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_ntk_is_transformers_dynamic_at_factor_times_the_training_length(width, factor):
    # transformers has no static NTK; its dynamic one with factor 1 has the same base at that length.
    found, attention_scale = scale({"name": "ntk", "factor": factor}, plain(width // 2), length=1)
    wanted, _ = transformers_scale({"name": "dynamic", "factor": 1.0}, width, 10000.0, T, factor * T)
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=0)
    assert attention_scale == 1.0


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_linear_turns_position_factor_m_as_plain_rope_turns_m():
    found, attention_scale = scale({"name": "linear", "factor": 4.0}, plain(32))
    positions = torch.arange(1000, dtype=torch.float64)
    torch.testing.assert_close((4 * positions)[:, None] * found, positions[:, None] * plain(32), rtol=1e-12, atol=0)
    assert attention_scale == 1.0


@pytest.mark.parametrize("planes", [2, 8, 32])
def test_ntk_stretches_the_slowest_plane_by_the_factor_and_leaves_the_fastest(planes):
    found, _ = scale({"name": "ntk", "factor": 8.0}, plain(planes))
    assert found[0] == 1.0
    assert (plain(planes)[-1] / found[-1]).item() == pytest.approx(8.0, rel=1e-12)
    # A changed base keeps the ratio of neighbouring planes the same everywhere.
    ratios = found[1:] / found[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-12, atol=0)


def test_ntk_base_by_hand():
    found, _ = scale({"name": "ntk", "factor": 4.0}, plain(32))
    base = 10000 * 4 ** (64 / 62)
    close(found, [base ** (-i / 32) for i in range(32)])


@pytest.mark.parametrize("train_length", [T, 49])  # 1.34 · 49 / 49 - 0.34 is not 1 in float64
@pytest.mark.parametrize("factor", [None, 1.0, 1.34, 1e6])
def test_dynamic_is_plain_up_to_the_training_length_and_ntk_past_it(factor, train_length):
    scaling = {"name": "dynamic", "factor": factor}
    for length in (1, train_length - 1, train_length):
        assert same(scale(scaling, plain(32), train_length, length), (plain(32), 1.0))
    found, attention_scale = scale(scaling, plain(32), train_length, 2 * train_length)
    s = factor or 1.0
    base = 10000 * (s * 2 - (s - 1)) ** (64 / 62)
    close(found, [base ** (-i / 32) for i in range(32)])
    assert attention_scale == 1.0


# first: the last plane with at least beta_fast turns within the training length (0 where none has them); last: the
# first with fewer than beta_slow. Found here by counting the turns of every plane, of 32 with base 10000 and of 32
# more that would follow.
@pytest.mark.parametrize(
    ("train_length", "beta_fast", "beta_slow", "first", "last"),
    [
        (4096, 32.0, 1.0, 10, 23),
        (4096, 8.0, 2.0, 15, 21),
        (256, 32.0, 1.0, 0, 13),
        (64, 32.0, 1.0, 0, 9),  # even the fastest plane turns only 10 times
        (300000, 32.0, 1.0, 25, 38),  # the ramp ends past the last plane, so no plane is interpolated in full
    ],
)
def test_yarn_ramp(train_length, beta_fast, beta_slow, first, last):
    turns = [train_length * 10000 ** (-i / 32) / (2 * math.pi) for i in range(64)]
    assert first == max([i for i in range(64) if turns[i] >= beta_fast], default=0)
    assert last == min(i for i in range(64) if turns[i] < beta_slow)
    keys = {"factor": 4.0, "beta_fast": beta_fast, "beta_slow": beta_slow}
    found, _ = scale({"name": "yarn", **keys}, plain(32), train_length)
    for i, (new, old) in enumerate(zip(found.tolist(), plain(32).tolist(), strict=True)):
        if i <= first:
            assert new == old
        elif i >= last:
            assert new == old / 4
        else:
            kept = (last - i) / (last - first)
            assert new == pytest.approx(old * (kept + (1 - kept) / 4), rel=1e-12)


def test_yarn_ramp_never_runs_backwards():
    # Below 2π tokens no plane turns once: all but the first, where the ramp begins, are interpolated.
    assert torch.equal(scale({"name": "yarn", "factor": 4.0}, plain(32), 4)[0], plain(32) / (1 + 3 * (plain(32) < 1)))
    # With base 2 over 10^9 tokens every plane turns millions of times: all are left alone.
    inv_freq = plain(4, 2.0)
    assert torch.equal(scale({"name": "yarn", "factor": 4.0}, inv_freq, 10**9, base=2.0)[0], inv_freq)


def test_yarn_attention_scale():
    for s in (1.5, 4.0, 16.0):
        assert scale({"name": "yarn", "factor": s}, plain(32))[1] == pytest.approx(math.log(s) / 10 + 1, rel=1e-12)
    assert scale({"name": "yarn"}, plain(32), length=3 * T)[1] == pytest.approx(math.log(3) / 10 + 1, rel=1e-12)
    assert scale({"name": "yarn", "factor": 4.0, "attention_scale": 0.7}, plain(32))[1] == 0.7


def test_longrope_switches_after_the_training_length():
    short, long = [1 + i / 10 for i in range(32)], [2 + i for i in range(32)]
    scaling = {"name": "longrope", "factor": 4.0, "short": short, "long": long}
    for length, divisors in ((1, short), (T, short), (T + 1, long), (4 * T, long)):
        found, attention_scale = scale(scaling, plain(32), length=length)
        close(found, [10000 ** (-i / 32) / divisor for i, divisor in enumerate(divisors)])
        assert attention_scale == pytest.approx(math.sqrt(1.25), rel=1e-12)  # ln 4 / ln 256 = 1/4
    ones = {"name": "longrope", "factor": 1.0, "short": [1.0] * 32, "long": [1.0] * 32}
    assert same(scale(ones, plain(32), length=3 * T), (plain(32), 1.0))
    assert scale({**scaling, "factor": None}, plain(32), length=T)[1] == 1.0
    assert scale({**scaling, "factor": None}, plain(32), length=16 * T)[1] == pytest.approx(math.sqrt(1.5), rel=1e-12)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 20.0)])
def test_llama3_ends_and_boundaries(low, high):
    found, attention_scale = scale({"name": "llama3", "factor": 8.0, "low": low, "high": high}, plain(64))
    seen = set()
    for new, old in zip(found.tolist(), plain(64).tolist(), strict=True):
        wavelength = 2 * math.pi / old
        if wavelength > T / low:
            seen.add("slow")
            assert new == old / 8
        elif wavelength < T / high:
            seen.add("fast")
            assert new == old
        else:
            seen.add("between")
            smooth = (T / wavelength - low) / (high - low)
            assert new == pytest.approx((1 - smooth) * old / 8 + smooth * old, rel=1e-12)
    assert seen == {"slow", "between", "fast"}
    assert attention_scale == 1.0
    # A plane exactly on a boundary is at the ramp's end: planes of that wavelength, given as frequencies.
    edges = torch.tensor([2 * math.pi * high / T, 2 * math.pi * low / T], dtype=torch.float64)
    ends, _ = scale({"name": "llama3", "factor": 8.0, "low": low, "high": high}, edges)
    close(ends, [edges[0].item(), edges[1].item() / 8])


# --- every scaling in the registry ------------------------------------------------------------------------------------

ALL = pytest.mark.parametrize("name", SCALINGS)


@ALL
@pytest.mark.parametrize("planes", [2, 8, 32])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_factor_one_is_plain_rope_bit_for_bit(name, planes, base):
    inv_freq = plain(planes, base)
    for keys in ({"factor": 1.0}, {"factor": 1}, {}):
        scaling = complete_scaling({"name": name, **required(name, planes, step=0), **keys}, planes)
        for length in (1, 100, T, 3 * T):
            if length <= T or regime(scaling, T, length) == regime(scaling, T, T):
                assert same(scale(scaling, inv_freq, T, length, base), (inv_freq, 1.0)), f"{scaling} at {length}"


@ALL
@pytest.mark.parametrize("planes", [2, 8, 32])
@pytest.mark.parametrize("factor", [None, 1.0, 2.5, 64.0])
@pytest.mark.parametrize("train_length", [2, T, 100000])
def test_frequencies_are_sane(name, planes, factor, train_length):
    for length in (1, train_length, 5 * train_length):
        inv_freq = plain(planes)
        scaling = {"name": name, **required(name, planes), "factor": factor}
        found, attention_scale = scale(scaling, inv_freq, train_length, length)
        assert torch.equal(inv_freq, plain(planes)), "the given frequencies were changed"
        assert found.dtype == torch.float64
        assert found.shape == (planes,)
        assert (found > 0).all()
        assert (found <= inv_freq).all()
        assert (found[1:] <= found[:-1]).all()
        assert type(attention_scale) is float
        assert 1.0 <= attention_scale < math.inf


@ALL
def test_an_open_factor_is_length_over_training_length(name):
    scaling = {"name": name, **required(name, 8)}
    for length in (1, T, 3 * T):
        stretch = 1.0 if name == "dynamic" else max(1.0, length / T)  # dynamic's formula has the length in it
        found = scale({**scaling, "factor": None}, plain(8), T, length)
        assert same(found, scale({**scaling, "factor": stretch}, plain(8), T, length))
    assert not torch.equal(found[0], plain(8)), "at three times the training length something must have changed"


@ALL
def test_a_longer_sequence_before_leaves_no_trace(name):
    scaling = {"name": name, **required(name, 8), "factor": 2.0}
    lengths = [1, T - 1, T, T + 1, 4 * T]
    upwards = [scale(scaling, plain(8), T, length) for length in lengths]
    downwards = [scale(scaling, plain(8), T, length) for length in reversed(lengths)]
    assert all(same(a, b) for a, b in zip(upwards, reversed(downwards), strict=True))


@ALL
def test_stays_on_the_device_of_the_given_frequencies(name):
    scaling = {"name": name, **required(name, 8), "factor": 2.0}
    assert scale(scaling, plain(8).to("meta"), length=2 * T)[0].device.type == "meta"
    wanted, inv_freq = scale(scaling, plain(8), length=2 * T), plain(8)
    with torch.device("meta"):  # as while a model is described but not yet built
        assert same(scale(scaling, inv_freq, length=2 * T), wanted)


@ALL
@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_regimes_part_exactly_where_the_frequencies_do(name, factor):
    scaling = complete_scaling({"name": name, **required(name, 8), "factor": factor}, 8)
    lengths = [1, 2, T - 1, T, T + 1, T + 2, 2 * T, 2 * T + 1, 100 * T]
    for one in lengths:
        for other in lengths:
            frequencies_agree = same(scale(scaling, plain(8), T, one), scale(scaling, plain(8), T, other))
            regimes_agree = regime(scaling, T, one) == regime(scaling, T, other)
            assert regimes_agree == frequencies_agree, f"{scaling} at {one} and {other}"


@ALL
def test_completion_fills_in_the_defaults_and_is_stable(name):
    numbers = required(name, 4)
    complete = complete_scaling({"name": name, **numbers}, 4)
    assert complete == {"name": name, **keys_of(name), **numbers}
    assert complete_scaling(complete, 4) == complete
    assert type(complete_scaling({"name": name, **numbers, "factor": 2}, 4)["factor"]) is float


def test_published_defaults():
    yarn = {"name": "yarn", "factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "attention_scale": None}
    assert complete_scaling({"name": "yarn"}, 4) == yarn
    assert complete_scaling({"name": "llama3"}, 4) == {"name": "llama3", "factor": None, "low": 1.0, "high": 4.0}


# --- errors -----------------------------------------------------------------------------------------------------------


def refused(scaling, *parts, planes=4):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        complete_scaling(scaling, planes)
    for part in parts:
        assert str(part) in str(error.value), error.value


@pytest.mark.parametrize("scaling", [None, "yarn", {}, {"factor": 2.0}, {"name": "yran"}, {"name": ["yarn"]}])
def test_unknown_names_list_the_known_ones(scaling):
    refused(scaling, "scaling=", *SCALINGS)


@ALL
def test_unknown_keys_list_the_known_ones(name):
    refused({"name": name, **required(name, 4), "facto": 2.0}, "scaling.facto", name, *keys_of(name))


@ALL
@pytest.mark.parametrize("value", [True, "2", math.nan, math.inf, -math.inf, 0, -2.0, [2.0], 10**400])
def test_wrong_numbers(name, value):
    for key, default in keys_of(name).items():
        if default is not inspect.Parameter.empty:
            numbers = required(name, 4)
            refused({"name": name, **numbers, key: value}, f"scaling.{key}={value!r}", "finite number", "use")


@ALL
def test_a_key_with_a_number_for_its_default_cannot_be_left_open(name):
    for key, default in keys_of(name).items():
        scaling = {"name": name, **required(name, 4), key: None}
        if default is None:
            assert complete_scaling(scaling, 4)[key] is None
        else:
            refused(scaling, f"scaling.{key}=None")


@ALL
def test_factor_below_one(name):
    refused({"name": name, **required(name, 4), "factor": 0.99}, "scaling.factor=0.99", "at least 1", "null")


@pytest.mark.parametrize(
    ("name", "keys", "upper", "lower"),
    [
        ("yarn", {"beta_fast": 1.0}, "beta_fast=1.0", "beta_slow=1.0"),
        ("yarn", {"beta_slow": 40}, "beta_fast=32.0", "beta_slow=40.0"),
        ("llama3", {"low": 4.0}, "high=4.0", "low=4.0"),
        ("llama3", {"low": 5.0, "high": 2.0}, "high=2.0", "low=5.0"),
    ],
)
def test_bounds_the_wrong_way_round(name, keys, upper, lower):
    refused({"name": name, **keys}, f"scaling.{upper}", f"scaling.{lower}", "above", "defaults")


@pytest.mark.parametrize("key", ["short", "long"])
def test_longrope_lists(key):
    good = {"name": "longrope", "short": [1, 1, 1, 1], "long": (1, 2, 3, 4)}
    complete = complete_scaling(good, 4)
    assert complete == {"name": "longrope", "factor": None, "short": [1.0] * 4, "long": [1.0, 2.0, 3.0, 4.0]}
    assert all(type(number) is float for number in complete["short"] + complete["long"])
    refused({k: v for k, v in good.items() if k != key}, f"scaling.{key} is missing", "4 finite numbers")
    for bad in ([1.0] * 3, [1.0] * 5, [], None, 2.0, "1111", [1, 1, 1, 0], [1, 1, 1, -1], [1, 1, 1, True]):
        refused({**good, key: bad}, f"scaling.{key}={bad!r}", "4 finite numbers")
    refused({**good, key: [1, 1, 1, math.nan]}, f"scaling.{key}=", "4 finite numbers")
    refused({**good, key: [1, 1, 1, "1"]}, f"scaling.{key}=", "4 finite numbers")


@pytest.mark.parametrize("name", ["ntk", "dynamic"])
def test_ntk_needs_two_planes(name):
    with pytest.raises(ValueError, match="rotary width of at least 4, found 2"):
        scale({"name": name, "factor": 2.0}, plain(1))


def test_longrope_needs_a_training_length_with_a_logarithm():
    with pytest.raises(ValueError, match="train_length of at least 2, found 1"):
        scale({"name": "longrope", "short": [1.0], "long": [1.0], "factor": 2.0}, plain(1), train_length=1)
