"""What layers see: windows, layers without positions, query scales, sinks; against others and by hand."""

import math

import pytest
import torch

from model import GPTConfig
from model.scaling import SCALINGS
from tests.helpers import ALL_SCHEMES, DEFAULT_SCHEMES, cached_logits, random_tokens, scheme_id, small_model

RECIPES = [
    {"layers": ["full", "nope"]},
    {"layers": ["window", "nope"], "window": 5},
    {"layers": ["window"], "window": 1},
    {"query_scale": "log"},
    {"query_scale": "log_nope", "layers": ["full", "nope"]},
    {"query_scale": "ssmax", "layers": ["full", "window"], "window": 7},
    {"sinks": True},
    {"sinks": True, "layers": ["window", "nope"], "window": 20, "query_scale": "ssmax"},
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(map(str, r.values())))
every_scheme = pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)


@every_recipe
@pytest.mark.parametrize("pos", DEFAULT_SCHEMES, ids=scheme_id)
def test_cached_pass_equals_the_full_pass(pos, recipe):
    model = small_model(pos, n_kv_head=2, **recipe)
    tokens = random_tokens(model, 2, model.pos.max_length or 67)
    full = model(tokens).detach()
    torch.testing.assert_close(cached_logits(model, tokens, [9, 1, 14]), full, rtol=0, atol=1e-9)


@every_recipe
@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "longrope"])
def test_cached_steps_are_exact_under_scalings(name, recipe):
    model = small_model({"name": "rope"}, scaling={"name": name, "factor": 2.0}, train_length=16, **recipe)
    tokens = random_tokens(model, 1, 37)
    cache = model.new_cache(1, 37)
    for part in tokens.split([5, 15, *[1] * 17], dim=1):
        step = model(part, cache=cache)
        full = model(tokens[:, : cache.length]).detach()
        torch.testing.assert_close(step, full[:, -part.shape[1] :], rtol=0, atol=1e-9)


@every_recipe
@every_scheme
def test_no_later_token_is_seen_and_every_parameter_gets_a_gradient(pos, recipe):
    model = small_model(pos, **recipe).train()
    tokens = random_tokens(model, 1, 30)
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 7) % 61
    torch.testing.assert_close(model(changed)[:, :15], model(tokens)[:, :15], rtol=0, atol=1e-12)
    model(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
    for name, parameter in model.named_parameters():
        if set(recipe.get("layers", [])) != {"window"} and not name.startswith("pos."):
            assert parameter.grad.abs().sum() > 0, name


@every_recipe
def test_other_weights_are_those_of_a_model_without(recipe):
    def state(**settings):
        torch.manual_seed(3)
        from model import GPT

        return GPT(GPTConfig(vocab_size=61, n_layer=2, n_head=4, head_dim=16, **settings)).state_dict()

    plain, given = state(), state(**recipe)
    assert {name.rsplit(".", 1)[1] for name in set(given) - set(plain)} <= {"ssmax", "sinks"}
    assert all(torch.equal(given[name], plain[name]) for name in plain)


def attention_by_hand(model, layer, x, log_scale=lambda p: 1.0, window=10**9, rotate=True):
    """A layer's attention, a query and a key at a time, from the definitions of windows, scales and sinks."""
    block, c = model.blocks[layer].attention, model.config
    T, d = x.shape[1], c.head_dim
    q, k, v = (part.view(T, -1, d).transpose(0, 1) for part in block.qkv(x)[0].split(c.width, dim=-1))
    if rotate:
        turn = model.pos.rotation(torch.arange(T), T)
        q, k = turn(q), turn(k)
    out = torch.zeros(T, c.n_head, d, dtype=x.dtype)
    for h in range(c.n_head):
        for i in range(T):
            seen = [j for j in range(i + 1) if i - j < window]
            scale = block.ssmax[h].item() * math.log(len(seen)) if c.query_scale == "ssmax" else log_scale(i)
            scores = [math.exp(scale * (q[h, i] @ k[h, j]).item() / math.sqrt(d)) for j in seen]
            total = sum(scores) + (math.exp(block.sinks[h].item()) if c.sinks else 0)
            out[i, h] = sum(score / total * v[h, j] for score, j in zip(scores, seen, strict=True))
    return block.out(out.view(1, T, -1))


def test_ssmax_counts_keys_wherever_positions_begin():
    model = small_model({"name": "none"}, query_scale="ssmax")
    tokens = random_tokens(model, 1, 20)
    torch.testing.assert_close(model(tokens, positions=100 + torch.arange(20)), model(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("recipe", "by_hand"),
    [
        ({"layers": ["window"], "window": 4}, {"window": 4}),
        ({"layers": ["nope"]}, {"rotate": False}),
        ({"query_scale": "log"}, {"log_scale": lambda p: 1 + 0.1 * math.log(1 + math.floor((p + 1) / 8))}),
        ({"query_scale": "ssmax"}, {}),
        ({"query_scale": "ssmax", "layers": ["window"], "window": 4}, {"window": 4}),
        ({"sinks": True}, {}),
    ],
    ids=str,
)
def test_attention_is_its_definition(recipe, by_hand):
    model, seen = small_model({"name": "rope"}, train_length=8, **recipe), []
    x = torch.randn(1, 20, 64, dtype=torch.float64)
    block = model.blocks[0].attention
    block.out.register_forward_hook(lambda module, inputs, output: seen.append(output))
    block.register_forward_pre_hook(lambda module, inputs: (x, *inputs[1:]))
    with torch.no_grad():
        model(random_tokens(model, 1, 20))
        expected = attention_by_hand(model, 0, x, **by_hand)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-6)  # the log scale is float32


def hf_attention(module, config, ours, x, **arguments):
    """An attention module of transformers with our projections, on rows x (B, T, D): its output (B, T, D)."""
    D, kv = ours.out.weight.shape[0], ours.n_kv_head * ours.head_dim
    q, k, v = ours.qkv.weight.split((D, kv, kv))
    attention = module(config, layer_idx=0).double().eval()
    state = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": ours.out.weight}
    if ours.sinks is not None:
        state |= {"sinks": ours.sinks} | {
            f"{name}_proj.bias": torch.zeros(n) for name, n in zip("qkvo", (D, kv, kv, D), strict=True)
        }
    attention.load_state_dict({**attention.state_dict(), **state})
    return attention(x, **arguments)[0]


def rows_and_attention(**recipe):
    model = small_model({"name": "rope"}, n_kv_head=2, bias=False, train_length=8, **recipe)
    x, seen = torch.randn(2, 30, 64, dtype=torch.float64), []
    ours = model.blocks[0].attention
    ours.register_forward_hook(lambda module, inputs, output: seen.append(output))
    ours.register_forward_pre_hook(lambda module, inputs: (x, *inputs[1:]))
    model(random_tokens(model, 2, 30))
    angles = torch.arange(30)[:, None] * 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    return ours, x, seen[0], angles


SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "attention_bias": False,
    "attn_implementation": "eager",
}


