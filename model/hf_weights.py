"""The same network as a model of Hugging Face's `transformers`, and back: weights rearranged, logits equal.

    learned                      GPT-2
    rope, whole heads            Starcoder2
    rope, a part of each head    GPT-NeoX with sequential residual
    none                         the same, none of a head turning

These three have our blocks exactly: LayerNorm before each part, tanh-GELU, an output tied to the embedding. Where GPT-2
and GPT-NeoX have no grouped heads, key and value heads are repeated; biases that we lack are theirs as zeros. What has
no equal is refused, in both directions. Angles are computed in float32 over there, so rounding grows with the position.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.config import GPTConfig
from model.convert import convert_layout
from model.gpt import GPT
from model.positions import PositionScheme

# Why a scheme cannot be exported, where it is known better than that there is nothing like it.
REFUSED = {
    "alibi": "MPT, whose ALiBi would fit, has GELU where ours has its tanh approximation; BLOOM normalises its "
    "embeddings; Falcon rounds the biases to bfloat16",
    "sinusoidal": "transformers' causal models end their table, or space its frequencies otherwise",
    "t5": "no causal model of transformers with LayerNorm has these biases",
    "shaw": "no causal model of transformers adds vectors to keys and values",
}
OLDEST = (5, 20)  # of transformers: earlier ones read some rotary settings otherwise, dynamic's for one
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
# transformers' name of a scaling's keys; a scaling that is not here it does not know.
SCALING_KEYS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {"factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"},
    "longrope": {"factor": "factor", "short": "short_factor", "long": "long_factor"},
    "llama3": {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor"},
}
# transformers keeps keys that were turned under older frequencies: with a cache these would not be exact.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class Layout:
    """Where an architecture of transformers keeps what. {} is the layer's number, or one of q, k, v."""

    model_type: str
    outside: dict[str, str]  # our module -> theirs
    blocks: str
    block: dict[str, str]
    qkv: str  # fused: all queries, keys, values; by_head: q, k, v of a head, then the next; apart: three modules
    transposed: bool = False  # weights (in, out), GPT-2's Conv1D
    grouped: bool = False  # has n_kv_head

    def modules(self, n_layer: int) -> Iterator[tuple[str, str]]:
        """Our module and theirs, of all that have weights."""
        yield from self.outside.items()
        for layer in range(n_layer):
            for ours, theirs in self.block.items():
                yield f"blocks.{layer}.{ours}", f"{self.blocks.format(layer)}.{theirs}"


