"""Steps that are captured once and replayed on the CPU, against full passes; what CUDA captures is in test_cuda.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils import mkldnn

import model.graph
from model.graph import CannotCaptureError, GraphedStep, Tape, one_token_steps
from model.positions import SCHEMES
from model.sampling import continuations
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

DTYPES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.15}


def check_steps(network, tokens, prompt, tolerance, captured=True):
    """The logits of every one-token step after a prompt; the cache's room is filled with noise first."""
    B, T = tokens.shape
    held = network.new_cache(B, T)
    held.keys.normal_()
    held.values.normal_()
    with torch.inference_mode():
        network(tokens[:, :prompt], cache=held)
        step = one_token_steps(network, held)
        assert (isinstance(step, GraphedStep) and step.replay is not None) == captured
        for t in range(prompt, T):
            full = network(tokens[:, : t + 1], scaling_length=held.scaling_length)[:, -1]
            torch.testing.assert_close(step(tokens[:, t : t + 1]), full, rtol=0, atol=tolerance)


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_kv_head", "batch"), [(4, 1), (2, 3)])
def test_replayed_steps_are_full_passes(pos, dtype, n_kv_head, batch, monkeypatch):
    """Through four captures: at 7 tokens held, then whenever the room of 8, 16 and 32 is full."""
    monkeypatch.setattr(model.graph, "ROOM", 8)
    network = small_model(pos, dtype, n_kv_head=n_kv_head, train_length=48)
    check_steps(network, random_tokens(network, batch, 45), 7, DTYPES[dtype])


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_replayed_steps_under_autocast(pos, monkeypatch):
    monkeypatch.setattr(model.graph, "ROOM", 8)
    network = small_model(pos, torch.float32, train_length=48)
    with torch.autocast("cpu", torch.bfloat16):
        check_steps(network, random_tokens(network, 2, 45), 7, DTYPES[torch.bfloat16])


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_the_last_place_of_the_cache_may_need_a_capture(pos, monkeypatch):
    """Room is full one token before the cache is, which for a learned table is its end as well."""
    monkeypatch.setattr(model.graph, "ROOM", 8)
    network = small_model(pos, train_length=33)
    check_steps(network, random_tokens(network, 1, 33), 1, 1e-10)


@pytest.mark.parametrize("prompt", [31, 32, 33])
def test_longropes_switch(prompt):
    """Keys of a prompt that ends at the training length are of the short side, every step after it of the long one."""
    scaling = {"name": "longrope", "factor": 4.0, "short": [1.0] * 8, "long": [1.0 + i for i in range(8)]}
    network = small_model({"name": "rope"}, scaling=scaling)
    check_steps(network, random_tokens(network, 1, prompt + 40), prompt, 1e-10, captured=prompt > 32)


def test_hooks_are_called_at_every_step():
    network, calls = small_model({"name": "rope"}, train_length=64), []
    network.blocks[0].register_forward_hook(lambda *given: calls.append(1))
    network.generate(random_tokens(network, 1, 3), 40)
    assert len(calls) == 40


@pytest.mark.parametrize("scaling", [{"name": "yarn", "factor": 2.0}, {"name": "linear", "factor": 2.0}], ids=scheme_id)
def test_a_scaling_that_stands_still_is_captured(scaling):
    network = small_model({"name": "rope"}, scaling=scaling)
    check_steps(network, random_tokens(network, 2, 50), 3, 1e-10)


def test_frequencies_that_change_are_not_captured():
    network = small_model({"name": "rope"}, scaling={"name": "dynamic", "factor": 2.0})
    check_steps(network, random_tokens(network, 1, 50), 3, 1e-10, captured=False)


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_generation_and_continuations_are_those_without_a_cache(pos, monkeypatch):
    captured = []

    class Counted(GraphedStep):
        def _capture(self):
            captured.append(self.length)
            super()._capture()

    monkeypatch.setattr(model.graph, "GraphedStep", Counted)
    monkeypatch.setattr(model.graph, "ROOM", 16)
    network = small_model(pos, train_length=90)
    prompts = [random_tokens(network, 1, length)[0] for length in (9, 4)]
    alone = [network.generate(prompt[None], 60, use_cache=False)[0, len(prompt) :].tolist() for prompt in prompts]
    assert [network.generate(prompt[None], 60)[0, len(prompt) :].tolist() for prompt in prompts] == alone
    together = [[], []]
    for drawn in continuations(network, prompts, 60):
        for row, new in drawn.items():
            together[row].append(new)
    assert together == alone
    assert captured == [9, 18, 36, 4, 16, 32, 4, 16, 32, 64][: len(captured)]
    assert len(captured) > 8


