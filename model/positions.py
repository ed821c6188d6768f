"""Position schemes: where a token's place enters the network.

B sequences, T tokens, D width, H heads. A scheme acts at up to three hooks, always given explicit integer positions:

    embed(rows, positions)                        token rows (B, T, D) -> the same shape
    rotation(positions, length)                   a function on queries and keys (B, H, T, head_dim) -> the same shape
    bias(queries, query_positions, key_positions) (H, Tq, Tk) or (B, H, Tq, Tk), added to the attention scores
    and with it, for Shaw's scheme: values(weights, query_positions, key_positions), added to the attention's output

A bias that head and distance alone decide is given by by_distance(distances), in place of `bias`. No scheme masks later
keys: attention does. `rotation` returns a function, so that the trigonometry is done once a pass, not once a layer.

The base class does nothing at any hook: it is a causal model without positions (NoPE; Haviv et al. 2022, Kazemnejad et
al. 2023). A new scheme is one subclass, one line in SCHEMES and one file in configs/pos/. The keyword-only arguments of
its constructor are its configuration keys.
"""

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from model.rope import LAYOUTS, build_rotation, plain_frequencies, rope_frequencies, rotary_tables
from model.scaling import regime, scaled


class PositionScheme(nn.Module):
    """No positions at all, and the interface of every other scheme."""

    max_length: int | None = None  # positions 0 to max_length - 1 exist; None: no limit
    rotates = biased = weighs_values = False  # whether the hooks `rotation`, `bias` and `values` are in use
    bias_sees_queries = False  # else `bias` is the same in all layers, which share it

    def __init_subclass__(cls) -> None:
        cls.rotates = cls.rotation is not PositionScheme.rotation
        cls.biased = any(getattr(cls, hook) is not getattr(PositionScheme, hook) for hook in ("bias", "by_distance"))
        cls.weighs_values = cls.values is not PositionScheme.values

    def __init__(self, config):
        super().__init__()

    def reset_parameters(self) -> None:
        """Draw the scheme's own parameters. Called after all others, so that schemes share the other weights."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def constrain(self) -> None:
        """Put the scheme's own parameters back into their range. Called after each step of the optimiser."""

    def embed(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows

    def rotation(self, positions: Tensor, length: int) -> Callable[[Tensor], Tensor]:
        """length: tokens of the whole sequence, or the declared one; some frequency scalings look at it."""
        return lambda x: x

    def regime(self, length: int) -> Hashable:
        """Equal for two lengths whose rotations are equal: a cache is computed anew when it changes."""
        return None

    def by_distance(self, distances: Tensor) -> Tensor:
        """A bias that head and distance alone decide: int64 (n,) of at least 0, tokens back -> float32 (H, n)."""
        return torch.zeros((1, len(distances)), device=distances.device)

    def bias(self, queries: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """queries (B, H, Tq, head_dim), as rotated; a part of them at a time. This one is by_distance's.

        Both positions count on, one by one, from their first, which need not be 0. Keys after a query may get anything.
        """
        # Of Tq + Tk - 1 distances, not Tq · Tk pairs: a table's gradient is then summed along diagonals, in float32.
        Tq, Tk = len(query_positions), len(key_positions)
        distances = query_positions[0] - key_positions[-1] + torch.arange(Tq + Tk - 1, device=key_positions.device)
        return self.by_distance(distances.clamp(min=0)).unfold(-1, Tk, 1).flip(-1)  # (H, Tq, Tk)

    def values(self, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """weights (B, H, Tq, Tk), after the softmax -> (B, H, Tq, head_dim)."""
        raise NotImplementedError

    def check_position(self, position: int) -> None:
        """Raise ValueError where the scheme has nothing to say about `position`."""
        if self.max_length is not None and position >= self.max_length:
            end = f"the learned table, which ends at {self.max_length} (train_length)"
            raise ValueError(f"position {position} is past {end}; use a shorter sequence, or a scheme such as pos=rope")


NOPE = PositionScheme(None)  # what layers without positions use, whatever the model's scheme


class LearnedPositions(PositionScheme):
    """A learned vector per position, added to the token rows (Radford et al. 2019). The table ends at train_length."""

    def __init__(self, config):
        super().__init__(config)
        self.max_length = config.train_length
        self.table = nn.Parameter(torch.empty(config.train_length, config.width))

    def embed(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows + self.table[positions]


class SinusoidalPositions(PositionScheme):
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5). No weights.

    The rows are multiplied by √D first (section 3.4): drawn with GPT-2's deviation of 0.02 they would drown in it.
    """

    def embed(self, rows: Tensor, positions: Tensor) -> Tensor:
        width = rows.shape[-1]
        sines = rotary_tables(positions, plain_frequencies(width, 10000.0, rows.device))
        table = torch.stack((sines[1], sines[0]), dim=-1).flatten(-2)  # (T, D)
        return rows * math.sqrt(width) + table.to(rows.dtype)


class RotaryPositions(PositionScheme):
    """RoPE: planes of queries and keys turn with the position (Su et al. 2021, equation 34). No weights.

    base: θ_i = base^(-2i / r), r being the rotary width. layout: `half` pairs dimensions (i, i + r/2), `interleaved`
    (2i, 2i + 1). rotary_fraction: the first part of the head that turns, as in GPT-NeoX. turning: the fastest part of
    the planes that turns, the slowest stand still (p-RoPE; Barbero et al. 2024). config.scaling: see model/scaling.py.
    """

    def __init__(
        self, config, *, base: float = 10000.0, layout: str = "half", rotary_fraction: float = 1.0, turning: float = 1.0
    ):
        super().__init__(config)
        if layout not in LAYOUTS:
            raise ValueError(f"pos.layout={layout!r}: known layouts are {', '.join(LAYOUTS)}")
        self.rotary_dim = round(config.head_dim * rotary_fraction)
        if rotary_fraction > 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            found = f"turns {self.rotary_dim} of model.head_dim={config.head_dim} dimensions"
            raise ValueError(f"pos.rotary_fraction={rotary_fraction}: {found}; must be pairs, one at least, 1 at most")
        planes = self.rotary_dim // 2
        self.turning = int(turning * planes)
        if turning > 1 or self.turning < 1:
            found = f"turns {self.turning} of {planes} planes"
            raise ValueError(f"pos.turning={turning}: {found}; must be at most 1; for none use pos=none")
        self.base, self.layout, self.scaling, self.softmax = base, layout, config.scaling, config.attention == "softmax"
        self.original_length = config.original_length
        rope_frequencies(self.rotary_dim, base, config.scaling, self.original_length)  # checks them all

    def frequencies(self, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
        """inv_freq float64 (planes,) and attention_scale for `length` tokens; as a buffer it would follow .half()."""
        inv_freq, attention_scale = plain_frequencies(self.rotary_dim, self.base, device), 1.0
        if self.scaling is not None:
            inv_freq, attention_scale = scaled(inv_freq, self.base, self.scaling, self.original_length, length)
        if self.turning < len(inv_freq):
            inv_freq[self.turning :] = 0
        # Under linear attention the factor is no temperature of a softmax: it would only scale the outputs.
        return inv_freq, attention_scale if self.softmax else 1.0

    def rotation(self, positions: Tensor, length: int) -> Callable[[Tensor], Tensor]:
        cos, sin = rotary_tables(positions, *self.frequencies(length, positions.device))
        return build_rotation(cos, sin, self.layout)

    def regime(self, length: int) -> Hashable:
        return None if self.scaling is None else regime(self.scaling, self.original_length, length)


class ALiBi(PositionScheme):
    """Attention with linear biases: -slope · distance, a slope per head (Press et al. 2021, section 3). No weights."""

    def __init__(self, config):
        super().__init__(config)
        self.n_head = config.n_head

    def slopes(self, device: torch.device | str = "cpu") -> Tensor:
        """float32 (H,): 2^(-8h/H) for the power of two below H, then every other of the next (the authors' code)."""
        below = 2 ** math.floor(math.log2(self.n_head))
        exponents = torch.arange(1, below + 1, device=device) * (8 / below)
        others = (2 * torch.arange(self.n_head - below, device=device) + 1) * (4 / below)
        return 2.0 ** -torch.cat((exponents, others))

    def by_distance(self, distances: Tensor) -> Tensor:
        return -self.slopes(distances.device)[:, None] * distances.float()


class T5Bias(PositionScheme):
    """A learned bias per head and bucket of distances, one table for all layers (Raffel et al. 2019, section 2.1).

    Half of the buckets hold one distance each, the others widen logarithmically up to max_distance, and the last one
    holds all beyond: T5's causal (decoder) buckets. Unlike in T5 the scores keep their 1/√head_dim.
    """

    def __init__(self, config, *, buckets: int = 32, max_distance: int = 128):
        super().__init__(config)
        if buckets < 2:
            raise ValueError(f"pos.buckets={buckets}: must be at least 2")
        if max_distance <= buckets // 2:
            raise ValueError(f"pos.max_distance={max_distance}: must be above half of pos.buckets={buckets}")
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.empty(buckets, config.n_head))

    def bucket(self, distance: Tensor) -> Tensor:
        """int64 distances of at least 0 -> int64 buckets."""
        exact = self.buckets // 2
        growth = math.log(self.max_distance / exact)
        far = exact + ((distance.clamp(min=1) / exact).log() / growth * (self.buckets - exact)).floor().long()
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))

    def by_distance(self, distances: Tensor) -> Tensor:
        return self.table[self.bucket(distances)].T.float()


class Kerple(PositionScheme):
    """-r1 · log(1 + r2 · distance), two learned positive numbers per head (Chi et al. 2022, logarithmic variant)."""

    least = 1e-2

    def __init__(self, config):
        super().__init__(config)
        self.strength, self.rate = (nn.Parameter(torch.empty(config.n_head)) for _ in range(2))  # r1, r2

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.strength, 0, 2)
        nn.init.uniform_(self.rate, 0, 1)

    @torch.no_grad()
    def constrain(self) -> None:
        for value in (self.strength, self.rate):
            value.clamp_(min=self.least)

    def by_distance(self, distances: Tensor) -> Tensor:
        strength, rate = (value.float().clamp(min=self.least)[:, None] for value in (self.strength, self.rate))
        return -strength * (rate * distances).log1p()