LAYOUTS = {
    layout.model_type: layout
    for layout in (
        Layout(
            "gpt2",
            {"embedding": "transformer.wte", "norm": "transformer.ln_f"},
            "transformer.h.{}",
            {"attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
            | {"mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
            qkv="fused",
            transposed=True,
        ),
        Layout(
            "starcoder2",
            {"embedding": "model.embed_tokens", "norm": "model.norm"},
            "model.layers.{}",
            {"attention_norm": "input_layernorm", "attention.qkv": "self_attn.{}_proj"}
            | {"attention.out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm"}
            | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
            qkv="apart",
            grouped=True,
        ),
        Layout(
            "gpt_neox",
            {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm"},
            "gpt_neox.layers.{}",
            {"attention_norm": "input_layernorm", "attention.qkv": "attention.query_key_value"}
            | {"attention.out": "attention.dense", "mlp_norm": "post_attention_layernorm"}
            | {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"},
            qkv="by_head",
        ),
    )
}


def transformers() -> Any:
    """The library, of an optional extra. ValueError, saying how to get it, where it is not installed or too old."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"transformers is not installed ({error}); `pip install -e '.[hf]'` brings it") from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(f"transformers {transformers.__version__} is too old; `pip install -e '.[hf]'` brings another")
    return transformers


# ---- out ------------------------------------------------------------------------------------------------------------


def to_transformers(model: GPT, end_of_document: int | None = None) -> Any:
    """The model as a PreTrainedModel of transformers in evaluation mode, on the CPU, in the dtype it has.

    end_of_document: the id that generate() begins and stops at. Raises ValueError, with the reason, for a scheme, a
    scaling or an attention that has no exact equal there, and where transformers' frequencies are not ours.
    """
    c, library = model.config, transformers()
    if c.attention != "softmax":
        raise ValueError(f"model.attention={c.attention}: no model of transformers has it, only softmax is exported")
    if c.pos["name"] == "rope":
        model = convert_layout(model, "half")
        kind = "starcoder2" if model.pos.rotary_dim == c.head_dim else "gpt_neox"
    elif (kind := {"learned": "gpt2", "none": "gpt_neox"}.get(c.pos["name"])) is None:
        reason = REFUSED.get(c.pos["name"], "no model of transformers is known to have this scheme")
        raise ValueError(f"pos={c.pos['name']}: has no exact equal to export to: {reason}")
    ends = {"bos_token_id": end_of_document, "eos_token_id": end_of_document, "pad_token_id": None}
    common = {"vocab_size": c.vocab_size, "tie_word_embeddings": True, **ends}
    exported = {"gpt2": _gpt2, "starcoder2": _starcoder2, "gpt_neox": _gpt_neox}[kind](library, model, common)
    exported = exported.to(model.embedding.weight.dtype).eval()
    theirs, ours = exported.state_dict(), {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for name, tensor in _their_tensors(LAYOUTS[kind], c, ours):
        if name in theirs:  # ours has every weight of theirs; biases only where theirs has them
            theirs[name].copy_(tensor)
    if kind == "gpt2":
        theirs["transformer.wpe.weight"].copy_(ours["pos.table"])
    else:
        _compare_frequencies(model.pos, exported)
    return exported


def _gpt2(library: Any, model: GPT, common: dict) -> Any:
    c = model.config
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), c.dropout)
    shape = {"n_positions": c.train_length, "n_embd": c.width, "n_layer": c.n_layer, "n_head": c.n_head}
    return library.GPT2LMHeadModel(library.GPT2Config(**common, **shape, **dropout))


def _rotary_settings(model: GPT) -> dict:
    c = model.config
    scaling = c.scaling["name"] if c.scaling else None
    return {
        "hidden_size": c.width,
        "intermediate_size": 4 * c.width,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "hidden_act": "gelu_pytorch_tanh",
        # `dynamic` starts from this one; the others say by themselves what they start from
        "max_position_embeddings": c.original_length if scaling == "dynamic" else c.train_length,
        "rope_parameters": _rope_parameters(model),
        "attention_dropout": c.dropout,
        "use_cache": scaling not in LENGTH_DEPENDENT,
    }


def _starcoder2(library: Any, model: GPT, common: dict) -> Any:
    c = model.config
    others = {"num_key_value_heads": c.n_kv_head, "use_bias": c.bias, "sliding_window": None}
    dropout = {"residual_dropout": c.dropout, "embedding_dropout": c.dropout}
    config = library.Starcoder2Config(**common, **_rotary_settings(model), **others, **dropout)
    return library.Starcoder2ForCausalLM(config)


def _gpt_neox(library: Any, model: GPT, common: dict) -> Any:
    others = {"use_parallel_residual": False, "hidden_dropout": model.config.dropout}
    return library.GPTNeoXForCausalLM(library.GPTNeoXConfig(**common, **_rotary_settings(model), **others))


def _rope_parameters(model: GPT) -> dict:
    c = model.config
    if c.pos["name"] == "none":
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.0}
    width, scaling, base = model.pos.rotary_dim, c.scaling, c.pos["base"]
    fraction = width / c.head_dim
    if int(c.head_dim * fraction) < width:  # they round down
        fraction = math.nextafter(fraction, 1.0)
    partial = {} if width == c.head_dim else {"partial_rotary_factor": fraction}
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base, **partial}
    name, factor = scaling["name"], scaling["factor"]
    if factor is None and name == "dynamic":
        factor = 1.0  # what an open factor is in its formula
    if factor is None:
        raise ValueError(
            f"scaling={name} with scaling.factor=null: follows each sequence's length; transformers has one factor for "
            "all of them, so export a run that was trained with a number"
        )
    if name == "ntk":  # by its definition RoPE with another base
        return {"rope_type": "default", "rope_theta": base * factor ** (width / (width - 2)), **partial}
    if name not in SCALING_KEYS:
        raise ValueError(f"scaling={name}: transformers has none like it; known there are {', '.join(SCALING_KEYS)}")
    keys = {theirs: scaling[ours] for ours, theirs in SCALING_KEYS[name].items()}
    parameters = {"rope_type": name, "rope_theta": base, **partial, **keys, "factor": factor}
    if name not in ("linear", "dynamic"):
        parameters["original_max_position_embeddings"] = c.original_length
    if name in ("yarn", "longrope"):
        parameters["attention_factor"] = model.pos.frequencies(c.original_length)[1]
    return parameters


def _their_tensors(layout: Layout, c: GPTConfig, ours: dict) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all but position tables; biases for every module, zeros where we have none."""
    for module, name in layout.modules(c.n_layer):
        weight = ours[f"{module}.weight"]
        bias = ours.get(f"{module}.bias")
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        for kind, tensor in (("weight", weight), ("bias", bias)):
            if module == "embedding":
                yield f"{name}.weight", tensor[: c.vocab_size]
                break
            parts = [tensor]
            if module.endswith("qkv"):
                parts = _split_heads(layout, c, tensor)
            for letter, part in zip("qkv", parts, strict=False):
                yield f"{name.format(letter)}.{kind}", part.T if layout.transposed and part.ndim == 2 else part


def _split_heads(layout: Layout, c: GPTConfig, tensor: Tensor) -> list[Tensor]:
    """Our qkv, (heads · head_dim, ...), in their order: one tensor, or three where they are apart."""
    q, k, v = tensor.unflatten(0, (-1, c.head_dim)).split((c.n_head, c.n_kv_head, c.n_kv_head))
    if not layout.grouped:
        k, v = (x.repeat_interleave(c.n_head // c.n_kv_head, dim=0) for x in (k, v))
    if layout.qkv == "by_head":
        return [torch.stack((q, k, v), dim=1).flatten(0, 2)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    return flat if layout.qkv == "apart" else [torch.cat(flat)]


# ---- in -------------------------------------------------------------------------------------------------------------


def from_transformers(model: Any) -> tuple[GPT, list[str]]:
    """A model of transformers as a GPT in evaluation mode, float32, and notes on where the two differ.

    GPT-2, Starcoder2, and GPT-NeoX with sequential residual. Raises ValueError, naming it, for whatever does not fit.
    """
    theirs, notes = model.config, check_architecture(model.config)
    if not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight):
        raise ValueError("tie_word_embeddings=False: its output matrix is another than its embedding; ours are one")
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    layout, c = LAYOUTS[theirs.model_type], _our_config(theirs, model, state)
    imported = GPT(c)
    ours = imported.state_dict()
    for name, tensor in _our_tensors(layout, c, state):
        if name in ours:  # not where it has biases of zeros, and ours none
            ours[name].zero_()  # of the embedding, the vocabulary's padding
            ours[name][: len(tensor)].copy_(tensor)
    if theirs.model_type == "gpt2":
        ours["pos.table"].copy_(state["transformer.wpe.weight"])
    else:
        _compare_frequencies(imported.pos, model)
    return imported.eval(), notes


def _require(setting: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{setting}={value!r}: ours has {' or '.join(map(str, allowed))}; this model does not fit")


def check_architecture(theirs: Any) -> list[str]:
    """Raise ValueError for what a configuration of transformers has and ours has not; notes on what fits in part."""
    kind, notes = theirs.model_type, []
    if kind not in LAYOUTS:
        norm = "RMSNorm where ours has LayerNorm; " if hasattr(theirs, "rms_norm_eps") else ""
        raise ValueError(f"model_type={kind}: {norm}known are {', '.join(LAYOUTS)}")
    _require("use_parallel_residual", getattr(theirs, "use_parallel_residual", False), False)
    activation = "activation_function" if kind == "gpt2" else "hidden_act"
    if getattr(theirs, activation) not in TANH_GELUS:
        found = f"{activation}={getattr(theirs, activation)!r}"
        raise ValueError(f"{found}: ours is the tanh approximation of GELU ({', '.join(TANH_GELUS)}); it does not fit")
    epsilon = {"gpt2": "layer_norm_epsilon", "starcoder2": "norm_epsilon", "gpt_neox": "layer_norm_eps"}[kind]
    _require(epsilon, getattr(theirs, epsilon), 1e-5)
    inner = (theirs.n_inner or 4 * theirs.hidden_size) if kind == "gpt2" else theirs.intermediate_size
    _require("n_inner" if kind == "gpt2" else "intermediate_size", inner, 4 * theirs.hidden_size)
    if kind == "gpt2":
        _require("scale_attn_weights", theirs.scale_attn_weights, True)
        _require("scale_attn_by_inverse_layer_idx", theirs.scale_attn_by_inverse_layer_idx, False)
        _require("add_cross_attention", theirs.add_cross_attention, False)
    head_dim = theirs.hidden_size // theirs.num_attention_heads
    _require("head_dim", getattr(theirs, "head_dim", None) or head_dim, head_dim)
    if getattr(theirs, "sliding_window", None) is not None:
        notes.append(
            f"sliding_window={theirs.sliding_window}: there no token sees farther back, here all do; the two are equal "
            "up to that length, which is taken as the training length"
        )
    return notes


def _our_config(theirs: Any, model: Any, state: dict) -> GPTConfig:
    shape = {"vocab_size": theirs.vocab_size, "n_layer": theirs.num_hidden_layers, "n_head": theirs.num_attention_heads}
    shape["head_dim"] = theirs.hidden_size // theirs.num_attention_heads
    shape["n_kv_head"] = getattr(theirs, "num_key_value_heads", None)
    length = min(theirs.max_position_embeddings, getattr(theirs, "sliding_window", None) or math.inf)
    if theirs.model_type == "gpt2":
        return GPTConfig(**shape, train_length=length, pos={"name": "learned"})
    norms = (tensor for name, tensor in state.items() if "norm" in name and name.endswith("bias"))
    linear_bias = getattr(theirs, "use_bias", getattr(theirs, "attention_bias", True))
    # LayerNorms have biases whatever use_bias says, and GPT-NeoX's other linear layers whatever attention_bias says.
    shape["bias"] = linear_bias or theirs.model_type == "gpt_neox" or any(bool(tensor.any()) for tensor in norms)
    parameters = theirs.rope_parameters
    rotary = model.base_model.rotary_emb
    if len(rotary.inv_freq) == 0:
        return GPTConfig(**shape, train_length=length, pos={"name": "none"})
    fraction = 2 * len(rotary.inv_freq) / shape["head_dim"]
    pos = {"name": "rope", "base": float(parameters["rope_theta"]), "rotary_fraction": fraction}
    name, scaling, original = parameters["rope_type"], None, None
    if name != "default":
        if name not in SCALING_KEYS:
            raise ValueError(f"rope_type={name}: known are default, {', '.join(SCALING_KEYS)}")
        original = parameters.get("original_max_position_embeddings") or theirs.max_position_embeddings
        given = {ours: parameters.get(key) for ours, key in SCALING_KEYS[name].items()}
        given["factor"] = given["factor"] or theirs.max_position_embeddings / original
        if name == "yarn":
            given["attention_scale"] = rotary.attention_scaling
        scaling = {"name": name, **{key: value for key, value in given.items() if value is not None}}
    return GPTConfig(**shape, train_length=length, original_length=original, pos=pos, scaling=scaling)


def _our_tensors(layout: Layout, c: GPTConfig, theirs: dict) -> Iterator[tuple[str, Tensor]]:
    for module, name in layout.modules(c.n_layer):
        for kind in ("weight", "bias"):
            names = [f"{name.format(letter)}.{kind}" for letter in ("qkv" if "{}" in name else "-")]
            if names[0] not in theirs:  # no bias: ours stays zero, as it was made
                continue
            tensor = torch.cat([theirs[each] for each in names])
            if layout.transposed and tensor.ndim == 2 and module != "embedding":
                tensor = tensor.T
            if module.endswith("qkv") and layout.qkv == "by_head":
                tensor = tensor.unflatten(0, (c.n_head, 3, c.head_dim)).transpose(0, 1).flatten(0, 2)
            yield f"{module}.{kind}", tensor


# ---- both -----------------------------------------------------------------------------------------------------------


def _compare_frequencies(scheme: PositionScheme, model: Any) -> None:
    """Raise ValueError where transformers turns planes by other angles than we do, at or past the training length."""
    if not scheme.rotates:
        return
    rotary = type(model.base_model.rotary_emb)(model.config)  # a new one: `dynamic` remembers the longest length
    original = scheme.train_length
    for length in (1, original, original + 1, 2 * original, 5 * original):
        rotary(torch.zeros(1), torch.tensor([[length - 1]]))
        found, found_scale = rotary.inv_freq.double().cpu(), rotary.attention_scaling
        expected, scale = scheme.frequencies(length)
        same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=0)
        if not (same and math.isclose(found_scale, scale, rel_tol=1e-6)):
            name = model.config.rope_parameters["rope_type"]
            raise ValueError(f"rope_type={name}: transformers' frequencies at length {length} are not ours")
