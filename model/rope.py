"""Rotary position embedding as plain functions (Su et al. 2021, "RoFormer", section 3.2 and equation 34)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.checks import FLOATS, check_tensor, check_whole, is_number
from model.scaling import complete_scaling, scaled

PIECE = 2**19  # numbers that a CPU turns at a time: in float32 a few of them fit into its caches


def plain_frequencies(rotary_width: int, base: float, device: torch.device | str = "cpu") -> Tensor:
    """RoPE's base^(-2i / rotary_width), float64 (rotary_width / 2,) in radians a position (float32 on Apple's GPU)."""
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
    Returns inv_freq, float64 (head_dim / 2,), and attention_scale (1.0 without scaling). Raises ValueError for an odd
    width, a base that is not above 1, and a scaling that is not known or lacks train_length.
    """
    if type(head_dim) is not int or not 2 <= head_dim <= 2**20 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim!r}: dimensions turn in pairs, so it must be even, from 2 to {2**20:,}")
    if not is_number(base) or base <= 1:
        raise ValueError(f"pos.base={base!r}: must be a finite number above 1")
    base = float(base)
    inv_freq = plain_frequencies(head_dim, base)
    if scaling is None or scaling == {"name": "none"}:
        return inv_freq, 1.0
    if train_length is None:
        raise ValueError("train_length=None: a scaling needs the longest window seen in training")
    check_whole("train_length", train_length, most=2**53)  # what float64 counts to
    if length is not None:
        check_whole("length", length, most=2**53, open_end=", or None")
    completed = complete_scaling(scaling, head_dim // 2)
    return scaled(inv_freq, base, completed, train_length, train_length if length is None else length)


def rotary_tables(positions: Tensor, inv_freq: Tensor, attention_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each (T, planes), for integer positions (T,).

    The angles are elementwise products in inv_freq's precision, at least float32, so that no autocast and no model
    dtype can reach them: at position 10^6 a bfloat16 angle is off by up to 2,048 radians, a float32 one by 0.06.
    Rotation then rounds them to its own precision.
    """
    inv_freq = inv_freq.to(torch.promote_types(inv_freq.dtype, torch.float32))
    angles = positions[:, None] * inv_freq.to(positions.device)
    tables = angles.cos(), angles.sin()
    return tables if attention_scale == 1 else tuple(table * attention_scale for table in tables)


class _Turn(torch.autograd.Function):
    """Its backward pass is the rotation the other way: half the time of what autograd makes of the slices."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, first: slice, second: slice) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.planes = first, second
        return _turn(x, cos, sin, first, second)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        cos, sin = ctx.saved_tensors
        return _Turn.apply(grad, cos, -sin, *ctx.planes), None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, first: slice, second: slice) -> Tensor:
    """cos: a factor of every dimension, (T, head_dim); sin: of every plane's first one, (T, planes), and minus that."""
    if x.device.type != "cpu" or x.numel() <= PIECE or x.ndim < 3 or len(x) == 1:
        return _product(x, cos, sin, first, second).to(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = max(1, PIECE * len(x) // x.numel())
    for part, turned in zip(x.split(rows), out.split(rows), strict=True):
        turned.copy_(_product(part, cos, sin, first, second))
    return out


def _product(x: Tensor, cos: Tensor, sin: Tensor, first: slice, second: slice) -> Tensor:
    wide = x.to(cos.dtype, memory_format=torch.contiguous_format)
    out = wide * cos
    out[..., first].addcmul_(wide[..., second], sin[0])
    out[..., second].addcmul_(wide[..., first], sin[1])
    return out


class Rotation:
    """Turns the first 2 · planes dimensions of x (..., T, head_dim); the others pass through. Same dtype as x.

    cos and sin: (T, planes). Computed in float64 where x is float64, else in float32. layout `half` pairs dimensions
    (i, i + planes), as Llama's and GPT-NeoX's code does; `interleaved` pairs (2i, 2i + 1), as the paper does. Gradients
    reach x only. What depends on the tables alone is done once, for all the layers of a pass.
    """

    def __init__(self, cos: Tensor, sin: Tensor, layout: str = "half"):
        if layout not in ("half", "interleaved"):
            raise ValueError(f"layout={layout!r}: known layouts are half, interleaved")
        self.cos, self.sin, planes = cos, sin, cos.shape[-1]
        half = layout == "half"
        self.first = slice(0, planes) if half else slice(0, 2 * planes, 2)
        self.second = slice(planes, 2 * planes) if half else slice(1, 2 * planes, 2)
        self.tables = None

    def __call__(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.tables is None or self.tables[0].dtype != dtype:
            tables = torch.stack((self.cos, -self.sin, self.sin)).to(dtype)
            cos, sin = tables[0], tables[1:]
            cos = torch.cat((cos, cos), dim=-1) if self.first.step is None else cos.repeat_interleave(2, dim=-1)
            rest = x.shape[-1] - cos.shape[-1]  # dimensions that do not turn
            self.tables = F.pad(cos, (0, rest), value=1.0) if rest else cos, sin
        if torch.compiler.is_compiling():  # which makes one kernel of plain operations, and their gradient
            return self._plain(x)
        turn = _Turn.apply if torch.is_grad_enabled() and x.requires_grad else _turn
        return turn(x, *self.tables, self.first, self.second)

    def _plain(self, x: Tensor) -> Tensor:
        """The same with nothing in place."""
        cos, (_, sin) = self.tables
        wide = x.to(cos.dtype)
        a, b, rest = wide[..., self.first], wide[..., self.second], wide[..., 2 * sin.shape[-1] :]
        turned = a * cos[:, self.first] - b * sin, b * cos[:, self.second] + a * sin
        whole = torch.cat(turned, dim=-1) if self.first.step is None else torch.stack(turned, dim=-1).flatten(-2)
        return torch.cat((whole, rest), dim=-1).to(x.dtype)


def rotate(
    x: Tensor, positions: Tensor, inv_freq: Tensor, layout: str = "half", attention_scale: float = 1.0
) -> Tensor:
    """Turn each plane i of x (..., T, head_dim) by positions[t] · inv_freq[i] (Su et al. 2021, equation 34).

    positions: integers (T,). inv_freq: (planes,), with 2 · planes <= head_dim; dimensions past that are left alone.
    Returns the shape and dtype of x. Raises ValueError where the shapes or types do not fit.
    """
    check_tensor("positions", positions)
    for name, value in (("x", x), ("inv_freq", inv_freq)):
        check_tensor(name, value, FLOATS)
    if x.ndim < 2 or positions.shape != x.shape[-2:-1]:
        raise ValueError(f"positions of shape {tuple(positions.shape)} do not fit x of shape {tuple(x.shape)}")
    if inv_freq.ndim != 1:
        raise ValueError(f"inv_freq must be (planes,), found shape {tuple(inv_freq.shape)}")
    if not is_number(attention_scale):
        raise ValueError(f"attention_scale={attention_scale!r}: must be a finite number")
    if 2 * inv_freq.shape[0] > x.shape[-1]:
        raise ValueError(f"{inv_freq.shape[0]} planes need {2 * inv_freq.shape[0]} dimensions, x has {x.shape[-1]}")
    cos, sin = rotary_tables(positions, inv_freq, attention_scale)
    return Rotation(cos, sin, layout)(x)


if __name__ == "__main__":
    from model.diagnosis import main

    main()
