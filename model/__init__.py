"""The network. Needs torch, numpy and safetensors only: the folder can be copied into another project."""

from model.cache import Cache, KVCache
from model.checkpoint import load_run
from model.gpt import GPT, GPTConfig

__all__ = ["GPT", "Cache", "GPTConfig", "KVCache", "load_run"]
