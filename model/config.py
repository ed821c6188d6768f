"""The network's description: everything needed to build it, checked when it is made."""

from dataclasses import dataclass, field
from functools import partial

import torch

from model.checks import check_whole, complete
from model.positions import SCHEMES, build_scheme
from model.scaling import complete_scaling

ALLOWED = {"attention": ("softmax", "linear"), "query_scale": (None, "log", "log_nope", "ssmax")}
ALLOWED |= {"bias": (True, False), "sinks": (True, False)}
LAYERS = ("full", "window", "nope")
WHOLE = ("vocab_size", "n_layer", "n_head", "head_dim", "train_length", "n_kv_head", "original_length")


@dataclass(frozen=True)
class GPTConfig:
    """GPT-2's architecture with a position scheme by name. ValueError, naming the setting, for what cannot be built.

    width = n_head · head_dim; given as well, `width` must agree. n_kv_head: key and value heads, a divisor of n_head
    (None: n_head); query head h uses key head h // (n_head / n_kv_head). train_length: the longest window seen in
    training, and the number of rows of a learned table. attention: softmax, or linear (Katharopoulos et al. 2020).
    pos: {"name": ..., its keys}; completed with the scheme's defaults. scaling: the same for a rotary frequency
    scaling; original_length: the length its formulas start from (None: train_length).

    layers: what the attention of each layer sees, repeated over the depth: full (the scheme, all earlier tokens),
    window (the scheme, a token itself and the window - 1 before it) or nope (no positions, all earlier tokens).
    query_scale: None; log, queries grow with the logarithm of their position past train_length (Llama 4, 2025);
    log_nope, in nope layers only, as there; ssmax, queries grow with the logarithm of the number of tokens seen, times
    a learned factor per head (Nakanishi 2025). sinks: a learned logit per head in the softmax's denominator (gpt-oss).
    """

    vocab_size: int
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None
    head_dim: int = 64
    width: int | None = None
    attention: str = "softmax"
    train_length: int = 1024
    bias: bool = True
    dropout: float = 0.0
    pos: dict = field(default_factory=lambda: {"name": "rope"})
    scaling: dict | None = None
    original_length: int | None = None
    layers: list[str] = field(default_factory=lambda: ["full"])
    window: int | None = None
    query_scale: str | None = None
    sinks: bool = False

    def __post_init__(self):
        assign = partial(object.__setattr__, self)  # the class is frozen
        if self.n_kv_head is None:
            assign("n_kv_head", self.n_head)
        if self.original_length is None:
            assign("original_length", self.train_length)
        for name in WHOLE:
            check_whole(f"model.{name}", getattr(self, name))
        check_whole("model.window", self.window, optional=True)
        for name, allowed in ALLOWED.items():
            if repr(getattr(self, name)) not in map(repr, allowed):  # 1 is not True
                raise ValueError(f"model.{name}={getattr(self, name)!r}: known are {', '.join(map(str, allowed))}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout!r}: must be a number from 0 to below 1")
        if not isinstance(self.layers, list | tuple) or not self.layers or any(x not in LAYERS for x in self.layers):
            raise ValueError(f"model.layers={self.layers!r}: must be a list of {', '.join(LAYERS)}, one entry at least")
        if len(self.layers) > self.n_layer:
            found = f"has {len(self.layers)} entries for model.n_layer={self.n_layer}"
            raise ValueError(f"model.layers={self.layers!r}: {found}; use more layers, or a shorter pattern")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim}: must be even, rotary planes have two dimensions")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"model.n_kv_head={self.n_kv_head}: must divide model.n_head={self.n_head}")
        width = self.n_head * self.head_dim
        if self.width not in (None, width):
            raise ValueError(f"model.width={self.width!r}: must be n_head · head_dim = {width}, or left out (null)")
        if ("window" in self.layers) != (self.window is not None):
            raise ValueError(f"model.window={self.window}, model.layers={self.layers}: window layers need model.window")
        if self.query_scale == "log_nope" and "nope" not in self.layers:
            raise ValueError("model.query_scale=log_nope: needs nope in model.layers; use log for all layers")
        assign("width", width)
        assign("layers", list(self.layers))
        assign("pos", complete("pos", SCHEMES, self.pos))
        scheme = SCHEMES[self.pos["name"]]
        assign("scaling", None if self.scaling == {"name": "none"} else self.scaling)
        if self.scaling is not None:
            planes = round(self.head_dim * self.pos.get("rotary_fraction", 1.0)) // 2
            assign("scaling", complete_scaling(self.scaling, planes))
            if not scheme.rotates:
                found = f"scaling={self.scaling['name']!r} on pos={self.pos['name']}: it has no frequencies to scale"
                rotating = ", ".join(name for name, known in SCHEMES.items() if known.rotates)
                raise ValueError(f"{found}; use scaling=none, or a scheme that rotates ({rotating})")
        if self.attention == "linear":
            if set(self.layers) != {"full"} or self.query_scale or self.sinks:
                raise ValueError("model.attention=linear: has no softmax for model.layers, query_scale or sinks")
            if scheme.biased:
                raise ValueError(f"model.attention=linear with pos={self.pos['name']}: has no score matrix for a bias")
        with torch.device("meta"):
            build_scheme(self)  # which checks the ranges of its own keys

    @classmethod
    def from_dict(cls, values: dict, **others) -> "GPTConfig":
        """From a plain mapping, and settings that are none of its; ValueError for keys not known."""
        known = [name for name in cls.__dataclass_fields__ if name not in others]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"model.{unknown[0]}: no such setting; known are {', '.join(known)}")
        return cls(**values, **others)
