"""The network: copy the folder into another project. Needs torch and safetensors only.

A plot needs matplotlib; convert.py needs OmegaConf; the way to Hugging Face (hf.py) also transformers and data/.
"""

from model.checkpoint import load_run
from model.config import GPTConfig
from model.gpt import GPT

__all__ = ["GPT", "GPTConfig", "load_run"]