def causal(window=10**9):
    distance = torch.arange(30)[:, None] - torch.arange(30)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(30, 30, dtype=torch.float64).masked_fill(hidden, -math.inf)[None, None]


@pytest.mark.parametrize("nope", [False, True])
def test_smollm3s_layers(nope):
    """Every fourth layer of SmolLM3 has no rotation."""
    modeling = pytest.importorskip("transformers.models.smollm3.modeling_smollm3", reason="the reference is missing")
    config = modeling.SmolLM3Config(**SHAPE, no_rope_layers=[int(not nope)], vocab_size=64, pad_token_id=0)
    ours, x, expected, angles = rows_and_attention(layers=["nope" if nope else "full"])
    turned = torch.cat((angles, angles), dim=-1)[None]
    found = hf_attention(
        modeling.SmolLM3Attention, config, ours, x, position_embeddings=(turned.cos(), turned.sin()),
        attention_mask=causal(),
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # their softmax is float32


@pytest.mark.parametrize("window", [4, 12])
def test_a_window_is_that_of_transformers_masks(window):
    """The mask that transformers makes for sliding_window (Gemma 3, Cohere 2 and others)."""
    masking = pytest.importorskip("transformers.masking_utils", reason="the reference is missing")
    seen = masking.sliding_window_overlay(window)
    distance = [[bool(seen(0, 0, q, k)) and k <= q for k in range(30)] for q in range(30)]
    assert torch.equal(torch.tensor(distance), causal(window)[0, 0] == 0)


@pytest.mark.parametrize("recipe", [{}, {"layers": ["window"], "window": 6}], ids=str)
def test_gpt_oss_sinks(recipe):
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason="the reference is missing")
    config = modeling.GptOssConfig(**{**SHAPE, "attention_bias": True}, vocab_size=64, layer_types=["full_attention"])
    ours, x, expected, angles = rows_and_attention(sinks=True, **recipe)
    found = hf_attention(
        modeling.GptOssAttention, config, ours, x, position_embeddings=(angles.cos()[None], angles.sin()[None]),
        attention_mask=causal(recipe.get("window", 10**9)),
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_llama4s_temperature():
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4", reason="the reference is missing")
    config = modeling.Llama4TextConfig(
        **SHAPE, vocab_size=64, no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=8, attn_scale=0.1,
        use_qk_norm=False,
    )  # fmt: skip
    ours, x, expected, _ = rows_and_attention(layers=["nope"], query_scale="log_nope")
    arguments = {"position_embeddings": None, "attention_mask": causal(), "position_ids": torch.arange(30)[None]}
    found = hf_attention(modeling.Llama4TextAttention, config, ours, x, **arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_p_rope_is_transformers_proportional_frequencies():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    config = LlamaConfig(head_dim=64, hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config, "cpu")
    ours, _ = small_model({"name": "rope", "turning": 0.75}, head_dim=64).pos.frequencies(10)
    torch.testing.assert_close(ours.float(), theirs)
    assert (ours == 0).sum() == 8


@pytest.mark.parametrize("pos", ["kerple", "fire"])
def test_biases_are_their_published_formulas(pos):
    scheme = small_model({"name": pos}, train_length=16).pos
    bias = scheme.bias(torch.zeros(1, 4, 40, 16), torch.arange(40), torch.arange(40))
    for h in range(4):
        for i, j in ((0, 0), (3, 1), (20, 0), (39, 38), (39, 0)):
            if pos == "kerple":
                expected = -scheme.strength[h] * torch.log(1 + scheme.rate[h] * (i - j))
            else:
                c, longest = abs(scheme.rate), max(i, abs(scheme.threshold).item() * 16)
                relative = torch.log(c * (i - j) + 1) / torch.log(c * longest + 1)
                units = (scheme.hidden.weight[:, 0] * relative + scheme.hidden.bias).tolist()
                out = zip(scheme.out.weight[h].tolist(), units, strict=True)
                expected = scheme.out.bias[h] + sum(weight * max(0.0, unit) for weight, unit in out)
            assert bias[h, i, j].item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_number_of_kerple_that_falls_below_its_least_can_grow_again():
    scheme = small_model({"name": "kerple"}).pos
    with torch.no_grad():
        scheme.strength[0] = scheme.rate[1] = -0.1
    scheme.constrain()
    assert (scheme.strength[0].item(), scheme.rate[1].item()) == (0.01, 0.01)
    scheme.by_distance(torch.arange(9)).sum().backward()
    assert (scheme.strength.grad < 0).all()
    assert (scheme.rate.grad < 0).all()


def test_a_learned_table_ends_in_patterns_too():
    model = small_model({"name": "learned"}, layers=["window", "nope"], window=4)
    with pytest.raises(ValueError, match="past the learned table"):
        model(random_tokens(model, 1, 33))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": []}, r"model\.layers=\[\]: must be a list of full, window, nope"),
        ({"layers": ["global"]}, r"model\.layers=\['global'\]"),
        ({"layers": "full"}, r"model\.layers='full'"),
        ({"layers": ["full", "full", "nope"]}, r"model\.layers=.*: has 3 entries for model\.n_layer=2"),
        ({"layers": ["window"]}, r"window layers need model\.window"),
        ({"window": 4}, r"window layers need model\.window"),
        ({"layers": ["window"], "window": 0}, r"model\.window=0"),
        ({"query_scale": "sqrt"}, r"model\.query_scale='sqrt': known are None, log"),
        ({"query_scale": "log_nope"}, "needs nope in model.layers"),
        ({"sinks": 1}, r"model\.sinks=1"),
        ({"sinks": True, "attention": "linear"}, r"model\.attention=linear: has no softmax"),
        ({"pos": {"name": "rope", "turning": 0.0}}, r"pos\.turning=0\.0"),
        ({"pos": {"name": "rope", "turning": 0.01}}, r"pos\.turning=0\.01: turns 0 of 8 planes"),
    ],
    ids=str,
)
def test_refusals(settings, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(vocab_size=61, n_layer=2, n_head=2, head_dim=16, **settings)


@every_recipe
def test_recipes_are_refused_where_they_cannot_be_exported(recipe):
    pytest.importorskip("transformers", reason="the export needs it")
    from model.hf_weights import to_transformers

    with pytest.raises(ValueError, match=r"model\.(layers|query_scale|sinks)=.* do not have it"):
        to_transformers(small_model({"name": "rope"}, torch.float32, **recipe))
