"""Rotary position embedding as plain functions (Su et al. 2021, "RoFormer", section 3.2 and equation 34)."""

from collections.abc import Callable

import torch
from torch import Tensor

from model.checks import FLOATS, check_tensor, check_whole, is_number
from model.scaling import complete_scaling, scaled

LAYOUTS = ("half", "interleaved")  # which dimensions form a plane: (i, i + planes), or (2i, 2i + 1)


def plain_frequencies(rotary_width: int, base: float, device: torch.device | str = "cpu") -> Tensor:
    """RoPE's base^(-2i / rotary_width), float64 (rotary_width / 2,) radians per position (float32 on Apple's GPU)."""
    dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
    return base ** -(torch.arange(0, rotary_width, 2, dtype=dtype, device=device) / rotary_width)


def rope_frequencies(
    head_dim: int,
    base: float = 10000.0,
    scaling: dict | None = None,
    train_length: int | None = None,
    length: int | None = None,
) -> tuple[Tensor, float]:
    """The angle each plane turns by from one position to the next, and a factor on both cos and sin.

    head_dim is the rotary width, even. scaling: a name and its keys (model/scaling.py); it needs train_length, the
    longest window seen in training, and looks at length, the tokens of the sequence (None: train_length).
    Returns inv_freq, float64 (head_dim / 2,), and attention_scale (1.0 without scaling). Raises ValueError.
    """
    check_whole("head_dim", head_dim, 2)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: must be even, since dimensions turn in pairs")
    if not is_number(base) or base <= 1:
        raise ValueError(f"pos.base={base!r}: must be a finite number above 1")
    inv_freq = plain_frequencies(head_dim, float(base))
    if scaling is None or scaling == {"name": "none"}:
        return inv_freq, 1.0
    check_whole("train_length", train_length)
    check_whole("length", length, optional=True)
    completed = complete_scaling(scaling, head_dim // 2)
    return scaled(inv_freq, float(base), completed, train_length, length or train_length)


def rotary_tables(positions: Tensor, inv_freq: Tensor, attention_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each (T, planes), for integer positions (T,).

    The angles are elementwise products in inv_freq's precision, at least float32, out of reach of autocast: at position
    10^6 a bfloat16 angle is off by up to 2,048 radians, a float32 one by 0.06.
    """
    inv_freq = inv_freq.to(torch.promote_types(inv_freq.dtype, torch.float32))
    angles = positions[:, None] * inv_freq.to(positions.device)
    return angles.cos() * attention_scale, angles.sin() * attention_scale


def build_rotation(cos: Tensor, sin: Tensor, layout: str) -> Callable[[Tensor], Tensor]:
    """A function that turns the first 2 · planes dimensions of x (..., T, head_dim); the others pass. Same dtype as x.

    cos, sin: (T, planes). layout `half` pairs dimensions (i, i + planes), as Llama's and GPT-NeoX's code does;
    `interleaved` pairs (2i, 2i + 1), as the paper does. Computed in float64 where x is float64, else in float32.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: known layouts are {', '.join(LAYOUTS)}")
    width, interleaved = 2 * cos.shape[-1], layout == "interleaved"
    if not interleaved:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}  # one conversion per pass, not one per layer

    def rotate(x: Tensor) -> Tensor:
        if x.shape[-1] > width:
            return torch.cat((rotate(x[..., :width]), x[..., width:]), dim=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        if wide not in tables:
            tables[wide] = cos.to(wide), sin.to(wide)
        (c, s), turned = tables[wide], x.to(wide)
        if interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
        else:
            turned = turned * c + turned.roll(width // 2, dims=-1) * s  # the roll exchanges the halves
        return turned.to(x.dtype)

    return rotate


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, layout: str = "half") -> Tensor:
    """Turn each plane i of x (..., T, head_dim) by positions[t] · inv_freq[i] (Su et al. 2021, equation 34).

    positions: integers (T,). inv_freq: (planes,), with 2 · planes <= head_dim; dimensions past that are left alone.
    Returns the shape and dtype of x. Raises ValueError where the shapes or types do not fit.
    """
    check_tensor("positions", positions)
    for name, value in (("x", x), ("inv_freq", inv_freq)):
        check_tensor(name, value, FLOATS)
    if x.ndim < 2 or positions.shape != x.shape[-2:-1]:
        raise ValueError(f"positions of shape {tuple(positions.shape)} do not fit x of shape {tuple(x.shape)}")
    if inv_freq.ndim != 1 or 2 * len(inv_freq) > x.shape[-1]:
        raise ValueError(f"inv_freq must be (planes,) of at most {x.shape[-1] // 2}, found {tuple(inv_freq.shape)}")
    return build_rotation(*rotary_tables(positions, inv_freq), layout)(x)
