"""The network against GPT-2 in another library, closed forms, and what any causal language model must do."""

import math
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig
from model.positions import SCHEMES
from tests.helpers import DEFAULT_SCHEMES, random_tokens, scheme_id, small_model

CONFIG = {"vocab_size": 257, "n_layer": 2, "n_head": 2, "head_dim": 64, "train_length": 64}


def test_learned_model_is_gpt2():
    """The same weights in transformers' GPT-2 give the same logits."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    model = small_model({"name": "learned"}, vocab_size=64)  # a multiple of 64: no padding rows
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, attn_implementation="eager"
        )
    )
    state = model.state_dict()
    renamed = {"transformer.wte.weight": state["embedding.weight"], "transformer.wpe.weight": state["pos.table"]}
    renamed |= {f"transformer.ln_f.{kind}": state[f"norm.{kind}"] for kind in ("weight", "bias")}
    names = {
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
    }
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for layer in range(2):
        for ours, other in names.items():
            for kind in ("weight", "bias"):
                tensor = state[f"blocks.{layer}.{ours}.{kind}"]
                renamed[f"transformer.h.{layer}.{other}.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
    renamed["lm_head.weight"] = state["embedding.weight"]
    theirs.load_state_dict(renamed)
    theirs.double().eval()
    tokens = random_tokens(model, 2, 32)
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-10)


def test_grouped_heads_are_repeated_key_heads():
    """A model with 2 key heads equals one with 4 whose key and value weights are copies, head by head."""
    grouped, full = small_model({"name": "rope"}, n_kv_head=2), small_model({"name": "rope"})
    state = grouped.state_dict()
    for name in list(state):
        if ".qkv." in name:
            q, k, v = state[name].split((64, 32, 32))
            k, v = (torch.cat([part[16 * (head // 2) : 16 * (head // 2 + 1)] for head in range(4)]) for part in (k, v))
            state[name] = torch.cat((q, k, v))
    full.load_state_dict(state)
    tokens = random_tokens(full, 2, 40)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_initial_loss_is_that_of_guessing(pos):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**CONFIG, pos={"name": pos}))
    tokens = random_tokens(model, 8, 65)
    nll = model(tokens[:, :-1], targets=tokens[:, 1:])
    assert nll.shape == (8, 64)
    assert nll.dtype == torch.float32
    assert nll.mean().item() == pytest.approx(math.log(257), abs=0.1)


def test_random_tokens_cannot_be_learned_but_repeated_ones_can():
    """A leak of the target into its input would beat the entropy of fresh random tokens."""
    losses = {}
    for kind in ("random", "repeated"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**{**CONFIG, "vocab_size": 16, "head_dim": 16, "train_length": 32}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(60):
            tokens = torch.randint(16, (8, 33))
            if kind == "repeated":
                tokens = torch.arange(33).remainder(16).expand(8, -1)
            loss = model(tokens[:, :-1], targets=tokens[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[kind] = loss.item()
    assert losses["random"] > math.log(16) - 0.02
    assert losses["repeated"] < 0.5


@pytest.mark.parametrize("training", [True, False])
def test_losses_are_the_log_softmax_of_the_logits(training):
    model = small_model({"name": "rope"}).train(training)
    tokens = random_tokens(model, 3, 21)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :7] = -100
    targets[2] = -100
    nll = model(inputs, targets=targets)
    logits = model(inputs)
    for b in range(3):
        for t in range(20):
            row = logits[b, t].tolist()
            expected = 0.0
            if targets[b, t] != -100:
                expected = math.log(sum(math.exp(value) for value in row)) - row[targets[b, t]]
            assert nll[b, t].item() == pytest.approx(expected, abs=1e-9)


def test_losses_of_a_bfloat16_model_come_from_float32_sums():
    model = small_model({"name": "rope"}, torch.bfloat16)
    tokens = random_tokens(model, 2, 21)
    nll = model(tokens[:, :-1], targets=tokens[:, 1:])
    logits = model(tokens[:, :-1]).double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll.double().flatten(), expected, rtol=0, atol=1e-5)


def test_vocabulary_is_padded_but_padding_cannot_be_seen_or_sampled():
    model = small_model({"name": "none"}, torch.float32, vocab_size=257)
    assert model.embedding.weight.shape[0] == 320
    with torch.no_grad():
        model.embedding.weight[257:] = 100.0 * model.norm.weight  # would win every argmax
    tokens = random_tokens(model, 4, 8)
    assert model(tokens).shape == (4, 8, 257)
    out = model.generate(tokens, 50, temperature=5.0, generator=torch.Generator().manual_seed(0))
    assert out.max() < 257
    with pytest.raises(ValueError, match=r"token id 257 .* \(0 to 256\)"):
        model(torch.tensor([[1, 257]]))
    with pytest.raises(ValueError, match="token id -1"):
        model(torch.tensor([[-1, 3]]))
    for vocab_size, rows in ((50257, 50304), (64, 64)):
        with torch.device("meta"):
            assert len(GPT(GPTConfig(vocab_size=vocab_size, n_layer=1)).embedding.weight) == rows


def test_tied_output_and_initialisation():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, n_layer=8, n_head=4, train_length=64, pos={"name": "learned"}))
    assert not any("head" in name for name in model.state_dict())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(16) if residual else 0.02, rel=0.05), name


def test_parameter_count_is_gpt2_smalls():
    config = GPTConfig(vocab_size=50257, train_length=1024, pos={"name": "learned"})
    with torch.device("meta"):
        model = GPT(config)
    # 124,439,808 is GPT-2 small's published count; our vocabulary has 47 padding rows of 768
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 + 47 * 768


@pytest.mark.parametrize("n_kv_head", [2, 1])
def test_flops_are_those_torch_counts(n_kv_head):
    model = small_model({"name": "none"}, torch.float32, vocab_size=64, n_head=2, n_kv_head=n_kv_head)
    tokens = random_tokens(model, 2, 48)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens)
    assert model.flops_per_token(48) * tokens.numel() == counter.get_total_flops()


def test_decay_reaches_matrices_only():
    model = small_model({"name": "learned"})
    decayed, kept = model.optimizer_groups(0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {names[id(p)] for p in decayed["params"]} == {
        name for name in names.values() if name.endswith("weight") and "norm" not in name
    }
    assert "pos.table" in {names[id(p)] for p in kept["params"]}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_dropout_acts_in_training_only():
    model = small_model({"name": "rope"}, dropout=0.3)
    tokens = random_tokens(model, 1, 16)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 100}, r"model\.width=100.*n_head · head_dim = 128"),
        ({"head_dim": 63}, r"model\.head_dim=63.*even"),
        ({"n_kv_head": 3}, r"model\.n_kv_head=3.*divide"),
        ({"n_layer": 0}, r"model\.n_layer=0"),
        ({"n_layer": 2.0}, r"model\.n_layer=2\.0"),
        ({"n_head": True}, r"model\.n_head=True"),
        ({"vocab_size": None}, r"model\.vocab_size=None"),
        ({"train_length": -1}, r"model\.train_length=-1"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0"),
        ({"dropout": float("nan")}, r"model\.dropout=nan"),
        ({"bias": 1}, r"model\.bias=1"),
        ({"heads": 2}, r"model\.heads: no such setting; known are vocab_size"),
    ],
    ids=str,
)
def test_config_refuses(change, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig.from_dict({**CONFIG, **change})


def test_forward_refuses_shapes():
    model = small_model({"name": "rope"})
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        model(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least 1"):
        model(torch.zeros((2, 0), dtype=torch.int64))
    with pytest.raises(ValueError, match="at least 1"):
        model(torch.zeros((0, 2), dtype=torch.int64))
    cache = model.new_cache(1, 8)
    with pytest.raises(ValueError, match="token id 61"):
        model(torch.zeros((1, 2), dtype=torch.int64), targets=torch.tensor([[1, 61]]), cache=cache)
    assert cache.length == 0
    tokens = random_tokens(model, 1, 9)
    wide, narrow = (model(x[:, :-1], targets=x[:, 1:]) for x in (tokens, tokens.int()))
    assert torch.equal(wide, narrow)
    with pytest.raises(ValueError, match="integers"):
        model(torch.zeros((2, 3)))
    with pytest.raises(ValueError, match="shape of tokens"):
        model(torch.zeros((2, 3), dtype=torch.int64), targets=torch.zeros((2, 4), dtype=torch.int64))


@pytest.mark.parametrize("attention", ["softmax", pytest.param("linear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pos", DEFAULT_SCHEMES, ids=scheme_id)
def test_compiled_model_is_the_model_in_one_graph(pos, attention):
    if attention == "linear" and SCHEMES[pos["name"]].biased:
        return  # refused, see test_attention
    model = small_model(pos, torch.float32, attention=attention).train()
    tokens = random_tokens(model, 2, 33)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    torch.compiler.reset()  # another model of the same code would count as one more recompilation
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    losses = []
    for forward in (model, compiled):
        model.zero_grad()
        nll = forward(inputs, targets=targets)
        nll.mean().backward()
        losses.append((nll.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(losses[1], losses[0])
    assert sum(len(graph.graph.nodes) > 10 for graph in graphs) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("pos", DEFAULT_SCHEMES, ids=scheme_id)
def test_compiled_training_is_float64s(pos):
    """What the compiler makes of the model, not only what it is given: losses and gradients, in float32."""
    exact = small_model(pos, n_layer=1, train_length=64).train()
    compiled = small_model(pos, torch.float32, n_layer=1, train_length=64).train()
    tokens = random_tokens(exact, 2, 65)
    expected = exact(tokens[:, :-1], targets=tokens[:, 1:])
    expected.square().mean().backward()
    torch.compiler.reset()
    found = torch.compile(compiled)(tokens[:, :-1], targets=tokens[:, 1:])
    found.square().mean().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    for (name, mine), theirs in zip(compiled.named_parameters(), exact.parameters(), strict=True):
        assert (mine.grad.double() - theirs.grad).norm() < 2e-4 * theirs.grad.norm() + 1e-7, name
