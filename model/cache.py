"""What decoding keeps of the tokens so far, so that a new token costs one token and not the whole sequence."""

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from model.checks import check_whole

_UNFINISHED = object()  # a regime that equals no other: until a pass is done, what is held is not to be relied on


class Cache:
    """Keys and values (or linear attention's running sums) of `length` tokens of B sequences. Made by GPT.new_cache.

    Keys are stored as rotated by their own position, and stay valid while the scheme's frequencies do. Where these
    change with the length (dynamic NTK, LongRoPE), deeper keys and values came from rows under the older frequencies,
    so the cache keeps its tokens and the model passes all of them again (`pending`); also after a pass that raised.
    """

    def __init__(self, model: nn.Module, batch_size: int, max_length: int, scaling_length: int | None):
        check_whole("batch_size", batch_size)
        check_whole("max_length", max_length)
        check_whole("scaling_length", scaling_length, optional=True)
        self.batch_size, self.max_length, self.scaling_length = batch_size, max_length, scaling_length
        weight, c = model.embedding.weight, model.config
        self.tokens = torch.zeros((batch_size, max_length), dtype=torch.int64, device=weight.device)
        self.length, self.regime = 0, None  # as of PositionScheme.regime
        self.states: dict[int, tuple[Tensor, Tensor]] = {}  # of linear attention, by layer
        if c.attention == "softmax":
            autocast = torch.is_autocast_enabled(weight.device.type) and weight.dtype == torch.float32
            dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
            shape = (2, c.n_layer, batch_size, c.n_kv_head, max_length, c.head_dim)
            self.keys, self.values = torch.zeros(shape, dtype=dtype, device=weight.device)

    def pending(self, tokens: Tensor, regime: Hashable) -> tuple[Tensor, int]:
        """The tokens to pass and the position of the first: the new ones, or all where the frequencies are others.

        tokens: int64 (B, T), the new ones. Raises ValueError where they do not fit; the cache is then as it was.
        """
        batch_size, new = tokens.shape
        if batch_size != self.batch_size or self.length + new > self.max_length:
            raise ValueError(
                f"tokens ({batch_size}, {new}) do not fit: the cache has room for {self.batch_size} sequences of "
                f"max_length={self.max_length} tokens, and holds {self.length}"
            )
        end = self.length + new
        self.tokens[:, self.length : end] = tokens
        start = self.length if regime == self.regime else 0
        self.regime = _UNFINISHED
        return self.tokens[:, start:end], start

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values (B, n_kv_head, T, head_dim) from `start` on; all of them so far, as views."""
        end = start + k.shape[2]
        self.keys[layer, :, :, start:end] = k
        self.values[layer, :, :, start:end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