class Reading(SCHEMES["alibi"]):
    """Hands a number to Python."""

    def bias(self, queries, query_positions, key_positions):
        assert int(query_positions[-1]) >= 0
        return super().bias(queries, query_positions, key_positions)


class ReadingLater(SCHEMES["alibi"]):
    """Hands numbers to Python once there are more than 16 keys, when a step was captured already."""

    def by_distance(self, distances):
        bias = super().by_distance(distances)
        return bias if len(distances) <= 16 else bias * (1 + 0 * distances.tolist()[0])


class Choosing(SCHEMES["alibi"]):
    """Has as many results as the numbers say."""

    def by_distance(self, distances):
        bias = super().by_distance(distances)
        bias[:, distances > 5] = bias[:, distances > 5] * 2
        return bias


@pytest.mark.parametrize("scheme", [Reading, ReadingLater, Choosing])
def test_what_cannot_be_captured_is_passed_step_by_step(scheme, monkeypatch):
    monkeypatch.setattr(model.graph, "ROOM", 8)
    network = small_model({"name": "alibi"})
    network.pos = scheme(network.config)
    check_steps(network, random_tokens(network, 2, 40), 3, 1e-6, captured=scheme is ReadingLater)


def test_weights_without_plain_memory_are_passed_step_by_step():
    network = small_model({"name": "rope"}, torch.float32)
    expected = network.generate(tokens := random_tokens(network, 1, 3), 40)
    for block in network.blocks:
        block.mlp.down = mkldnn.MkldnnLinear(block.mlp.down, torch.float32)
    assert torch.equal(network.generate(tokens, 40), expected)


def taped(function, *numbers):
    """function of tensors, captured with some numbers and replayed with others, which it is to be recomputed from."""
    inputs = [torch.zeros_like(first) for first, _ in numbers]
    for x, (first, _) in zip(inputs, numbers, strict=True):
        x.copy_(first)
    with torch.inference_mode():
        with Tape(*inputs) as tape:
            out = function(*inputs)
        for x, (_, then) in zip(inputs, numbers, strict=True):
            x.copy_(then)
        for _ in range(2):  # a second time, in case the first leaves something behind
            tape.replay()
        torch.testing.assert_close(out, function(*(then for _, then in numbers)))
    return tape


def in_place(x):
    sums = torch.zeros(4)
    sums += x
    half = sums[:2]
    half *= 3
    return sums, half + 1


def rewritten_constant(x):
    scale = torch.ones(4)
    before = x * scale
    scale.add_(1)
    return before, x * scale


def written_by_out(x):
    sums = torch.zeros(4)
    torch.add(x, 1, out=sums)
    return sums * 2


def several_results(x):
    value, index = x.view(2, 2).max(dim=1)
    top = x.topk(2)
    return value, index, top.values, F.layer_norm(x, (4,)), torch.cat((x, x)).split(3)[0]


def written_through_a_view(x):
    table = torch.arange(12.0).view(3, 4)
    table[1].copy_(x)
    return table.sum(dim=0), table.T.reshape(-1), table.flatten()[:5] * 2


@pytest.mark.parametrize(
    "function", [in_place, written_by_out, rewritten_constant, several_results, written_through_a_view]
)
def test_a_tape_recomputes_what_depends_on_its_inputs(function):
    taped(function, (torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([-1.0, 5.0, 2.5, 9.0])))


def test_a_tape_leaves_out_what_does_not():
    table = torch.randn(50, 4)
    tape = taped(lambda x: x * (table.exp().sum(dim=0) + 1), (torch.ones(4), torch.full((4,), 2.0)))
    assert len(tape.calls) == 1


def test_random_numbers_are_drawn_anew():
    with torch.inference_mode():
        with Tape() as tape:
            drawn = torch.rand(8)
        first = drawn.clone()
        tape.replay()
    assert not torch.equal(drawn, first)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x[x > 1],
        lambda x: x[(x > 1).byte()],
        lambda x: x.nonzero(),
        lambda x: x.nonzero(as_tuple=True),
        lambda x: torch.where(x > 1),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_a_tape_refuses_what_depends_on_numbers_read(function):
    with torch.inference_mode(), pytest.raises(CannotCaptureError), Tape(x := torch.ones(3)):
        function(x)


def test_generation_does_not_load_the_compiler():
    code = (
        "import sys; from model import GPT, GPTConfig; import torch\n"
        "model = GPT(GPTConfig(vocab_size=7, n_layer=1, n_head=1, train_length=99, pos={'name': 'rope'}))\n"
        "model.generate(torch.zeros((1, 2), dtype=torch.int64), 80)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=120)
