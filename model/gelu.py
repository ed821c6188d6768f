"""GPT-2's activation, and a faster form of it for training on a CPU."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE = 2**18  # numbers worked on at a time: a few of them in float32 fit into a core's cache


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, x/2 · (1 + tanh √(2/π) (x + 0.044715 x³)) (Hendrycks and Gimpel 2016), as GPT-2 has it."""
    if x.device.type == "cpu" and torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling():
        return _SigmoidGELU.apply(x)
    return F.gelu(x, approximate="tanh")


class _SigmoidGELU(torch.autograd.Function):
    """The same as x · sigmoid(x (c + d x²)), c = √(8/π), d = 0.044715 c: torch's sigmoid is far faster than its tanh.

    Its slope is formed along with it, while all parts are at hand, so that the backward pass is one product.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        c = torch.tensor(math.sqrt(8 / math.pi), dtype=torch.promote_types(x.dtype, torch.float32))
        d = 0.044715 * float(c)
        y, slope = torch.empty_like(x), torch.empty_like(x)
        for piece, y_piece, slope_piece in zip(*(t.view(-1).split(PIECE) for t in (x, y, slope)), strict=True):
            wide = piece.to(c.dtype)
            gate = torch.addcmul(c, wide, wide, value=d).mul_(wide).sigmoid_()
            product = wide * gate
            y_piece.copy_(product)
            # slope = gate + x · gate · (1 - gate) · (c + 3 d x²)
            inner = torch.addcmul(c, wide, wide, value=3 * d)
            slope_piece.copy_(product.addcmul_(product, gate, value=-1).mul_(inner).add_(gate))
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> Tensor:
        return upstream * ctx.saved_tensors[0]