class Fire(PositionScheme):
    """A small network of the distance relative to the query's position (Li et al. 2024, equation 6).

    bias = f(ψ(i - j) / ψ(max(i, L))) with ψ(x) = log(1 + |c| x): f has 32 hidden units, c and the threshold L are
    learned. Past L the farthest key is always at 1.
    """

    def __init__(self, config):
        super().__init__(config)
        self.hidden, self.out = nn.Linear(1, 32), nn.Linear(32, config.n_head)
        self.rate, self.threshold = (nn.Parameter(torch.empty(1)) for _ in range(2))
        self.train_length = config.train_length

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        self.out.reset_parameters()
        nn.init.constant_(self.rate, 0.1)
        nn.init.ones_(self.threshold)  # in training lengths

    def bias(self, queries: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = (query_positions[:, None] - key_positions).clamp(min=0).to(self.rate.dtype)
        longest = query_positions.to(self.rate.dtype).maximum(abs(self.threshold * self.train_length))
        relative = (abs(self.rate) * distance).log1p() / (abs(self.rate) * longest[:, None]).log1p()
        return self.out(self.hidden(relative[..., None]).relu()).permute(2, 0, 1)  # (H, Tq, Tk)


class ShawRelative(PositionScheme):
    """Learned vectors for each clipped distance, added to keys and to values (Shaw et al. 2018, equations 3 to 5).

    One pair of tables for all heads and layers. Queries and weights meet the max_distance + 1 vectors of a table, never
    a (Tq, Tk, head_dim) tensor of them (section 3.3).
    """

    bias_sees_queries = True

    def __init__(self, config, *, max_distance: int = 16):
        super().__init__(config)
        self.max_distance, self.head_dim = max_distance, config.head_dim
        self.key_table = nn.Parameter(torch.empty(max_distance + 1, config.head_dim))
        self.value_table = nn.Parameter(torch.empty(max_distance + 1, config.head_dim))

    def bias(self, queries: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        B, H = queries.shape[:2]
        by_distance = queries @ self.key_table.to(queries.dtype).T / math.sqrt(self.head_dim)  # (B, H, Tq, distances)
        distance = (query_positions[:, None] - key_positions).clamp(0, self.max_distance)  # (Tq, Tk)
        return by_distance.gather(-1, distance.expand(B, H, -1, -1))

    def values(self, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        B, H = weights.shape[:2]
        back = torch.arange(self.max_distance, device=weights.device)
        key_at = (query_positions - key_positions[0])[:, None] - back  # indices of keys, (Tq, max_distance)
        near = weights.gather(-1, key_at.clamp(min=0).expand(B, H, -1, -1)) * (key_at >= 0)
        far = weights.sum(dim=-1, keepdim=True) - near.sum(dim=-1, keepdim=True)
        return torch.cat((near, far), dim=-1) @ self.value_table.to(weights.dtype)


SCHEMES: dict[str, type[PositionScheme]] = {
    "learned": LearnedPositions,
    "rope": RotaryPositions,
    "sinusoidal": SinusoidalPositions,
    "none": PositionScheme,
    "alibi": ALiBi,
    "t5": T5Bias,
    "kerple": Kerple,
    "fire": Fire,
    "shaw": ShawRelative,
}


def build_scheme(config) -> PositionScheme:
    """The scheme that a GPTConfig names, its parameters not yet drawn."""
    keys = {key: value for key, value in config.pos.items() if key != "name"}
    return SCHEMES[config.pos["name"]](config, **keys)
