"""What decoding remembers, so that a step costs one token and not the whole sequence."""

from collections.abc import Hashable

import torch
from torch import Tensor

from model.checks import check_memory, check_whole

_NEVER = object()  # a regime that equals no other


class Cache:
    """Room for the tokens of B sequences, and what their passes left behind. Made by GPT.new_cache.

    `length` is the number of tokens held; it moves only when a pass through all the layers is complete, so a pass that
    raises leaves the cache usable. The tokens themselves are kept to compute everything anew from, where the
    frequencies change with the length (see GPT.forward, also for scaling_length).
    """

    def __init__(self, batch_size: int, max_length: int, scaling_length: int | None, device, token_bytes: int = 0):
        check_whole("batch_size", batch_size, most=2**31 - 1)
        check_whole("max_length", max_length, most=2**31 - 1)
        if scaling_length is not None:
            check_whole("scaling_length", scaling_length, open_end=", or None")
        if torch.device(device).type == "cpu":
            needed = (8 + token_bytes) * batch_size * max_length
            what = f"{batch_size} times max_length={max_length} tokens"
            check_memory(needed, f"{what} in the cache", "use fewer or shorter sequences")
        self.tokens = torch.zeros((batch_size, max_length), dtype=torch.int64, device=device)
        self.batch_size, self.max_length, self.scaling_length = batch_size, max_length, scaling_length
        self.length = self.past = 0  # past: where the tokens being passed begin
        self.regime: Hashable = _NEVER

    def check(self, batch_size: int, new_tokens: int) -> None:
        """Raise ValueError if a chunk of this shape does not fit; nothing is written."""
        if batch_size != self.batch_size:
            raise ValueError(f"the cache holds {self.batch_size} sequences, the tokens are {batch_size}")
        if self.length + new_tokens > self.max_length:
            raise ValueError(f"{self.length} tokens held, {new_tokens} more exceed max_length={self.max_length}")

    def begin(self, tokens: Tensor, regime: Hashable) -> Tensor:
        """The tokens to pass: the new ones, or all of them where the regime is not the one of those held."""
        self.past = self.length if regime == self.regime else 0
        self.regime = _NEVER  # until the pass is complete: after one that raises, everything is passed anew
        held = self.tokens[:, self.past : self.length]
        return torch.cat((held, tokens), dim=1) if held.shape[1] else tokens

    def advance(self, tokens: Tensor, regime: Hashable) -> None:
        """Count passed tokens as held, after every layer has done its part."""
        self.length, self.regime = self.past + tokens.shape[1], regime
        self.tokens[:, self.past : self.length] = tokens


class KVCache(Cache):
    """Preallocated keys and values, `shape` (n_layer, B, n_kv_head, max_length, head_dim) each.

    Keys are stored as rotated by their own absolute position and, within a regime, never touched again: a rotary score
    depends on the difference of two absolute angles, so nothing stored has to change when the sequence grows.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device, scaling_length: int | None = None):
        layers, batch_size, heads, max_length, head_dim = shape
        super().__init__(batch_size, max_length, scaling_length, device, 2 * dtype.itemsize * layers * heads * head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        # int64 (1,): set while one-token passes have to be the same kernels at every length (model/graph.py). Where the
        # token goes is then read on the device, and attention sees all of the room, what lies past the token masked.
        self.newest: Tensor | None = None
        self.room = max_length

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values (B, n_kv_head, T, head_dim) from `past` on.

        Returns views of all keys and values so far, (B, n_kv_head, past + T, head_dim), or of the room for them.
        """
        if self.newest is not None:
            for held, new in ((self.keys, keys), (self.values, values)):
                held[layer].index_copy_(2, self.newest, new.to(held.dtype))
            return self.keys[layer, :, :, : self.room], self.values[layer, :, :, : self.room]
        end = self.past + keys.shape[2]
        self.keys[layer, :, :, self.past : end] = keys
        self.values[layer, :, :, self.past : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class StateCache(Cache):
    """Linear attention's running sums, a pair a layer: they do not grow with the sequence."""

    def __init__(self, n_layer: int, batch_size: int, max_length: int, device, scaling_length: int | None = None):
        super().__init__(batch_size, max_length, scaling_length, device)
        self.states: list[tuple[Tensor, Tensor] | None] = [None] * n_layer
