"""Position schemes: where a token's place enters the network.

A scheme acts at up to three hooks, always given explicit integer positions:

    embed(rows, positions)                    token rows (B, T, D) -> the same shape
    rotation(positions)                       a function on queries or keys (B, H, T, head_dim) -> the same shape
    bias(query_positions, key_positions)      (H, Tq, Tk) float32, added to the attention scores; or None

The base class does nothing at any of them, which makes it a scheme of its own: a causal model without positions
(NoPE; Haviv et al. 2022, Kazemnejad et al. 2023). `rotation` returns a function, rather than taking the queries, so
that the trigonometry is done once a pass and not twice in every layer.

A new scheme is one subclass, one line in SCHEMES and one file in configs/pos/. The keyword arguments of its
constructor are its configuration keys.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.rope import apply_rotation, rope_frequencies, rotary_tables


class PositionScheme(nn.Module):
    """No positions at all, and the interface of every other scheme."""

    max_length: int | None = None  # positions 0 to max_length - 1 exist; None: no limit

    def __init__(self, config):
        super().__init__()

    def reset_parameters(self) -> None:
        """Draw the scheme's own parameters. Called after all others, so that schemes share the other weights."""

    def embed(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows

    def rotation(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        return None

    def check_position(self, position: int) -> None:
        """Raise ValueError where the scheme has nothing to say about `position`."""
        if self.max_length is not None and position >= self.max_length:
            raise ValueError(
                f"position {position} is past the learned table, which ends at {self.max_length} "
                f"(train_length={self.max_length}: positions 0 to {self.max_length - 1}); use a shorter sequence, "
                "or a scheme without a table such as pos=rope"
            )


class LearnedPositions(PositionScheme):
    """One learned vector a position, added to the token rows (Radford et al. 2019). The table ends at train_length."""

    def __init__(self, config):
        super().__init__(config)
        self.max_length = config.train_length
        self.table = nn.Parameter(torch.empty(config.train_length, config.width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def embed(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows + self.table[positions]


class RotaryPositions(PositionScheme):
    """RoPE: planes of queries and keys turn with the position (Su et al. 2021, equation 34). No weights.

    base: θ_i = base^(-2i / rotary width). layout: which dimensions form a plane, `half` (i, i + r/2) or
    `interleaved` (2i, 2i + 1). rotary_fraction: the first part of the head that turns; the rest is left alone.
    """

    def __init__(self, config, base: float = 10000.0, layout: str = "half", rotary_fraction: float = 1.0):
        super().__init__(config)
        if layout not in ("half", "interleaved"):
            raise ValueError(f"pos.layout={layout!r}: known layouts are half, interleaved")
        if not 0 < rotary_fraction <= 1:
            raise ValueError(f"pos.rotary_fraction={rotary_fraction}: must be above 0 and at most 1")
        rotary_dim = round(config.head_dim * rotary_fraction)
        if rotary_dim % 2 or rotary_dim == 0:
            raise ValueError(
                f"pos.rotary_fraction={rotary_fraction} of model.head_dim={config.head_dim} turns {rotary_dim} "
                "dimensions: they turn in pairs, so it must be an even number of at least 2"
            )
        self.rotary_dim, self.base, self.layout = rotary_dim, base, layout
        # A plain tensor, not a buffer: .bfloat16() and .half() must not reach the frequencies, nor the state dict.
        self.inv_freq, self.attention_scale = rope_frequencies(rotary_dim, base)

    def _apply(self, fn, recurse=True):
        """Follow the model to another device (so that no pass copies the frequencies there), never to another dtype."""
        device = fn(torch.empty(0)).device
        inv_freq, self.attention_scale = rope_frequencies(self.rotary_dim, self.base)
        self.inv_freq = inv_freq.float().to(device) if device.type == "mps" else inv_freq.to(device)
        return super()._apply(fn, recurse)

    def rotation(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        cos, sin = rotary_tables(positions, self.inv_freq, self.attention_scale)
        return lambda x: apply_rotation(x, cos, sin, self.layout)


SCHEMES: dict[str, type[PositionScheme]] = {
    "learned": LearnedPositions,
    "none": PositionScheme,
    "rope": RotaryPositions,
}


def complete_scheme(pos: dict) -> dict:
    """The scheme's name and all of its keys, defaults filled in. Raises ValueError for names and keys unknown."""
    if not isinstance(pos, dict) or "name" not in pos:
        raise ValueError(f"pos={pos!r}: must be a mapping with a name out of {', '.join(SCHEMES)}")
    name, given = pos["name"], {key: value for key, value in pos.items() if key != "name"}
    if name not in SCHEMES:
        raise ValueError(f"pos={name!r}: known schemes are {', '.join(SCHEMES)}")
    known = {key: p.default for key, p in inspect.signature(SCHEMES[name]).parameters.items() if key != "config"}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"pos.{key}: {name} has no such key; it knows {', '.join(known) or 'none'}")
        kind = type(known[key])
        if kind is float and type(value) is int:
            given[key] = float(value)
        elif type(value) is not kind:
            raise ValueError(f"pos.{key}={value!r}: must be of type {kind.__name__}, as {known[key]!r} is")
    return {"name": name, **known, **given}


def build_scheme(config) -> PositionScheme:
    """The scheme that a GPTConfig names, its parameters not yet drawn."""
    keys = {key: value for key, value in config.pos.items() if key != "name"}
    return SCHEMES[config.pos["name"]](config, **keys)
