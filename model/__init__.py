"""The network: copy the folder into another project. Needs torch and safetensors only.

A plot needs matplotlib; convert.py needs OmegaConf; the way to Hugging Face (hf.py) also transformers and data/.
"""

from importlib import import_module

_PLACES = {"GPT": "gpt", "GPTConfig": "config", "load_run": "checkpoint"}
__all__ = ["GPT", "GPTConfig", "load_run"]


def __getattr__(name: str):
    """On first use, so that `python -m model.rope` finds itself not imported already, which runpy warns of."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
