"""What decoding remembers, so that a step costs one token and not the whole sequence."""

from collections.abc import Hashable

import torch
from torch import Tensor

_NEVER = object()  # a regime that equals no other


class Cache:
    """Room for the tokens of B sequences, and what their passes left behind. Made by GPT.new_cache.

    `length` is the number of tokens held; it moves only when a pass through all the layers is complete, so a pass that
    raises leaves the cache usable. The tokens themselves are kept for the frequency scalings that depend on the length:
    when theirs change, everything is computed anew from the tokens (GPT.forward). `scaling_length` declares a length
    for the whole sequence instead, under which nothing ever has to be.
    """

    def __init__(self, batch_size: int, max_length: int, scaling_length: int | None, device: torch.device | str):
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        self.tokens = torch.zeros((batch_size, max_length), dtype=torch.int64, device=device)
        self.batch_size, self.max_length, self.scaling_length = batch_size, max_length, scaling_length
        self.length = 0
        self.regime: Hashable = _NEVER

    def check(self, batch_size: int, new_tokens: int) -> None:
        """Raise ValueError if a chunk of this shape does not fit; nothing is written."""
        if batch_size != self.batch_size:
            raise ValueError(f"the cache holds {self.batch_size} sequences, the tokens are {batch_size}")
        if self.length + new_tokens > self.max_length:
            raise ValueError(
                f"{self.length} tokens in the cache and {new_tokens} more exceed its max_length={self.max_length}"
            )

    def begin(self, tokens: Tensor, regime: Hashable) -> Tensor:
        """The tokens to pass: the new ones, or all of them where the regime is not the one of those held."""
        if self.length and regime != self.regime:
            tokens = torch.cat((self.tokens[:, : self.length], tokens), dim=1)
            self.length = 0
        return tokens

    def roll_back(self, length: int) -> None:
        """After a pass that raised: the tokens held before are held still, to be passed anew with the next ones."""
        self.length, self.regime = length, _NEVER

    def advance(self, tokens: Tensor, regime: Hashable) -> None:
        """Count passed tokens as held, after every layer has done its part."""
        end = self.length + tokens.shape[1]
        self.tokens[:, self.length : end] = tokens
        self.length, self.regime = end, regime


class KVCache(Cache):
    """Preallocated keys and values of every layer, (B, n_kv_head, max_length, head_dim) each.

    Keys are stored as rotated by their own absolute position and are never touched again: a rotary score depends on the
    difference of two absolute angles, so nothing stored has to change when the sequence grows.
    """

    def __init__(
        self,
        n_layer: int,
        batch_size: int,
        n_kv_head: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scaling_length: int | None = None,
    ):
        super().__init__(batch_size, max_length, scaling_length, device)
        shape = (n_layer, batch_size, n_kv_head, max_length, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values (B, n_kv_head, T, head_dim) behind the `length` tokens held.

        Returns views of all keys and values so far, (B, n_kv_head, length + T, head_dim).
        """
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class StateCache(Cache):
    """Linear attention's running sums, a pair a layer: they do not grow with the sequence."""

    def __init__(self, n_layer: int, batch_size: int, max_length: int, device, scaling_length: int | None = None):
        super().__init__(batch_size, max_length, scaling_length, device)
        self._states: list[tuple[Tensor, Tensor] | None] = [None] * n_layer
        self._pending = list(self._states)

    def state(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The sums over the tokens held; None where there are none."""
        return self._states[layer] if self.length else None

    def put(self, layer: int, state: tuple[Tensor, Tensor]) -> None:
        """The sums after the tokens being passed: they count once the pass is complete."""
        self._pending[layer] = state

    def advance(self, tokens: Tensor, regime: Hashable) -> None:
        super().advance(tokens, regime)
        self._states = list(self._pending)
