"""What only a CUDA device runs: the compiled model, its kernels, and no wait for the device in a step."""

import pytest
import torch

from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEFAULTS = [pos for pos in ALL_SCHEMES if len(pos) == 1]


def losses_and_gradients(network, forward, tokens):
    network.zero_grad()
    losses = forward(tokens[:, :-1], targets=tokens[:, 1:])
    (losses.sum() / losses.numel()).backward()
    return [losses.detach(), *(parameter.grad.clone() for parameter in network.parameters())]


@pytest.mark.parametrize("pos", DEFAULTS, ids=scheme_id)
def test_compiled_training_is_float64s_on_the_cpu(pos):
    """In float32, without TF32, against plain code in float64."""
    exact = small_model(pos, train_length=256).train()
    tokens = random_tokens(exact, 3, 257)
    expected = losses_and_gradients(exact, exact, tokens)
    on_gpu = small_model(pos, train_length=256).train().float().cuda()
    torch.compiler.reset()
    found = losses_and_gradients(on_gpu, torch.compile(on_gpu), tokens.cuda())
    for mine, theirs in zip(found, expected, strict=True):
        difference = (mine.cpu().double() - theirs).norm()
        assert difference < 2e-4 * theirs.norm() + 1e-7


@pytest.mark.parametrize("pos", DEFAULTS, ids=scheme_id)
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_decoding_gives_the_tokens_of_full_passes(pos, n_kv_head):
    network = small_model(pos, n_kv_head=n_kv_head, train_length=64).cuda()
    prompt = random_tokens(network, 2, 5).cuda()
    assert torch.equal(network.generate(prompt, 40), network.generate(prompt, 40, use_cache=False))


def test_a_step_does_not_wait_for_the_device():
    network = small_model({"name": "rope"}, torch.float32).cuda().train()
    optimizer = torch.optim.AdamW(network.optimizer_groups(0.1), fused=True)
    tokens = random_tokens(network, 2, 33).cuda()

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            losses = network(tokens[:, :-1], targets=tokens[:, 1:])
        (losses.sum() / losses.numel()).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
