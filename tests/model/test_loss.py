"""The chunked losses against log-softmax written out in float64, their gradients against autograd's of the same."""

import pytest
import torch

from model import loss as loss_module
from model.loss import token_losses
from tests.helpers import random_tokens, small_model

VOCAB, PADDED, WIDTH, ROWS = 61, 64, 16, 23


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 7 rows, widened 3 at a time, and 10 ids of the weight's gradient: every loop runs, and ends ragged."""
    monkeypatch.setattr(loss_module, "_sizes", lambda device: (7 * PADDED, 3 * PADDED))
    monkeypatch.setattr(loss_module, "VOCAB", 10)


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (ROWS,), generator=g)
    targets[[3, 22]] = -100
    return x, weight, targets


def plain(x, weight, targets):
    """One token at a time: log Σ exp(logit) - logit of the target, over the real ids only."""
    losses = []
    for row, target in zip(x, targets.tolist(), strict=True):
        logits = torch.stack([(row * weight[i]).sum() for i in range(VOCAB)])
        top = logits.max().detach()
        losses.append(top + (logits - top).exp().sum().log() - logits[target] if target != -100 else 0 * row.sum())
    return torch.stack(losses)


UPSTREAM = {
    "sum": lambda losses: losses.sum() / 7,
    "mean": lambda losses: losses.mean(),
    "one weight a token": lambda losses: (losses * torch.linspace(-1, 2, ROWS, dtype=losses.dtype)).sum(),
    "some tokens": lambda losses: losses[2:9].sum(),
    "squares": lambda losses: losses.square().sum(),
}


@pytest.mark.parametrize("upstream", UPSTREAM.values(), ids=UPSTREAM)
def test_losses_and_gradients_are_those_of_the_plain_formula(upstream):
    found, expected = [], []
    for function, into in ((lambda *a: token_losses(*a, VOCAB), found), (plain, expected)):
        x, weight, targets = inputs()
        losses = function(x, weight, targets)
        upstream(losses).backward()
        into += [losses.detach(), x.grad, weight.grad]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert found[0][3] == found[0][22] == 0
    assert not found[1][[3, 22]].any()
    assert not found[2][VOCAB:].any()


def test_backward_twice_adds_up():
    x, weight, targets = inputs()
    losses = token_losses(x, weight, targets, VOCAB)
    losses.sum().backward(retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    losses.sum().backward()
    torch.testing.assert_close((x.grad, weight.grad), (2 * once[0], 2 * once[1]))


def test_without_gradients_and_without_tokens():
    x, weight, targets = inputs()
    with torch.no_grad():
        assert torch.equal(token_losses(x, weight, targets, VOCAB), token_losses(x, weight, targets, VOCAB))
        losses = token_losses(x, weight, targets, VOCAB)
    assert not losses.requires_grad
    torch.testing.assert_close(losses, plain(x, weight, targets).detach())
    assert token_losses(x[:0], weight, targets[:0], VOCAB).shape == (0,)


def test_a_saved_pass_is_scaled_and_another_gradient_is_made_anew(monkeypatch):
    """The mean's gradient costs no second pass over the logits, on a GPU neither: it is known from its strides."""
    calls = []
    chunked = loss_module._chunked
    monkeypatch.setattr(loss_module, "_chunked", lambda *a: calls.append(a) or chunked(*a))
    x, weight, targets = inputs()
    (token_losses(x, weight, targets, VOCAB).sum() / ROWS).backward()
    assert len(calls) == 1
    token_losses(x, weight, targets, VOCAB).square().sum().backward()
    assert len(calls) == 3


def test_low_precision_is_near_and_sums_in_float32():
    x, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = token_losses(x, weight, targets, VOCAB)
    (losses.sum() / ROWS).backward()
    exact_x, exact_weight, _ = inputs()
    exact = plain(exact_x, exact_weight, targets)
    (exact.sum() / ROWS).backward()
    assert losses.dtype == x.grad.dtype == weight.grad.dtype == torch.float32
    logits = (x.detach().bfloat16() @ weight.detach().bfloat16().T)[:, :VOCAB].double()
    scored = targets.clamp(min=0)[:, None]
    widened = (logits.logsumexp(dim=1) - logits.gather(1, scored)[:, 0]) * (targets != -100)
    torch.testing.assert_close(losses.double(), widened, rtol=1e-6, atol=1e-5)
    # products of 16 bfloat16 numbers of size 1, rounded to bfloat16: about 2^-8 of logits up to 10
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=0.1)
    for mine, theirs in ((x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_tied_weights_get_the_gradients_of_both_their_uses():
    """The embedding's gradient stays sparse on the CPU until it meets the output matrix': the sum must be whole."""
    model = small_model({"name": "rope"}).train()
    tokens = random_tokens(model, 3, 12)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    (model(inputs, targets=targets).sum() / 5).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    log_p = model(inputs).log_softmax(dim=-1)
    (-log_p.gather(2, targets[:, :, None]).sum() / 5).backward()
    for mine, theirs in zip(found, [parameter.grad for parameter in model.parameters()], strict=True):
        assert not mine.is_sparse
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
