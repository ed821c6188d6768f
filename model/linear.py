"""A linear layer that decodes on a CPU at the speed at which memory is read."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW, LARGE = 16, 2**19  # rows of x up to which, and numbers of a weight from which, blocks are faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) by weight (out, in), plus bias (out,), as F.linear: (..., out).

    For few rows without gradients a CPU's product reads the weights with one core, at a third of the rate that memory
    allows. The same product as a batch of blocks of the weight's rows is shared out to all cores.
    """
    few = weight.numel() >= LARGE and x.numel() <= FEW * x.shape[-1] and x.dtype == weight.dtype == torch.float32
    if not few or x.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    parts = math.gcd(len(weight), 2 << torch.get_num_threads().bit_length())
    columns = x.reshape(-1, x.shape[-1]).T.expand(parts, -1, -1)  # (parts, in, rows)
    y = torch.bmm(weight.view(parts, -1, x.shape[-1]), columns)  # (parts, out / parts, rows)
    y = y.flatten(0, 1).T.reshape(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
