"""The same network as a model of Hugging Face's `transformers`, and back: weights rearranged, logits equal.

    learned                      GPT-2
    rope, whole heads            Starcoder2
    rope, a part of each head    GPT-NeoX with sequential residual
    none                         the same, none of a head turning

These have our blocks exactly: LayerNorm before each part, tanh-GELU, an output tied to the embedding. Where GPT-2 and
GPT-NeoX have no grouped heads, key and value heads are repeated; biases that we lack are zeros there. What has no equal
is refused, in both directions.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from model.config import GPTConfig
from model.convert import convert_layout
from model.gpt import GPT
from model.positions import PositionScheme

REFUSED = {  # why a scheme cannot be exported
    "alibi": "MPT has GELU without its tanh approximation, BLOOM normalises embeddings, Falcon rounds the biases",
    "sinusoidal": "transformers' causal models end their table, or space its frequencies otherwise",
    "t5": "no causal model of transformers with LayerNorm has these biases",
    "shaw": "no causal model of transformers adds vectors to keys and values",
}
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
# transformers' names of a scaling's keys beside `factor`; scalings that are not here it does not know.
SCALING_KEYS = {
    "linear": {},
    "dynamic": {},
    "yarn": {"beta_fast": "beta_fast", "beta_slow": "beta_slow"},
    "longrope": {"short": "short_factor", "long": "long_factor"},
    "llama3": {"low": "low_freq_factor", "high": "high_freq_factor"},
}
# transformers keeps keys that were turned under older frequencies: with a cache these would not be exact.
LENGTH_DEPENDENT = ("dynamic", "longrope")

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


def transformers() -> Any:
    """The library, of an optional extra. ValueError, saying how to get it, where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"transformers is not installed ({error}); `pip install -e '.[hf]'` brings it") from error
    return transformers


def _modules(kind: str, n_layer: int) -> Iterator[tuple[str, list[str]]]:
    """Our module and the one or three of theirs, of all that have weights."""
    for ours, columns in MODULES.items():
        theirs = columns[KINDS.index(kind)]
        for layer in range(n_layer if "{}" in ours else 1):
            names = [theirs.format(layer).replace("?", letter) for letter in ("qkv" if "?" in theirs else "-")]
            yield ours.format(layer), names


# ---- out ------------------------------------------------------------------------------------------------------------


def to_transformers(model: GPT, end_of_document: int | None = None) -> Any:
    """The model as a PreTrainedModel of transformers in evaluation mode, on the CPU, in the dtype it has.

    end_of_document: the id that generate() begins and stops at. Raises ValueError, with the reason, for a scheme, a
    scaling or an attention that has no exact equal there, and where transformers' frequencies are not ours.
    """
    c, library = model.config, transformers()
    for name, value in {"attention": "softmax", "layers": ["full"], "query_scale": None, "sinks": False}.items():
        if (found := getattr(c, name)) != value:
            raise ValueError(f"model.{name}={found}: the architectures that equal our blocks do not have it")
    if c.pos["name"] == "rope":
        model = convert_layout(model, "half")
        kind = "starcoder2" if model.pos.rotary_dim == c.head_dim else "gpt_neox"
    elif (kind := {"learned": "gpt2", "none": "gpt_neox"}.get(c.pos["name"])) is None:
        reason = REFUSED.get(c.pos["name"], "no model of transformers is known to have this scheme")
        raise ValueError(f"pos={c.pos['name']}: has no exact equal to export to: {reason}")
    theirs = library.AutoConfig.for_model(kind, **_their_settings(kind, model, end_of_document))
    exported = library.AutoModelForCausalLM.from_config(theirs).to(model.embedding.weight.dtype).eval()
    ours = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    tensors = {"transformer.wpe.weight": ours["pos.table"]} if kind == "gpt2" else {}
    for module, names in _modules(kind, c.n_layer):
        weight = ours[f"{module}.weight"][: c.vocab_size if module == "embedding" else None]
        bias = ours.get(f"{module}.bias", weight.new_zeros(len(weight)))
        for suffix, tensor in (("weight", weight), ("bias", bias)):
            parts = _their_heads(kind, c, tensor) if module.endswith("qkv") else [tensor]
            for name, part in zip(names, parts, strict=True):
                transposed = kind == "gpt2" and part.ndim == 2 and module != "embedding"
                tensors[f"{name}.{suffix}"] = part.T if transposed else part
    exported.load_state_dict(tensors, strict=False)  # theirs lack some of the biases, and count the output as another
    _compare_frequencies(model.pos, exported)
    return exported


