"""Both forms of the activation against the formula with the tanh, written out in float64."""

import math

import pytest
import torch

from model import gelu as gelu_module
from model.gelu import gelu


def formula(x):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("trains", [True, False])
def test_the_formula_and_its_slope(trains, monkeypatch):
    monkeypatch.setattr(gelu_module, "PIECE", 100)  # several pieces, the last one short
    x = torch.linspace(-30, 30, 998, dtype=torch.float64).view(2, 499)
    mine, theirs = x.clone().requires_grad_(trains), x.clone().requires_grad_()
    torch.testing.assert_close(gelu(mine), formula(theirs), rtol=0, atol=1e-13)
    if trains:
        upstream = torch.cos(x)
        gelu(mine).backward(upstream)
        formula(theirs).backward(upstream)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


def test_low_precision_is_rounded_once():
    x = torch.linspace(-6, 6, 1001).bfloat16().requires_grad_()
    y = gelu(x)
    y.sum().backward()
    exact = x.detach().double().requires_grad_()
    formula(exact).sum().backward()
    torch.testing.assert_close(y.detach(), formula(exact).detach().bfloat16(), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(x.grad, exact.grad.bfloat16(), rtol=2**-8, atol=1e-5)
