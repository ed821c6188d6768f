"""Attention with a bias by distance as one kernel, which forms nothing of (Tq, Tk) (FlexAttention; Dong et al. 2024).

For training on CUDA, where it takes the place of blocks of biases if GPT.flex_attention is set. On a CPU torch has its
forward pass only.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

BLOCK = 128  # tokens; for other lengths than multiples of it the kernel's gradients were not always finite


@cache
def _kernel(device_type: str) -> tuple[Callable, Callable]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # late: loads the compiler

    return create_block_mask, flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=False)


@cache
def _causal(T: int, device: torch.device):
    create_block_mask, _ = _kernel(device.type)
    return create_block_mask(lambda b, h, query, key: query >= key, None, None, T, T, device=device, BLOCK_SIZE=BLOCK)


# A compiled model leaves its graph here: the kernel, compiled as a part of it, failed (tests/benchmark.md).
@torch._disable_dynamo
def flex_attention(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor) -> Tensor:
    """softmax(q kᵀ / √head_dim + by_distance[h, query - key]) v over the keys up to the query: (B, H, T, head_dim).

    q (B, H, T, head_dim); k, v (B, Hkv, T, head_dim), of one dtype; T a multiple of BLOCK. by_distance: float32 (H, T),
    which gets gradients, too.
    """

    def biased(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + by_distance[h, (query - key).abs()]  # later keys are masked, but looked up

    _, attend = _kernel(q.device.type)
    mask = _causal(q.shape[2], q.device)
    return attend(q, k, v, score_mod=biased, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
