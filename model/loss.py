"""Per-token losses of a large vocabulary, in chunks of tokens: the logits of all tokens never exist at once."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

VOCAB = 4096  # ids whose gradient is summed over a chunk's tokens at a time


def _sizes(device: torch.device) -> tuple[int, int]:
    """Logits that exist at once, and those of them that are widened to float32 at once: what a CPU's caches hold."""
    return (2**25, 2**21) if device.type == "cpu" else (2**29, 2**29)


# A compiled model leaves its graph here: whether gradients are equal is seen from real strides. (torch.compiler.disable
# is the same, but loads the compiler, a second and a half at every start.)
@torch._disable_dynamo
def token_losses(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, fused: bool = False) -> Tensor:
    """-log p(target) of every row, from log-sum-exp in float32 (float64 for float64 rows); 0 where the target is -100.

    x (N, D); weight (V or more, D): rows past vocab_size are padding, with no probability; targets int64 (N,). Under
    autocast the products are taken in its dtype. fused: on CUDA, compile what lies between them. Returns (N,), nats.

    Where gradients are wanted the pass forward makes them as well, for an upstream gradient of 1 a token, since it has
    the probabilities at hand. Where the upstream gradients are all the same number (the mean of the losses), those are
    scaled; else they are made anew.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype == torch.float16:  # its range is too narrow for sums over tokens without the loss scale, known only later
        logits = F.linear(x, weight)[:, :vocab_size].float()
        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    settings = (targets, vocab_size, dtype, fused and x.is_cuda)
    return _TokenLosses.apply(x, weight, *settings) if wanted else _chunked(x, weight, *settings)[0]


def _rows(logits: Tensor, targets: Tensor, scale: Tensor | None, vocab_size: int) -> Tensor:
    """The losses of some rows; with a scale, their logits (n, V) become the gradients of scale · loss, in place."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide[:, vocab_size:] = -torch.inf
    log_p = wide.log_softmax(dim=-1)
    scored = targets != -100
    at = targets.where(scored, 0)[:, None]
    picked = log_p.gather(1, at)
    if scale is not None:
        factor = (scale * scored)[:, None]
        logits.copy_(log_p.exp_().mul_(factor))
        logits.scatter_(1, at, (picked.expm1() * factor).to(logits.dtype))
    return -picked[:, 0] * scored


@cache
def _fused_rows() -> Callable:
    return torch.compile(_rows, dynamic=False)


def _chunked(x, weight, targets, vocab_size, dtype, fused, scale=None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses (N,) and, with a scale (N,), the gradients of Σ scale · loss by x (N, D) and by weight (V, D)."""
    chunk, block = (max(1, size // len(weight)) for size in _sizes(x.device))  # in rows
    chunk = -(-len(x) // max(1, -(-len(x) // chunk)))  # as many, of equal size
    losses = torch.empty_like(targets, dtype=torch.promote_types(dtype, torch.float32))
    by_x, by_weight = (None, None) if scale is None else (torch.empty_like(x), torch.zeros_like(weight))
    rows = _fused_rows() if fused else _rows
    with torch.autocast(x.device.type, enabled=False):
        w = weight.to(dtype)
        for start in range(0, len(x), max(1, chunk)):
            part = slice(start, start + chunk)
            inputs = x[part].to(dtype)
            logits = inputs @ w.T
            for low in range(start, start + len(logits), block):
                at = slice(low, min(low + block, start + len(logits)))
                scales = None if scale is None else scale[at]
                losses[at] = rows(logits[at.start - start : at.stop - start], targets[at], scales, vocab_size)
            if scale is not None:
                by_x[part] = logits @ w
                for ids, total in zip(logits.split(VOCAB, dim=1), by_weight.split(VOCAB), strict=True):
                    total += ids.T @ inputs
    return losses, by_x, by_weight


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, *settings) -> Tensor:
        losses, *ctx.gradients = _chunked(x, weight, *settings, torch.ones_like(x[:, 0]))
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple:
        (by_x, by_weight), ctx.gradients = ctx.gradients, (None, None)
        x, weight = ctx.saved_tensors
        # One number, expanded, is what a sum's gradient looks like; comparing the numbers would stall a GPU.
        same = not any(upstream.stride()) or (upstream.device.type == "cpu" and bool((upstream == upstream[0]).all()))
        if same and by_weight is not None:
            by_x, by_weight = by_x * upstream[:, None], by_weight.mul_(upstream[0])
        else:
            _, by_x, by_weight = _chunked(x, weight, *ctx.settings, upstream)
        return by_x, by_weight, None, None, None, None
