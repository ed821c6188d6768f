"""RoPE against its definition (Su et al. 2021, equation 34), and against numbers computed elsewhere."""

import math

import pytest
import torch

from model.rope import rope_frequencies, rotary_tables, rotate
from tests.helpers import small_model

LAYOUTS = ["half", "interleaved"]


def by_definition(x, position, base, layout, rotary_dim):
    """One vector, one plane at a time, in Python's floats."""
    x, out = [float(value) for value in x], [float(value) for value in x]
    for i in range(rotary_dim // 2):
        a, b = (i, i + rotary_dim // 2) if layout == "half" else (2 * i, 2 * i + 1)
        angle = position * base ** (-2 * i / rotary_dim)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [2, 16, 64])
@pytest.mark.parametrize("base", [500.0, 10000.0])
def test_rotate_is_the_definition(layout, rotary_dim, base):
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 255, 256, 4095, 1_000_003])
    x = torch.randn(2, len(positions), 64, dtype=torch.float64)
    inv_freq, scale = rope_frequencies(rotary_dim, base)
    assert scale == 1.0
    y = rotate(x, positions, inv_freq, layout)
    for batch in range(2):
        for t, position in enumerate(positions.tolist()):
            expected = by_definition(x[batch, t], position, base, layout, rotary_dim)
            torch.testing.assert_close(y[batch, t], expected, rtol=0, atol=1e-9)


def test_frequencies_have_the_known_ends():
    inv_freq, _ = rope_frequencies(64)
    assert inv_freq.dtype == torch.float64
    assert inv_freq[0] == 1
    assert 2 * math.pi / inv_freq[0].item() == pytest.approx(6.28, abs=0.005)
    assert inv_freq[31].item() == pytest.approx(0.000133, abs=5e-7)
    assert 2 * math.pi / inv_freq[31].item() == pytest.approx(47117, abs=1)


def score(q, k, m, n, inv_freq):
    q = rotate(q[None], torch.tensor([m]), inv_freq, "interleaved")
    k = rotate(k[None], torch.tensor([n]), inv_freq, "interleaved")
    return (q * k).sum().item()


def test_scores_have_the_known_values():
    torch.manual_seed(0)
    q, k = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    inv_freq, _ = rope_frequencies(64)
    for m, n in ((7, 3), (107, 103), (1_000_007, 1_000_003)):  # only the distance counts
        assert score(q, k, m, n, inv_freq) == pytest.approx(5.617582, abs=5e-7)
    assert score(q, k, 107, 3, inv_freq) == pytest.approx(2.444756, abs=1e-6)
    # float32 angles at a million positions are visibly off; ours are float64 even for float32 vectors
    far = (1_000_007, 1_000_003)
    assert score(q.float(), k.float(), *far, inv_freq.float()) == pytest.approx(5.653579, abs=2e-5)
    assert score(q.float(), k.float(), *far, inv_freq) == pytest.approx(5.617582, abs=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_keeps_norms_and_its_gradient_turns_back(layout):
    torch.manual_seed(0)
    inv_freq, _ = rope_frequencies(64)
    positions = torch.tensor([3, 77, 100_000])
    x = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 64, dtype=torch.float64)
    y = rotate(x, positions, inv_freq, layout)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    y.backward(g)
    torch.testing.assert_close(x.grad, rotate(g, -positions, inv_freq, layout), rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate(y, -positions, inv_freq, layout), x, rtol=0, atol=1e-12)
    assert torch.equal(rotate(x, torch.zeros(3, dtype=torch.int64), inv_freq, layout), x)


def test_layouts_are_a_permutation_of_each_other():
    torch.manual_seed(0)
    inv_freq, _ = rope_frequencies(16)
    positions, x = torch.arange(5), torch.randn(5, 16, dtype=torch.float64)
    to_half = [*range(0, 16, 2), *range(1, 16, 2)]  # (0, 1), (2, 3) ... become (0, 8), (1, 9) ...
    half = rotate(x[:, to_half], positions, inv_freq, "half")
    assert torch.equal(half, rotate(x, positions, inv_freq, "interleaved")[:, to_half])
    assert not torch.allclose(rotate(x, positions, inv_freq, "half"), rotate(x, positions, inv_freq, "interleaved"))


def test_dimensions_past_the_planes_are_untouched():
    x = torch.randn(4, 64)
    y = rotate(x, torch.arange(4), rope_frequencies(16)[0])
    assert torch.equal(y[:, 16:], x[:, 16:])
    assert not torch.equal(y[3, :16], x[3, :16])


@pytest.mark.parametrize("change", ["bfloat16", "half", "double", "float"])
def test_angles_are_beyond_the_reach_of_a_models_dtype(change):
    positions = torch.tensor([0, 1, 1023, 1_000_003])
    model = small_model({"name": "rope"}, torch.float32)
    expected = rotary_tables(positions, *model.pos.frequencies(32))
    changed = getattr(model, change)()
    assert changed.pos.frequencies(32)[0].dtype == torch.float64
    for table, wanted in zip(rotary_tables(positions, *changed.pos.frequencies(32)), expected, strict=True):
        assert torch.equal(table, wanted)


def test_angles_are_beyond_the_reach_of_autocast():
    model = small_model({"name": "rope"}, torch.float32)
    x, positions = torch.randn(1, 4, 3, 16), torch.tensor([1, 1023, 1_000_003])
    outside = model.pos.rotation(positions, 32)(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.pos.rotation(positions, 32)(x), outside)


def test_bfloat16_vectors_are_only_rounded_once():
    torch.manual_seed(0)
    inv_freq, _ = rope_frequencies(64)
    x = torch.randn(64, 64).bfloat16()
    positions = torch.arange(1_000_000, 1_000_064)
    exact = rotate(x.double(), positions, inv_freq)
    assert rotate(x, positions, inv_freq).dtype == torch.bfloat16
    # half a unit in the last of 8 bits; a bfloat16 angle would be wrong altogether
    torch.testing.assert_close(rotate(x, positions, inv_freq).double(), exact, rtol=2**-8, atol=1e-6)


def test_nothing_of_rope_is_in_the_state_dict():
    with_rope, without = small_model({"name": "rope"}), small_model({"name": "none"})
    assert with_rope.state_dict().keys() == without.state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"head_dim": 63}, "even"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"head_dim": 64, "base": 1.0}, "base"),
        ({"head_dim": 64, "base": float("nan")}, "base"),
    ],
)
def test_frequencies_refuse(arguments, words):
    with pytest.raises(ValueError, match=words):
        rope_frequencies(**arguments)


def test_rotate_refuses_shapes_that_do_not_fit():
    inv_freq, x = rope_frequencies(64)[0], torch.zeros(2, 5, 64)
    with pytest.raises(ValueError, match="positions"):
        rotate(x, torch.arange(4), inv_freq)
    with pytest.raises(ValueError, match="integers"):
        rotate(x, torch.arange(5.0), inv_freq)
    with pytest.raises(ValueError, match="planes"):
        rotate(x[..., :62], torch.arange(5), inv_freq)
    with pytest.raises(ValueError, match="half, interleaved"):
        rotate(x, torch.arange(5), inv_freq, layout="both")
