"""The network's description: everything needed to build it, checked when it is made."""

from dataclasses import dataclass, field

import torch

from model.checks import check_whole
from model.positions import SCHEMES, build_scheme, check_scaling, complete_scheme

ATTENTIONS = ("softmax", "linear")


@dataclass(frozen=True)
class GPTConfig:
    """GPT-2's architecture with a position scheme by name.

    width = n_head · head_dim; given as well, `width` must agree. n_kv_head: key and value heads, a divisor of n_head
    (None: n_head); query head h uses key head h // (n_head / n_kv_head). train_length: the longest window seen in
    training, and the number of rows of a learned table. attention: softmax, or linear (Katharopoulos et al. 2020).
    pos: {"name": ..., its keys}; completed with the scheme's defaults. scaling: the same for a rotary frequency
    scaling, None for none; original_length: the length its formulas start from, where training under it went on at
    another (None: train_length). Raises ValueError, naming the setting and what is allowed, for anything that cannot be
    built.
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

    def __post_init__(self):
        for name, source in (("n_kv_head", "n_head"), ("original_length", "train_length")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self, source))
        for name in ("vocab_size", "n_layer", "n_head", "head_dim", "train_length", "n_kv_head", "original_length"):
            check_whole(f"model.{name}", getattr(self, name))
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim}: must be even, rotary planes have two dimensions")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"model.n_kv_head={self.n_kv_head}: must divide model.n_head={self.n_head}")
        width = self.n_head * self.head_dim
        if self.width not in (None, width):
            raise ValueError(
                f"model.width={self.width!r}: must be n_head · head_dim = {self.n_head} · {self.head_dim} = {width}; "
                "leave it out (null) or change the heads"
            )
        object.__setattr__(self, "width", width)
        if type(self.bias) is not bool:
            raise ValueError(f"model.bias={self.bias!r}: must be true or false")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout!r}: must be a number from 0 to below 1")
        object.__setattr__(self, "pos", complete_scheme(self.pos))
        object.__setattr__(self, "scaling", check_scaling(self))
        if self.attention not in ATTENTIONS:
            raise ValueError(f"model.attention={self.attention!r}: known are {', '.join(ATTENTIONS)}")
        if self.attention == "linear" and SCHEMES[self.pos["name"]].biased:
            fitting = ", ".join(name for name, scheme in SCHEMES.items() if not scheme.biased)
            raise ValueError(
                f"model.attention=linear with pos={self.pos['name']}: linear attention never forms the score matrix "
                f"that this scheme adds to; use model.attention=softmax, or one of {fitting}"
            )
        with torch.device("meta"):
            build_scheme(self)  # which checks the ranges of its own keys

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the next multiple of 64, which matrix products are fastest at."""
        return -(-self.vocab_size // 64) * 64

    @classmethod
    def from_dict(cls, values: dict, **others) -> "GPTConfig":
        """From a plain mapping, and settings that are none of its; ValueError for keys not known or missing."""
        known = [name for name in cls.__dataclass_fields__ if name not in others]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"model.{unknown[0]}: no such setting; known are {', '.join(known)}")
        if "vocab_size" not in values | others:
            raise ValueError("model.vocab_size is missing")
        return cls(**values, **others)
