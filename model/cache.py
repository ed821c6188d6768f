"""The key and value cache: what makes decoding cost one token a step instead of the whole sequence."""

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values of every layer, (B, n_kv_head, max_length, head_dim) each.

    Keys are stored as rotated by their own absolute position and are never touched again: a rotary score depends on the
    difference of two absolute angles, so nothing stored has to change when the sequence grows.
    `length` is the number of tokens held; it moves only when a pass through all the layers is complete, so a pass that
    raises leaves the cache as it was.
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
    ):
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        shape = (n_layer, batch_size, n_kv_head, max_length, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.batch_size, self.max_length, self.length = batch_size, max_length, 0

    def check(self, batch_size: int, new_tokens: int) -> None:
        """Raise ValueError if a chunk of this shape does not fit; nothing is written."""
        if batch_size != self.batch_size:
            raise ValueError(f"the cache holds {self.batch_size} sequences, the tokens are {batch_size}")
        if self.length + new_tokens > self.max_length:
            raise ValueError(
                f"{self.length} tokens in the cache and {new_tokens} more exceed its max_length={self.max_length}"
            )

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values (B, n_kv_head, T, head_dim) behind the `length` tokens held.

        Returns views of all keys and values so far, (B, n_kv_head, length + T, head_dim).
        """
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, new_tokens: int) -> None:
        """Count a chunk as held, after every layer has appended it."""
        self.length += new_tokens
