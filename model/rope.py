"""Rotary position embedding as plain functions (Su et al. 2021, "RoFormer", section 3.2 and equation 34)."""

import torch
from torch import Tensor


def rope_frequencies(
    head_dim: int,
    base: float = 10000.0,
    scaling: dict | None = None,
    train_length: int | None = None,
    length: int | None = None,
) -> tuple[Tensor, float]:
    """The angle each plane turns by from one position to the next, and a factor on both cos and sin.

    head_dim is the rotary width, even. Returns inv_freq, float64 (head_dim / 2,) in radians a position,
    inv_freq[i] = base^(-2i / head_dim), and attention_scale (1.0 without scaling). Raises ValueError for an odd width,
    a base that is not above 1, and a scaling that is not known.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: dimensions turn in pairs, so it must be even and at least 2")
    if not 1 < base < float("inf"):
        raise ValueError(f"pos.base={base}: must be a finite number above 1")
    if scaling is not None:
        raise ValueError(f"scaling={scaling!r}: no frequency scaling is known; use scaling=none")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    return base**-exponents, 1.0


def rotary_tables(positions: Tensor, inv_freq: Tensor, attention_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each (T, planes), for integer positions (T,).

    The angles are elementwise products in inv_freq's precision, at least float32, so that no autocast and no model
    dtype can reach them: at position 10^6 a bfloat16 angle is off by up to 2,048 radians, a float32 one by 0.06.
    apply_rotation then rounds them to its own precision.
    """
    inv_freq = inv_freq.to(torch.promote_types(inv_freq.dtype, torch.float32))
    angles = positions.to(inv_freq.dtype)[:, None] * inv_freq.to(positions.device)
    return angles.cos() * attention_scale, angles.sin() * attention_scale


def apply_rotation(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> Tensor:
    """Turn the first 2 · planes dimensions of x (..., T, head_dim); the others pass through. Same dtype as x.

    Computed in float64 where x is float64, else in float32. layout `half` pairs dimensions (i, i + planes), as Llama's
    and GPT-NeoX's code does; `interleaved` pairs (2i, 2i + 1), as the paper does.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    planes = cos.shape[-1]
    turning, rest = x[..., : 2 * planes].to(dtype), x[..., 2 * planes :]
    if layout == "half":
        a, b = turning[..., :planes], turning[..., planes:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    elif layout == "interleaved":
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        raise ValueError(f"layout={layout!r}: known layouts are half, interleaved")
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rotate(
    x: Tensor, positions: Tensor, inv_freq: Tensor, layout: str = "half", attention_scale: float = 1.0
) -> Tensor:
    """Turn each plane i of x (..., T, head_dim) by positions[t] · inv_freq[i] (Su et al. 2021, equation 34).

    positions: integers (T,). inv_freq: (planes,), with 2 · planes <= head_dim; dimensions past that are left alone.
    Returns the shape and dtype of x. Raises ValueError where the shapes do not fit.
    """
    if positions.ndim != 1 or positions.shape[0] != x.shape[-2]:
        raise ValueError(f"positions of shape {tuple(positions.shape)} do not fit x of shape {tuple(x.shape)}")
    if positions.is_floating_point():
        raise ValueError(f"positions must be integers, found {positions.dtype}")
    if 2 * inv_freq.shape[0] > x.shape[-1]:
        raise ValueError(f"{inv_freq.shape[0]} planes need {2 * inv_freq.shape[0]} dimensions, x has {x.shape[-1]}")
    cos, sin = rotary_tables(positions, inv_freq, attention_scale)
    return apply_rotation(x, cos, sin, layout)
