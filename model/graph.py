"""Decoding on CUDA without the host: a step of one token is captured once, and replayed."""

import torch
from torch import Tensor

from model.cache import Cache, KVCache


def can_graph(model, cache: Cache) -> bool:
    """Whether every step is the same kernels on the same tables.

    Not for linear attention, whose state is a new tensor each step, nor under a scaling, whose frequencies may change
    on the way, nor under autocast, which keeps casts of the weights between steps.
    """
    plain = isinstance(cache, KVCache) and model.config.scaling is None
    return plain and cache.keys.is_cuda and not torch.is_autocast_enabled("cuda")


class GraphedStep:
    """The model's step for a cache that holds at least one token: token int64 (B, 1) -> logits (B, V) of the next.

    The logits are overwritten by the next step. While it is in use, the cache's own length stands still.
    """

    def __init__(self, model, cache: KVCache):
        self.token = torch.zeros((cache.batch_size, 1), dtype=torch.int64, device=cache.keys.device)
        cache.newest = torch.tensor([cache.length], device=cache.keys.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up, which must not be captured
            for _ in range(2):
                model.fixed_step(self.token, cache)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = model.fixed_step(self.token, cache)
            cache.newest += 1

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.graph.replay()
        return self.logits
