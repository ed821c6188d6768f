"""FlexAttention against the blocks of biases that it replaces; its gradients, on CUDA, against float64 on the CPU."""

import shutil

import pytest
import torch

import model.flex
from model.flex import BLOCK, flex_attention
from model.positions import SCHEMES
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

# torch says that it is not compiled, which is what these want, and that its own compiler uses what it will drop.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:`torch.jit")
FLEXIBLE = [pos for pos in ALL_SCHEMES if SCHEMES[pos["name"]].shared]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: a CPU has no backward pass of it")


def by_hand(q, k, v, by_distance):
    """float64, one query at a time."""
    q, k, v, by_distance = (x.double().cpu() for x in (q, k, v, by_distance))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    rows = []
    for t in range(q.shape[2]):
        scores = (k[:, :, : t + 1] @ q[:, :, t, :, None])[..., 0] / q.shape[-1] ** 0.5
        weights = (scores + by_distance[:, : t + 1].flip(1)).softmax(dim=-1)
        rows.append((weights[..., None] * v[:, :, : t + 1]).sum(dim=2))
    return torch.stack(rows, dim=2)


def inputs(n_kv_head, dtype, device="cpu"):
    g = torch.Generator().manual_seed(0)
    heads = (4, n_kv_head, n_kv_head)
    tensors = [torch.randn(2, h, 2 * BLOCK, 16, dtype=torch.float64, generator=g) for h in heads]
    tensors.append(torch.randn(4, 2 * BLOCK, dtype=torch.float64, generator=g))
    return [x.to(device, dtype) for x in tensors[:3]] + [tensors[3].to(device).float()]


@pytest.mark.parametrize("n_kv_head", [4, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_the_kernels_definition_on_the_cpu(n_kv_head, dtype, tolerance):
    given = inputs(n_kv_head, dtype)
    found = flex_attention(*given)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), by_hand(*given), rtol=0, atol=tolerance)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compiled_kernel_on_the_cpu(monkeypatch):
    create_block_mask, attend = model.flex._kernel("cpu")
    compiled = create_block_mask, torch.compile(attend, dynamic=False)
    monkeypatch.setattr(model.flex, "_kernel", lambda device_type: compiled)
    given = inputs(2, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(flex_attention(*given).double(), by_hand(*given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pos", FLEXIBLE, ids=scheme_id)
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_a_model_with_it_is_the_model(pos, n_kv_head, monkeypatch):
    network = small_model(pos, n_kv_head=n_kv_head, train_length=BLOCK).train()
    tokens = random_tokens(network, 2, 2 * BLOCK)
    calls = []
    monkeypatch.setattr(model.flex, "flex_attention", lambda *given: calls.append(1) or flex_attention(*given))
    with torch.no_grad():
        expected = network(tokens)
        network.flex_attention = True
        torch.testing.assert_close(network(tokens), expected, rtol=0, atol=1e-5)  # the bias is float32
        assert len(calls) == network.config.n_layer
        network(tokens[:, :-1])  # a length that it does not take
        network.eval()(tokens)
    assert len(calls) == network.config.n_layer


@cuda
@pytest.mark.parametrize("n_kv_head", [4, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.02)])
def test_gradients_of_the_compiled_kernel(n_kv_head, dtype, tolerance):
    given = [x.requires_grad_() for x in inputs(n_kv_head, dtype, "cuda")]
    exact = [x.detach().double().cpu().requires_grad_() for x in given]
    found, expected = flex_attention(*given), by_hand(*exact)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected.backward(upstream)
    found.backward(upstream.to("cuda", dtype))
    for mine, theirs in zip((found, *(x.grad for x in given)), (expected, *(x.grad for x in exact)), strict=True):
        assert (mine.detach().cpu().double() - theirs).norm() < tolerance * theirs.norm()


@cuda
@pytest.mark.parametrize("pos", FLEXIBLE, ids=scheme_id)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_with_it_as_without(pos, compiled):
    network = small_model(pos, torch.float32, train_length=BLOCK).train().cuda()
    tokens = random_tokens(network, 2, BLOCK + 1).cuda()
    torch.compiler.reset()
    gradients = []
    for flex, forward in ((False, network), (True, torch.compile(network) if compiled else network)):
        network.flex_attention = flex
        network.zero_grad()
        forward(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in network.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 1e-3 * gradients[0].norm()
