"""Each scheme against its paper's formula, another library, or numbers worked out by hand."""

import math

import pytest
import torch

from model.positions import SCHEMES, ALiBi
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model


def alibi(n_head):
    return small_model({"name": "alibi"}, n_head=n_head, head_dim=4).pos


@pytest.mark.parametrize(
    ("n_head", "exponents"),
    [
        (4, [2, 4, 6, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (16, [0.5 * i for i in range(1, 17)]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),  # the 8-head slopes, then every other 16-head slope
        (6, [2, 4, 6, 8, 1, 3]),
        (1, [8]),
    ],
)
def test_alibi_slopes(n_head, exponents):
    assert alibi(n_head).slopes().tolist() == pytest.approx([2**-exponent for exponent in exponents], rel=1e-6)


def test_alibi_bias_is_slope_times_distance():
    bias = alibi(4).bias(torch.zeros(1, 4, 5, 4), torch.arange(3, 8), torch.arange(8))
    for h, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256)):
        for i, query in enumerate(range(3, 8)):
            for key in range(query + 1):
                assert bias[h, i, key].item() == pytest.approx(-slope * (query - key), abs=1e-7)


def test_alibi_slopes_do_not_follow_the_models_dtype():
    model = small_model({"name": "alibi"}, torch.float32, n_head=12, head_dim=4)
    assert torch.equal(model.bfloat16().pos.slopes(), ALiBi(model.config).slopes())


def test_t5_buckets_for_every_distance():
    def bucket(distance):  # causal: 16 exact ones, then 16 that widen to 128
        if distance < 16:
            return distance
        return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))

    pos = small_model({"name": "t5"}).pos
    assert pos.bucket(torch.arange(201)).tolist() == [bucket(distance) for distance in range(201)]
    assert pos.bucket(torch.tensor([10**6])).item() == 31


def test_t5_buckets_are_transformers():
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5", reason="the reference is not installed")
    distances = torch.arange(1000)
    theirs = modeling.T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=32, max_distance=128
    )
    assert torch.equal(small_model({"name": "t5"}).pos.bucket(distances), theirs)


def test_t5_bias_reads_one_table():
    pos = small_model({"name": "t5"}).pos
    bias = pos.bias(torch.zeros(1, 4, 186, 16), torch.arange(5, 191), torch.arange(191))
    for h in range(4):
        assert bias[h, 0, 2].item() == pytest.approx(pos.table[3, h].item())
        assert bias[h, 185, 0].item() == pytest.approx(pos.table[31, h].item())
        assert bias[h, 185, 190].item() == pytest.approx(pos.table[0, h].item())