def _their_heads(kind: str, c: GPTConfig, tensor: Tensor) -> list[Tensor]:
    """Our qkv, (heads · head_dim, ...), in their order; GPT-NeoX has q, k, v of a head, then those of the next."""
    q, k, v = tensor.unflatten(0, (-1, c.head_dim)).split((c.n_head, c.n_kv_head, c.n_kv_head))
    if kind == "starcoder2":
        return [x.flatten(0, 1) for x in (q, k, v)]
    k, v = (x.repeat_interleave(c.n_head // c.n_kv_head, dim=0) for x in (k, v))
    return [torch.stack((q, k, v), dim=1).flatten(0, 2) if kind == "gpt_neox" else torch.cat((q, k, v)).flatten(0, 1)]


def _their_settings(kind: str, model: GPT, end_of_document: int | None) -> dict:
    c, scaling = model.config, model.config.scaling["name"] if model.config.scaling else None
    common = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        # `dynamic` starts from this one; the others say by themselves what they start from
        "max_position_embeddings": c.original_length if scaling == "dynamic" else c.train_length,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "pad_token_id": None,
    }
    if kind == "gpt2":
        return common | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), c.dropout)
    common |= {
        "intermediate_size": 4 * c.width,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": _rope_parameters(model),
        "attention_dropout": c.dropout,
        "use_cache": scaling not in LENGTH_DEPENDENT,
    }
    if kind == "gpt_neox":
        return common | {"use_parallel_residual": False, "hidden_dropout": c.dropout}
    common |= {"num_key_value_heads": c.n_kv_head, "use_bias": c.bias, "sliding_window": None}
    return common | {"residual_dropout": c.dropout, "embedding_dropout": c.dropout}


def _rope_parameters(model: GPT) -> dict:
    c = model.config
    if c.pos["name"] == "none":
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.0}
    width, scaling, base = model.pos.rotary_dim, c.scaling, c.pos["base"]
    fraction = width / c.head_dim
    if int(c.head_dim * fraction) < width:  # they round down
        fraction = math.nextafter(fraction, 1.0)
    partial = {} if width == c.head_dim else {"partial_rotary_factor": fraction}
    if (turning := c.pos["turning"]) < 1:
        if scaling or partial:
            raise ValueError(f"pos.turning={turning}: is exported without scaling= and pos.rotary_fraction only")
        return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": turning}
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base, **partial}
    name, factor = scaling["name"], scaling["factor"]
    if factor is None and name != "dynamic":
        raise ValueError(
            f"scaling={name} with scaling.factor=null: follows each sequence's length, in transformers factors do not; "
            "export a run that was trained with a number"
        )
    factor = factor or 1.0  # what an open factor is in dynamic's formula
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


# ---- in -------------------------------------------------------------------------------------------------------------


def from_transformers(model: Any) -> tuple[GPT, list[str]]:
    """A model of transformers as a GPT in evaluation mode, float32, and notes on where the two differ.

    GPT-2, Starcoder2, and GPT-NeoX with sequential residual. Raises ValueError, naming it, for whatever does not fit.
    """
    kind, notes = model.config.model_type, check_architecture(model.config)
    if not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight):
        raise ValueError("tie_word_embeddings=False: its output matrix is another than its embedding; ours are one")
    theirs = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    imported = GPT(c := _our_config(model, theirs))
    ours = imported.state_dict()
    if kind == "gpt2":
        ours["pos.table"].copy_(theirs["transformer.wpe.weight"])
    for module, names in _modules(kind, c.n_layer):
        for suffix in ("weight", "bias"):
            name = f"{module}.{suffix}"
            if name not in ours or f"{names[0]}.{suffix}" not in theirs:  # a bias of ours is zero, as it was made
                continue
            tensor = torch.cat([theirs[f"{each}.{suffix}"] for each in names])
            if kind == "gpt2" and tensor.ndim == 2 and module != "embedding":
                tensor = tensor.T
            if kind == "gpt_neox" and module.endswith("qkv"):
                tensor = tensor.unflatten(0, (c.n_head, 3, c.head_dim)).transpose(0, 1).flatten(0, 2)
            ours[name].zero_()[: len(tensor)] = tensor  # zeros: the vocabulary's padding
    _compare_frequencies(imported.pos, model)
    return imported.eval(), notes


