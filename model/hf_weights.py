"""The same network as a model of Hugging Face's `transformers`, and back: weights rearranged, logits equal.

pos=learned is GPT-2; pos=rope is Starcoder2, or GPT-NeoX with sequential residual where a part of each head turns; and
pos=none is that with no part turning. These have our blocks exactly. GPT-2 and GPT-NeoX have no grouped heads: key and
value heads are repeated there. What has no equal is refused, in both directions.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from model.config import GPTConfig
from model.convert import convert_layout
from model.gpt import GPT

# Our modules and theirs in the three architectures; {} is the layer's number, ? stands for q, k, v in turn.
KINDS = ("gpt2", "starcoder2", "gpt_neox")
G, S, X = "transformer.h.{}", "model.layers.{}", "gpt_neox.layers.{}"
MODULES = {
    "embedding": ("transformer.wte", "model.embed_tokens", "gpt_neox.embed_in"),
    "norm": ("transformer.ln_f", "model.norm", "gpt_neox.final_layer_norm"),
    "blocks.{}.attention_norm": (f"{G}.ln_1", f"{S}.input_layernorm", f"{X}.input_layernorm"),
    "blocks.{}.attention.qkv": (f"{G}.attn.c_attn", f"{S}.self_attn.?_proj", f"{X}.attention.query_key_value"),
    "blocks.{}.attention.out": (f"{G}.attn.c_proj", f"{S}.self_attn.o_proj", f"{X}.attention.dense"),
    "blocks.{}.mlp_norm": (f"{G}.ln_2", f"{S}.post_attention_layernorm", f"{X}.post_attention_layernorm"),
    "blocks.{}.mlp.up": (f"{G}.mlp.c_fc", f"{S}.mlp.c_fc", f"{X}.mlp.dense_h_to_4h"),
    "blocks.{}.mlp.down": (f"{G}.mlp.c_proj", f"{S}.mlp.c_proj", f"{X}.mlp.dense_4h_to_h"),
}
SHAPE = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
SHAPE["n_kv_head"] = "num_key_value_heads"
TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
# What our blocks have in their settings; the first value is exported. Each architecture has some of these settings.
FIXED = dict.fromkeys(("activation_function", "hidden_act"), TANH_GELUS)
FIXED |= dict.fromkeys(("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"), (1e-5,))
FIXED |= dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention", "use_parallel_residual"), (False,))
FIXED |= dict.fromkeys(("scale_attn_weights", "tie_word_embeddings"), (True,))
# The scalings that they have, and their names of the keys beside `factor`.
SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3")
KEYS = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "short": "short_factor", "long": "long_factor"}
KEYS |= {"low": "low_freq_factor", "high": "high_freq_factor"}


def _pairs(theirs: Any, ours: GPT) -> Iterator[tuple[Tensor, Tensor, Tensor | slice]]:
    """Each tensor of theirs, the one of ours that has it, and in which rows; no biases that either lacks.

    GPT-2 and GPT-NeoX have q, k and v in one tensor, GPT-NeoX those of a head, then of the next. GPT-2's matrices are
    (in, out), and are given transposed.
    """
    c, kind, here, there = ours.config, theirs.config.model_type, ours.state_dict(), theirs.state_dict()
    heads = torch.arange((c.n_head + 2 * c.n_kv_head) * c.head_dim).view(-1, c.head_dim)
    qkv = heads.split((c.n_head, c.n_kv_head, c.n_kv_head))
    if kind != "starcoder2":
        repeated = [part.repeat_interleave(c.n_head // len(part), dim=0) for part in qkv]
        qkv = [torch.stack(repeated, dim=1 if kind == "gpt_neox" else 0)]
    rows_of = {"embedding": [slice(c.vocab_size)], "blocks.{}.attention.qkv": [part.flatten() for part in qkv]}
    for name, columns in MODULES.items():
        # Three tensors of theirs have q, k and v in their names; the name of a single one has no place for a letter.
        their_name, parts = columns[KINDS.index(kind)], zip("qkv", rows_of.get(name, [slice(None)]), strict=False)
        layers = range(c.n_layer if "{}" in name else 1)
        for layer, suffix, (letter, rows) in product(layers, ("weight", "bias"), parts):
            tensor = there.get(f"{their_name.format(layer).replace('?', letter)}.{suffix}")
            mine = here.get(f"{name.format(layer)}.{suffix}")
            if tensor is not None and mine is not None:
                yield tensor.t() if kind == "gpt2" and "{}" in name else tensor, mine, rows
    if kind == "gpt2":
        yield there["transformer.wpe.weight"], here["pos.table"], slice(None)


def to_transformers(model: GPT, end_of_document: int | None = None) -> Any:
    """The model as a PreTrainedModel in evaluation mode, on the CPU, in the dtype it has.

    end_of_document: the id that generate() begins and stops at. ValueError, with the reason, for what has no equal.
    """
    c, name = model.config, model.config.pos["name"]
    for setting, value in {"attention": "softmax", "layers": ["full"], "query_scale": None, "sinks": False}.items():
        if (found := getattr(c, setting)) != value:
            raise ValueError(f"model.{setting}={found}: the architectures that equal our blocks do not have it")
    if name not in ("learned", "rope", "none"):
        raise ValueError(f"pos={name}: has no exact equal to export to; learned, rope and none have")
    if name == "rope":
        model = convert_layout(model, "half")
    whole = name == "rope" and model.pos.rotary_dim == c.head_dim
    kind = "gpt2" if name == "learned" else "starcoder2" if whole else "gpt_neox"
    known, scaling = AutoConfig.for_model(kind), c.scaling and c.scaling["name"]
    settings = {theirs: getattr(c, ours) for ours, theirs in SHAPE.items()}
    settings |= {setting: allowed[0] for setting, allowed in FIXED.items()}
    settings |= {"hidden_size": c.width, "intermediate_size": 4 * c.width, "use_bias": c.bias, "sliding_window": None}
    # `dynamic` starts from this length, the others from original_max_position_embeddings
    settings["max_position_embeddings"] = c.original_length if scaling == "dynamic" else c.train_length
    settings["use_cache"] = scaling not in ("dynamic", "longrope")  # cached keys would keep their older frequencies
    settings["rope_parameters"] = _rope_parameters(model)
    settings |= {setting: c.dropout for setting in known.to_dict() if "drop" in setting}
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_document)
    theirs = AutoConfig.for_model(kind, **{key: value for key, value in settings.items() if hasattr(known, key)})
    exported = AutoModelForCausalLM.from_config(theirs).to(model.embedding.weight.dtype).eval()
    for tensor, ours, rows in _pairs(exported, model):
        tensor.copy_(ours[rows])
    return exported


def _rope_parameters(model: GPT) -> dict:
    c, scheme = model.config, model.pos
    if not scheme.rotates:
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.0}
    width, turning, base = scheme.rotary_dim, c.pos["turning"], c.pos["base"]
    part = math.nextafter(width / c.head_dim, 1.0)  # they round its product with head_dim down
    plain = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}
    if turning < 1 and (c.scaling or width < c.head_dim):
        raise ValueError(f"pos.turning={turning}: is exported without scaling= and pos.rotary_fraction only")
    if turning < 1:
        return plain | {"rope_type": "proportional", "partial_rotary_factor": turning}
    if c.scaling is None:
        return plain
    name, factor = c.scaling["name"], c.scaling["factor"]
    if name not in (*SCALINGS, "ntk") or (factor is None and name != "dynamic"):
        raise ValueError(f"scaling={name}, scaling.factor={factor}: exported is {', '.join(SCALINGS)}, a fixed factor")
    if name == "ntk":  # by its definition RoPE with another base
        return plain | {"rope_theta": base * factor ** (width / (width - 2))}
    keys = {theirs: c.scaling[ours] for ours, theirs in KEYS.items() if ours in c.scaling}
    if name not in ("linear", "dynamic"):
        keys["original_max_position_embeddings"] = c.original_length
    if name in ("yarn", "longrope"):
        keys["attention_factor"] = scheme.frequencies(c.original_length)[1]
    return plain | keys | {"rope_type": name, "factor": factor or 1.0}  # dynamic takes an open factor as 1


def check_architecture(theirs: Any) -> None:
    """Raise ValueError, naming it, for what a configuration of transformers has and our blocks have not."""
    if theirs.model_type not in KINDS:
        raise ValueError(f"model_type={theirs.model_type}: other blocks than ours; known are {', '.join(KINDS)}")
    inner, head_dim = (4 * theirs.hidden_size, None), (theirs.hidden_size // theirs.num_attention_heads, None)
    required = FIXED | {"n_inner": inner, "intermediate_size": inner, "head_dim": head_dim}
    for setting, allowed in required.items():
        if (value := getattr(theirs, setting, allowed[0])) not in allowed:
            raise ValueError(f"{setting}={value!r}: ours has {' or '.join(map(str, allowed))}; this model does not fit")


def from_transformers(model: Any) -> GPT:
    """The model as a GPT in evaluation mode, float32; its sliding window is the training length. ValueError: no fit."""
    check_architecture(model.config)
    imported = GPT(_our_config(model)).eval()
    torch.nn.init.zeros_(imported.embedding.weight)  # the vocabulary's padding
    for tensor, ours, rows in _pairs(model, imported):
        ours[rows] = tensor.to(ours)
    return imported


def _our_config(model: Any) -> GPTConfig:
    theirs = model.config
    head_dim, length = theirs.hidden_size // theirs.num_attention_heads, theirs.max_position_embeddings
    shape = {ours: getattr(theirs, name, None) for ours, name in SHAPE.items()} | {"head_dim": head_dim}
    shape["bias"] = any(bias.any() for name, bias in model.named_parameters() if name.endswith("bias"))
    shape["train_length"] = min(length, getattr(theirs, "sliding_window", None) or length)
    if theirs.model_type == "gpt2":
        return GPTConfig(**shape, pos={"name": "learned"})
    parameters, rotary = theirs.rope_parameters, model.base_model.rotary_emb
    if len(rotary.inv_freq) == 0:
        return GPTConfig(**shape, pos={"name": "none"})
    name, fraction = parameters["rope_type"], 2 * len(rotary.inv_freq) / head_dim
    shape["pos"] = {"name": "rope", "base": float(parameters["rope_theta"]), "rotary_fraction": fraction}
    if name == "proportional":
        shape["pos"]["turning"] = parameters["partial_rotary_factor"]
    elif name != "default":
        original = parameters.get("original_max_position_embeddings") or length
        scaling = {"name": name, "factor": parameters.get("factor") or length / original}
        scaling |= {ours: parameters[key] for ours, key in KEYS.items() if key in parameters}
        if name == "yarn":
            scaling["attention_scale"] = rotary.attention_scaling
        shape |= {"original_length": original, "scaling": scaling}
    return GPTConfig(**shape)
