"""From logits to the next token."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from model.checks import check_whole, is_number


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off meanwhile; the model's mode is put back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError for what `sample` does not take."""
    if not is_number(temperature) or temperature < 0:
        raise ValueError(f"temperature={temperature!r}: must be a finite number of at least 0 (0: the likeliest token)")
    check_whole("top_k", top_k, optional=True)
    if top_p is not None and (not is_number(top_p) or not 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r}: must be above 0 and at most 1, or None for all tokens")


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One id per row: logits (B, V) -> int64 (B, 1). Ties are cut by id order, so top_k keeps exactly k ids.

    Raises ValueError, on the CPU only, for a row whose largest logit is not finite. Elsewhere looking would stall.
    """
    if logits.device.type == "cpu" and not all(map(math.isfinite, logits.amax(dim=-1).tolist())):
        raise ValueError("the model's logits are not finite numbers, so no token can be drawn from them")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    ordered, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    # From the largest down, so that a tiny temperature overflows to -inf only; float32 has no use for a smaller one.
    probabilities = ((ordered - ordered[:, :1]) / max(temperature, 1e-30)).softmax(dim=-1)
    if top_k is not None:
        probabilities[:, min(top_k, logits.shape[-1]) :] = 0
    if top_p is not None and top_p < 1:  # rounded sums may reach 1 before the last id
        before = probabilities.cumsum(dim=-1) - probabilities  # mass of the likelier ids: the first id always stays
        probabilities[before >= top_p * probabilities.sum(dim=-1, keepdim=True)] = 0
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))
