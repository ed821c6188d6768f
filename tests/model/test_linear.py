"""One row times weights against the sum written out in float64."""

import pytest
import torch

from model.linear import linear


@pytest.mark.parametrize("shape", [(48, 20), (7, 20), (1, 3)])
@pytest.mark.parametrize("lead", [(1, 1), (1,), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_a_single_row(shape, lead, bias, monkeypatch):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*lead, shape[1], generator=g), torch.randn(shape, generator=g)
    offset = torch.randn(shape[0], generator=g) if bias else None
    expected = (weight.double() * x.double().reshape(1, -1)).sum(dim=1) + (offset.double() if bias else 0)
    monkeypatch.setattr(torch.nn.functional, "linear", None)  # not needed for it
    strided = torch.stack((x, x), dim=-1)[..., 0]  # as a slice of something larger
    with torch.no_grad():
        for row in (x, strided):
            found = linear(row, weight, offset)
            assert found.shape == (*lead, shape[0])
            torch.testing.assert_close(found.double().flatten(), expected, rtol=0, atol=1e-5)


def test_what_is_no_single_row_is_torchs():
    layer = torch.nn.Linear(20, 48)
    for x in (torch.randn(2, 20), torch.randn(1, 3, 20)):
        with torch.no_grad():
            assert torch.equal(linear(x, layer.weight, layer.bias), layer(x))
    x = torch.randn(1, 20)
    linear(x, layer.weight, layer.bias).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.expand(48, -1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x, layer.weight, layer.bias).dtype == torch.bfloat16
