"""From logits to the next token."""

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One id a row: logits (B, V) -> int64 (B, 1). Ties are cut by id order, so top_k keeps exactly k ids.

    Raises ValueError for a temperature that is not finite and at least 0, top_k below 1, top_p outside (0, 1].
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: must be a finite number of at least 0 (0: the likeliest token)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1, or None for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1, or None for all tokens")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    ordered, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    probabilities = (ordered / temperature).softmax(dim=-1)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities  # mass of the likelier ids: the first id always stays
        probabilities[before >= top_p * probabilities.sum(dim=-1, keepdim=True)] = 0
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))