def check_architecture(theirs: Any) -> list[str]:
    """Raise ValueError for what a configuration of transformers has and ours has not; notes on what fits in part."""
    kind, notes = theirs.model_type, []
    if kind not in KINDS:
        norm = "RMSNorm where ours has LayerNorm; " if hasattr(theirs, "rms_norm_eps") else ""
        raise ValueError(f"model_type={kind}: {norm}known are {', '.join(KINDS)}")
    inner, head_dim = 4 * theirs.hidden_size, theirs.hidden_size // theirs.num_attention_heads
    required = {  # what ours has; a setting that their architecture lacks counts as equal
        **dict.fromkeys(("activation_function", "hidden_act"), TANH_GELUS),
        **dict.fromkeys(("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"), (1e-5,)),
        **dict.fromkeys(("n_inner", "intermediate_size"), (inner, None)),
        **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention", "use_parallel_residual"), (False,)),
        "scale_attn_weights": (True,),
        "head_dim": (head_dim, None),
    }
    for setting, allowed in required.items():
        if (value := getattr(theirs, setting, allowed[0])) not in allowed:
            raise ValueError(f"{setting}={value!r}: ours has {' or '.join(map(str, allowed))}; this model does not fit")
    if getattr(theirs, "sliding_window", None) is not None:
        notes.append(
            f"sliding_window={theirs.sliding_window}: here tokens see farther back; this becomes the training length"
        )
    return notes


def _our_config(model: Any, state: dict) -> GPTConfig:
    theirs = model.config
    shape = {
        "vocab_size": theirs.vocab_size,
        "n_layer": theirs.num_hidden_layers,
        "n_head": theirs.num_attention_heads,
        "n_kv_head": getattr(theirs, "num_key_value_heads", None),
        "head_dim": theirs.hidden_size // theirs.num_attention_heads,
        "train_length": min(theirs.max_position_embeddings, getattr(theirs, "sliding_window", None) or math.inf),
        "bias": any(bool(tensor.any()) for name, tensor in state.items() if name.endswith("bias")),  # not all zeros
    }
    if theirs.model_type == "gpt2":
        return GPTConfig(**shape, pos={"name": "learned"})
    parameters, rotary = theirs.rope_parameters, model.base_model.rotary_emb
    if len(rotary.inv_freq) == 0:
        return GPTConfig(**shape, pos={"name": "none"})
    fraction = 2 * len(rotary.inv_freq) / shape["head_dim"]
    pos = {"name": "rope", "base": float(parameters["rope_theta"]), "rotary_fraction": fraction}
    name = parameters["rope_type"]
    if name == "proportional":
        return GPTConfig(**shape, pos=pos | {"turning": parameters["partial_rotary_factor"]})
    if name == "default":
        return GPTConfig(**shape, pos=pos)
    if name not in SCALING_KEYS:
        raise ValueError(f"rope_type={name}: known are default, {', '.join(SCALING_KEYS)}")
    original = parameters.get("original_max_position_embeddings") or theirs.max_position_embeddings
    scaling = {"name": name, "factor": parameters.get("factor") or theirs.max_position_embeddings / original}
    scaling |= {ours: parameters[key] for ours, key in SCALING_KEYS[name].items() if parameters.get(key) is not None}
    if name == "yarn":
        scaling["attention_scale"] = rotary.attention_scaling
    return GPTConfig(**shape, original_length=original, pos=pos, scaling=scaling)


# ---- both -----------------------------------------------------------------------------------------------------------


def _compare_frequencies(scheme: PositionScheme, model: Any) -> None:
    """Raise ValueError where transformers turns planes by other angles than we do, at or past the training length."""
    if not scheme.rotates:
        return
    rotary = type(model.base_model.rotary_emb)(model.config)  # a new one: `dynamic` remembers the longest length
    original, name = scheme.train_length, model.config.rope_parameters["rope_type"]
    for length in (1, original, original + 1, 2 * original, 5 * original):
        rotary(torch.zeros(1), torch.tensor([[length - 1]]))
        inv_freq, scale = scheme.frequencies(length)
        same = torch.allclose(rotary.inv_freq.double().cpu(), inv_freq, rtol=1e-5, atol=0)
        if not (same and math.isclose(rotary.attention_scaling, scale, rel_tol=1e-6)):
            raise ValueError(f"rope_type={name}: transformers' frequencies at length {length} are not ours")