def test_t5s_table_gets_its_gradient_in_float32():
    """The scores are bfloat16; 1,024 of them a distance would lose the sum if they were added in that."""
    exact = small_model({"name": "t5"}, train_length=1024).train()
    rounded = small_model({"name": "t5"}, torch.float32, train_length=1024).train()
    tokens = random_tokens(exact, 2, 1025)
    exact(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        losses = rounded(tokens[:, :-1], targets=tokens[:, 1:])
    losses.mean().backward()
    mine, theirs = rounded.pos.table.grad.double(), exact.pos.table.grad
    assert (mine - theirs).norm() < 0.015 * theirs.norm()


def test_sinusoids_are_the_published_formula():
    model = small_model({"name": "sinusoidal"})
    D, rows = model.config.width, torch.randn(1, 3, 64).double()
    moved = model.pos.embed(rows, torch.tensor([0, 7, 5000]))
    for t, position in enumerate((0, 7, 5000)):
        for i in range(D):
            angle = position / 10000 ** (2 * (i // 2) / D)
            expected = rows[0, t, i] * math.sqrt(D) + (math.cos(angle) if i % 2 else math.sin(angle))
            assert moved[0, t, i].item() == pytest.approx(expected.item(), abs=1e-9)


def attention_by_hand(model, x, score_extra, value_extra):
    """The first layer's attention, a query and a key at a time, with what a scheme adds to scores and values."""
    block, c = model.blocks[0].attention, model.config
    T, d = x.shape[1], c.head_dim
    q, k, v = (part.view(T, -1, d) for part in block.qkv(x)[0].split((c.width, c.width, c.width), dim=-1))
    out = torch.zeros(T, c.n_head, d, dtype=x.dtype)
    for h in range(c.n_head):
        for i in range(T):
            scores = [(q[i, h] @ k[j, h] + score_extra(q[i, h], i, j, h)).item() / math.sqrt(d) for j in range(i + 1)]
            total = sum(math.exp(score) for score in scores)
            for j in range(i + 1):
                out[i, h] += math.exp(scores[j]) / total * (v[j, h] + value_extra(i, j))
    return block.out(out.view(1, T, -1))


def by_hand(model, x):
    """x (1, T, D) through the first attention layer, by the definition of the model's scheme."""
    pos, d = model.pos, model.config.head_dim
    extras = {
        "none": (lambda q, i, j, h: 0.0, lambda i, j: 0.0),
        "alibi": (lambda q, i, j, h: -pos.slopes()[h].double() * (i - j) * math.sqrt(d), lambda i, j: 0.0),
        "t5": (lambda q, i, j, h: pos.table[pos.bucket(torch.tensor(i - j)), h] * math.sqrt(d), lambda i, j: 0.0),
        "shaw": (
            lambda q, i, j, h: q @ pos.key_table[min(i - j, pos.max_distance)],
            lambda i, j: pos.value_table[min(i - j, pos.max_distance)],
        ),
    }
    return attention_by_hand(model, x, *extras[model.config.pos["name"]])


@pytest.mark.parametrize("pos", [p for p in ALL_SCHEMES if p["name"] in ("none", "alibi", "t5", "shaw")], ids=scheme_id)
def test_attention_is_its_definition(pos):
    model = small_model(pos)
    x = torch.randn(1, 9, 64, dtype=torch.float64)
    block = model.blocks[0].attention
    seen = []
    block.out.register_forward_hook(lambda module, inputs, output: seen.append(output))
    block.register_forward_pre_hook(lambda module, inputs: (x, *inputs[1:]))
    with torch.no_grad():
        model(random_tokens(model, 1, 9))
        torch.testing.assert_close(seen[0], by_hand(model, x), rtol=0, atol=1e-6)  # the biases are float32


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_only_distances_count_exactly_where_the_scheme_promises_it(pos):
    """The same text a hundred positions later: unchanged logits for relative schemes, others for absolute ones."""
    model = small_model(pos, train_length=200)
    tokens = random_tokens(model, 1, 30)
    expected = model(tokens)
    embed, rotation = model.pos.embed, model.pos.rotation
    model.pos.embed = lambda rows, positions: embed(rows, positions + 100)
    model.pos.rotation = lambda positions, length: rotation(positions + 100, length)
    if model.pos.biased:
        bias = model.pos.bias
        model.pos.bias = lambda q, at, keys: bias(q, at + 100, torch.arange(len(keys) + 100))[..., 100:]
    if model.pos.weighs_values:
        values = model.pos.values
        pad = (100, 0)
        model.pos.values = lambda w, at, keys: values(torch.nn.functional.pad(w, pad), at + 100, keys)
    difference = (model(tokens) - expected).abs().max()
    if pos["name"] in ("learned", "sinusoidal"):
        assert difference > 0.01
    else:
        assert difference < 1e-6


def test_the_registry_is_the_published_list():
    assert {"learned", "rope", "sinusoidal", "none", "alibi", "t5", "shaw"} <= set(SCHEMES)


@pytest.mark.parametrize(
    ("pos", "words"),
    [
        ({"name": "t5", "buckets": 1}, r"pos\.buckets=1"),
        ({"name": "t5", "max_distance": 16}, r"pos\.max_distance=16"),
        ({"name": "shaw", "max_distance": 0}, r"pos\.max_distance=0"),
        ({"name": "shaw", "max_distance": 2.5}, r"pos\.max_distance=2\.5"),
    ],
    ids=str,
)
def test_schemes_refuse_their_own_keys(pos, words):
    with pytest.raises(ValueError, match=words):
        small_model(pos)


def renamed(state, names, layers):
    """Our tensors under another library's names."""
    out = {}
    for ours, theirs in names.items():
        for layer in range(layers if "{}" in ours else 1):
            for kind in ("weight", "bias"):
                if (name := f"{ours.format(layer)}.{kind}") in state:
                    out[f"{theirs.format(layer)}.{kind}"] = state[name]
    return out


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"name": "linear", "factor": 4.0},
        {"name": "yarn", "factor": 4.0},
        {"name": "llama3", "factor": 4.0},
        {"name": "dynamic", "factor": 2.0},
    ],
    ids=str,
)
def test_rope_model_is_starcoder2(scaling, n_kv_head):
    """LayerNorm, biased tanh-GELU MLP, grouped heads, half-split RoPE: our architecture in transformers."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    ours = small_model({"name": "rope"}, vocab_size=64, n_kv_head=n_kv_head, scaling=scaling)
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    if scaling is not None:
        parameters |= {"rope_type": scaling["name"], "factor": scaling["factor"]}
        parameters |= {"original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if scaling["name"] != "llama3":
            del parameters["low_freq_factor"], parameters["high_freq_factor"]
    theirs = transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=n_kv_head,
            max_position_embeddings=32,
            rope_parameters=parameters,
            sliding_window=None,
            tie_word_embeddings=True,
            norm_epsilon=1e-5,
            attn_implementation="eager",
        )
    )
    state = ours.state_dict()
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = state.pop(f"blocks.{layer}.attention.qkv.{kind}").split((64, 16 * n_kv_head, 16 * n_kv_head))
            for name, part in zip("qkv", parts, strict=True):
                state[f"blocks.{layer}.attention.{name}.{kind}"] = part
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "blocks.{}.mlp.up": "model.layers.{}.mlp.c_fc"}
    names |= {f"blocks.{{}}.attention.{x}": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"}
    names |= {"blocks.{}.attention.out": "model.layers.{}.self_attn.o_proj"}
    names |= {"blocks.{}.mlp.down": "model.layers.{}.mlp.c_proj"}
    names |= {"blocks.{}.attention_norm": "model.layers.{}.input_layernorm"}
    names |= {"blocks.{}.mlp_norm": "model.layers.{}.post_attention_layernorm"}
    theirs.load_state_dict({**renamed(state, names, 2), "lm_head.weight": state["embedding.weight"]})
    theirs.double().eval()
    tokens = random_tokens(ours, 2, 100)  # three times the training length
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=2e-4)  # their angles are float32


def test_partial_rope_turns_what_gpt_neox_turns():
    """A head's first quarter, as transformers' GPT-NeoX rotates it."""
    modeling = pytest.importorskip(
        "transformers.models.gpt_neox.modeling_gpt_neox", reason="the reference is not installed"
    )
    model = small_model({"name": "rope", "rotary_fraction": 0.25}, head_dim=64, train_length=64)
    q = torch.randn(2, 4, 50, 64, dtype=torch.float64)
    angles = torch.arange(50)[:, None] * 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1)[None] for f in (torch.cos, torch.sin))
    theirs, _ = modeling.apply_rotary_pos_emb(q, q, cos, sin)
    torch.testing.assert_close(model.pos.rotation(torch.arange(50), 50)(q), theirs, rtol=0, atol=1e-12)
