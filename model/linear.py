"""A linear layer that decodes at the speed at which a CPU reads its weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 16  # rows, up to which blocks are faster
CACHED = 2**18  # numbers of a weight that a core's cache holds


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) by weight (out, in), plus bias (out,), as F.linear: (..., out).

    For few rows without gradients a CPU's product reads the weights with one core, at a third of the rate that memory
    allows. The same product as a batch of blocks of the weight's rows is shared out to all of them.
    """
    ids, width = weight.shape
    if (
        x.shape[-1] != width
        or x.numel() > FEW * width
        or not x.dtype == weight.dtype == torch.float32
        or x.device.type != "cpu"
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    ):
        return F.linear(x, weight, bias)
    # Two blocks or more for each thread; a power of two, as sizes have them for factors.
    parts = math.gcd(ids, 2 << torch.get_num_threads().bit_length())
    blocks = weight.view(parts, ids // parts, width)
    if x.numel() == width and weight.numel() > CACHED:
        # From memory, columns are read faster than rows. They are the vectors of x.reshape(1, -1, 1), but with a last
        # stride by which the kernel takes them six times as fast.
        columns = x.as_strided((parts, width, 1), (0, x.stride(-1), width))
        y = torch.bmm(blocks, columns) if bias is None else torch.baddbmm(bias.view(parts, -1, 1), blocks, columns)
        return y.view(*x.shape[:-1], ids)
    rows = x.reshape(-1, width).expand(parts, -1, -1)
    y = torch.bmm(rows, blocks.mT) if bias is None else torch.baddbmm(bias.view(parts, 1, -1), rows, blocks.mT)
    return y.transpose(0, 1).reshape(*x.shape[:-1], ids)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
