"""A linear layer that decodes at the speed at which a CPU reads its weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) by weight (out, in), plus bias (out,), as F.linear: (..., out).

    For a single row without gradients a CPU's matrix-vector product reads the weights with one core, at a third of
    the rate that memory allows. The same product as a batch of blocks of rows is shared out to all of them.
    """
    if (
        x.numel() != weight.shape[1]
        or not x.dtype == weight.dtype == torch.float32
        or x.device.type != "cpu"
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
    ):
        return F.linear(x, weight, bias)
    (ids, width), parts = weight.shape, math.gcd(len(weight), 16)
    # The same vectors as x.reshape(1, -1, 1), but with a last stride by which the kernel takes them six times as fast.
    columns = x.as_strided((parts, width, 1), (0, x.stride(-1), width))
    y = torch.bmm(weight.view(parts, ids // parts, width), columns).view(*x.shape[:-1], ids)
    return y if bias is None else y.add_(bias)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
