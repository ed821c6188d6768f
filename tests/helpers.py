"""What several test files share: small models of every registered scheme, and the cached pass in chunks."""

import torch
from torch import Tensor

from model import GPT, GPTConfig
from model.positions import SCHEMES

# keys worth testing beside a scheme's defaults; a scheme that is not listed is tested with its defaults
VARIANTS = {
    "rope": [{}, {"layout": "interleaved"}, {"rotary_fraction": 0.5}, {"turning": 0.6, "base": 500.0}],
    "t5": [{}, {"buckets": 6, "max_distance": 20}],
    "shaw": [{}, {"max_distance": 3}],
}
ALL_SCHEMES = [{"name": name, **keys} for name in SCHEMES for keys in VARIANTS.get(name, [{}])]

DEFAULT_SCHEMES = [pos for pos in ALL_SCHEMES if len(pos) == 1]
ABSOLUTE = {"learned", "sinusoidal", "fire"}  # schemes that do not go by distances alone


def scheme_id(pos: dict) -> str:
    return "-".join(str(value) for value in pos.values())


def small_model(pos: dict, dtype: torch.dtype = torch.float64, seed: int = 0, **settings) -> GPT:
    """Two layers and random weights large enough that every part of the network matters."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "head_dim": 16, "train_length": 32, **settings}
    model = GPT(GPTConfig(pos=pos, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def random_tokens(model: GPT, batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def cached_logits(model: GPT, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Logits of a pass through a cache, in chunks of the given sizes; what is left goes one by one."""
    cache = model.new_cache(len(tokens), tokens.shape[1])
    sizes = chunks + [1] * (tokens.shape[1] - sum(chunks))
    logits = [model(part, cache=cache) for part in tokens.split(sizes, dim=1)]
    assert cache.length == tokens.shape[1]
    return torch.cat(logits, dim=1)
