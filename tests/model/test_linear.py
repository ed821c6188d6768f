"""A few rows times weights against the sums written out in float64."""

import pytest
import torch

import model.linear
from model.linear import linear


@pytest.mark.parametrize("shape", [(48, 20), (7, 20), (1, 3)])
@pytest.mark.parametrize("lead", [(1, 1), (1,), (), (3,), (2, 5), (16, 1), (0,), (2, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows(shape, lead, bias, monkeypatch):
    monkeypatch.setattr(model.linear, "LARGE", 0)
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*lead, shape[1], generator=g), torch.randn(shape, generator=g)
    offset = torch.randn(shape[0], generator=g) if bias else None
    expected = (weight.double() * x.double().unsqueeze(-2)).sum(dim=-1) + (offset.double() if bias else 0)
    monkeypatch.setattr(torch.nn.functional, "linear", None)  # not needed for it
    strided = torch.stack((x, x), dim=-1)[..., 0]  # as a slice of something larger
    with torch.no_grad():
        for rows in (x, strided):
            found = linear(rows, weight, offset)
            assert found.shape == (*lead, shape[0])
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_many_rows_are_torchs(monkeypatch):
    monkeypatch.setattr(model.linear, "LARGE", 0)
    layer = torch.nn.Linear(20, 48)
    for x in (torch.randn(17, 20), torch.randn(2, 9, 20)):
        with torch.no_grad():
            assert torch.equal(linear(x, layer.weight, layer.bias), layer(x))
    x = torch.randn(1, 20)
    linear(x, layer.weight, layer.bias).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.expand(48, -1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x, layer.weight, layer.bias).dtype == torch.bfloat16
    with torch.no_grad(), pytest.raises(RuntimeError):
        linear(torch.randn(2, 10), layer.weight, layer.bias)  # as many numbers as one row has
