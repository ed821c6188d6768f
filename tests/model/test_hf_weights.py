"""GPT as a model of transformers and back: logits and greedy tokens, against transformers' own networks."""

import inspect

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.activations import ACT2FN

from model import GPT
from model.hf import compare_logits
from model.hf_weights import KINDS, TANH_GELUS, from_transformers, to_transformers
from model.hf_weights import SCALINGS as EXPORTED_SCALINGS
from model.scaling import SCALINGS
from tests.helpers import ALL_SCHEMES, random_tokens, scheme_id, small_model

EXPORTED = {"learned": "gpt2", "rope": "starcoder2", "none": "gpt_neox"}
T = 32  # small_model's training length


def small(pos: dict, **settings) -> GPT:
    return small_model(pos, torch.float32, **settings)


@torch.inference_mode()
def difference(ours: GPT, theirs, length: int) -> float:
    """Of the logits of three sequences."""
    tokens = random_tokens(ours, 3, length)
    return (ours(tokens) - theirs(tokens).logits).abs().max().item()


def check_equal(ours: GPT, theirs) -> None:
    """Logits within and past the training length, and greedy tokens by the settings that generate() has by itself."""
    limit = ours.pos.max_length or 4 * T
    assert difference(ours, theirs, T // 2) < 1e-5
    assert difference(ours, theirs, limit) < 1e-5
    prompts = random_tokens(ours, 2, 9)
    expected = ours.generate(prompts, limit - 9)
    assert torch.equal(theirs.generate(prompts, max_new_tokens=limit - 9, do_sample=False), expected)


def scaling_settings(name: str, planes: int, factor: float | None = 4.0) -> dict:
    """A registered scaling with its defaults, and lists of rising divisors where it wants one number per plane."""
    lists, parameters = {}, inspect.signature(SCALINGS[name]).parameters.values()
    for number, p in enumerate(p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty):
        lists[p.name] = [1.0 + number * plane / 2 for plane in range(planes)]
    return {"name": name, "factor": factor, **lists}


# ---- out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pos", ALL_SCHEMES, ids=scheme_id)
def test_every_scheme_is_exported_exactly_or_refused_with_a_reason(pos):
    for settings in ({}, {"n_kv_head": 2}, {"n_kv_head": 1, "bias": False}):
        ours = small(pos, **settings)
        if pos["name"] in EXPORTED:
            theirs = to_transformers(ours)
            partial = ours.config.pos.get("rotary_fraction", 1.0) < 1
            assert theirs.config.model_type == ("gpt_neox" if partial else EXPORTED[pos["name"]])
            check_equal(ours, theirs)
            back = from_transformers(theirs).config
            layout = {"layout": "half"} if pos["name"] == "rope" else {}
            assert (back.pos, back.bias) == ({**ours.config.pos, **layout}, ours.config.bias)
        else:
            with pytest.raises(ValueError, match=rf"^pos={pos['name']}: has no exact equal to export to; .+"):
                to_transformers(ours)


@pytest.mark.parametrize("rotary_fraction", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_is_exported_exactly_or_refused_with_a_reason(name, rotary_fraction):
    pos = {"name": "rope", "layout": "interleaved", "rotary_fraction": rotary_fraction, "base": 500.0}
    planes = int(8 * rotary_fraction)
    exported = {*EXPORTED_SCALINGS, "ntk"}
    ours = small(pos, n_kv_head=2, scaling=scaling_settings(name, planes), original_length=20)
    if name in exported:
        check_equal(ours, to_transformers(ours))
    else:
        with pytest.raises(ValueError, match=f"^scaling={name}"):
            to_transformers(ours)
    ours = small(pos, n_kv_head=2, scaling=scaling_settings(name, planes, factor=None))
    if name == "dynamic":
        check_equal(ours, to_transformers(ours))
    else:
        with pytest.raises(ValueError, match=rf"^scaling={name}, scaling.factor=None: .* a fixed factor$"):
            to_transformers(ours)


def test_frequencies_that_are_not_ours_are_noticed():
    # In windows so short no plane turns once, and YaRN's ramp ends before it begins: ours is a step there.
    ours = small({"name": "rope", "base": 500.0}, train_length=2, scaling={"name": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match=r"the logits differ by at most .*not written"):
        compare_logits(ours, to_transformers(ours), 4)


def test_linear_attention_is_refused():
    with pytest.raises(ValueError, match=r"^model.attention=linear: "):
        to_transformers(small({"name": "none"}, attention="linear"))


def test_the_vocabulary_s_padding_is_left_behind_and_the_end_of_a_document_known():
    ours = small({"name": "learned"}, dropout=0.1)
    theirs = to_transformers(ours, end_of_document=60)
    assert theirs.get_input_embeddings().weight.shape == (61, 64)
    assert (theirs.config.eos_token_id, theirs.generation_config.eos_token_id) == (60, 60)
    assert not theirs.training
    assert theirs.config.attn_pdrop == theirs.config.resid_pdrop == theirs.config.embd_pdrop == 0.1
    assert to_transformers(ours).config.eos_token_id is None  # not GPT-2's own, which is no id here


@pytest.mark.parametrize(("head_dim", "width"), [(6, 2), (6, 4), (14, 12), (98, 48), (44, 30), (46, 26)])
def test_a_part_of_any_head_turns(head_dim, width):
    """Of the last two heads the part, times the head, is a little less than the width in floating point."""
    assert (int(head_dim * (width / head_dim)) < width) == (head_dim in (44, 46))
    pos = {"name": "rope", "rotary_fraction": width / head_dim}
    ours = small(pos, head_dim=head_dim, n_layer=1, n_head=1)
    theirs = to_transformers(ours)
    assert difference(ours, theirs, T) < 1e-5
    assert from_transformers(theirs).config.pos == ours.config.pos


# ---- in -------------------------------------------------------------------------------------------------------------


def theirs_of(kind: str, **settings):
    """A random model of transformers, every weight of it set to something that matters."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": T}
    shape |= {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}
    if kind != "gpt2":
        shape |= {"intermediate_size": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
        shape |= {"num_key_value_heads": 2} if kind == "starcoder2" else {"use_parallel_residual": False}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **shape | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def rope(rope_type: str, original: int | None = None, **parameters) -> dict:
    parameters |= {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_parameters": {"rope_theta": 500.0, "rope_type": rope_type, **parameters}}


FITTING = [
    ("gpt2", {}),
    ("gpt2", {"hidden_size": 48, "num_attention_heads": 2, "activation_function": "gelu_pytorch_tanh"}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, "num_key_value_heads": 4}),
    ("starcoder2", {"num_key_value_heads": 1, **rope("linear", factor=4.0)}),
    ("starcoder2", rope("dynamic", factor=2.0)),
    ("starcoder2", rope("yarn", 16, factor=4.0)),
    ("starcoder2", rope("yarn", T, factor=4.0, attention_factor=0.7)),
    ("starcoder2", rope("llama3", 16, factor=8.0, low_freq_factor=0.5, high_freq_factor=2.0)),
    ("starcoder2", rope("longrope", 16, short_factor=[1.0] * 8, long_factor=[2.0] * 8)),
    ("gpt_neox", {}),  # a quarter of each head
    ("gpt_neox", {"attention_bias": False, **rope("default", partial_rotary_factor=0.5)}),
    ("gpt_neox", rope("yarn", 16, factor=2.0, partial_rotary_factor=1.0)),
    ("gpt_neox", rope("default", partial_rotary_factor=0.0)),
]


@pytest.mark.parametrize(("kind", "settings"), FITTING)
def test_what_fits_has_the_same_logits(kind, settings):
    theirs = theirs_of(kind, **settings)
    ours = from_transformers(theirs)
    assert ours.config.train_length == T
    assert ours.embedding.weight[61:].eq(0).all()
    assert not ours.training
    for length in (T // 2, ours.pos.max_length or 3 * T):
        assert difference(ours, theirs, length) < 1e-5
    again = from_transformers(to_transformers(ours))
    assert again.config == ours.config
    assert difference(again, theirs, T // 2) < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "starcoder2", "gpt_neox"])
def test_bfloat16_weights_become_float32(kind):
    theirs, same = theirs_of(kind).to(torch.bfloat16), theirs_of(kind)
    same.load_state_dict(theirs.state_dict())  # the same weights in float32, beside frequencies that were not rounded
    ours = from_transformers(theirs)
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {torch.float32}
    assert difference(ours, same, T // 2) < 1e-5


REFUSED_HERE = [
    ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu': ours has gelu_pytorch_tanh or"),
    ("gpt2", {"n_inner": 100}, "n_inner=100: ours has 256 or None"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06: ours has 1e-05"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt_neox", {"use_parallel_residual": True}, "use_parallel_residual=True: ours has False"),
    ("gpt_neox", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ("starcoder2", {"intermediate_size": 128}, "intermediate_size=128: ours has 256 or None"),
    ("starcoder2", {"head_dim": 32}, "head_dim=32: ours has 16"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED_HERE)
def test_what_does_not_fit_is_refused_by_name(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        from_transformers(theirs_of(kind, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        rope("yarn", T, factor=4.0, truncate=False),
        rope("longrope", 16, short_factor=[1.0] * 8, long_factor=[2.0] * 8, attention_factor=1.3, factor=2.0),
    ],
)
def test_frequencies_that_ours_has_not_are_noticed(settings):
    theirs = theirs_of("starcoder2", **settings)
    with pytest.raises(ValueError, match=r"the logits differ by at most .*not written"):
        compare_logits(from_transformers(theirs), theirs, T)


def test_another_architecture_is_refused_by_name():
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, **shape))
    with pytest.raises(ValueError, match=f"^model_type=llama: other blocks than ours; known are {', '.join(KINDS)}"):
        from_transformers(llama)


def test_a_sliding_window_becomes_the_training_length():
    theirs = theirs_of("starcoder2", sliding_window=24)
    ours = from_transformers(theirs)
    assert ours.config.train_length == 24
    assert difference(ours, theirs, 24) < 1e-5
    assert difference(ours, theirs, 32) > 1e-3


def test_the_activations_that_are_accepted_are_ours():
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    for name in TANH_GELUS:
        assert (ACT2FN[name](x) - F.gelu(x, approximate="tanh")).abs().max() < 1e-6, name
    assert (ACT2FN["gelu"](x) - F.gelu(x, approximate="tanh")).abs().max() > 1e-4
