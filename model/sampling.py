"""Decoding: the next token from logits, and texts continued token by token."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from model.checks import check_ids, check_whole, is_number


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off meanwhile; the model's mode is put back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.inference_mode()
def stream(
    model: nn.Module,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    use_cache: bool = True,
    scaling_length: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Continue int64 prompts (T,) of any lengths, at least 1, in one batch; yields the new ids of each step, (B,).

    All start at position 0, without padding: a longer prompt yields -1 while it is still fed and a shorter one is
    continued. Each prompt gets at least max_new_tokens. temperature 0 takes the likeliest id; else one is drawn
    with `generator` from the top_k likeliest, or from the smallest set that holds top_p of the probability
    (Holtzman et al. 2020), or from both. Dropout is off. Raises ValueError for settings out of range and, before
    any work, where a learned table is too short.
    """
    if not len(prompts):
        raise ValueError("prompts=[]: give at least one prompt")
    for prompt in prompts:
        check_ids("tokens", prompt[None], model)
    check_whole("max_new_tokens", max_new_tokens)
    if not is_number(temperature) or temperature < 0:
        raise ValueError(f"temperature={temperature!r}: must be a finite number of at least 0 (0: the likeliest token)")
    check_whole("top_k", top_k, optional=True)
    if top_p is not None and (not is_number(top_p) or not 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r}: must be above 0 and at most 1, or None for all tokens")
    shortest, total = min(map(len, prompts)), max(map(len, prompts)) + max_new_tokens
    model.pos.check_position(total - 2)  # the last token drawn is never fed back
    text = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_value=-1)
    text = nn.functional.pad(text, (0, max_new_tokens), value=-1)
    cache = model.new_cache(len(prompts), total - 1, scaling_length) if use_cache else None
    with evaluating(model):
        for end in range(shortest, total):
            new = text[:, cache.length if cache is not None else 0 : end]
            logits = model(new, cache=cache, scaling_length=scaling_length, last_only=True)[:, 0]
            drawn, fed = sample(logits, temperature, top_k, top_p, generator)[:, 0], text[:, end] >= 0
            text[:, end] = torch.where(fed, text[:, end], drawn)
            yield drawn.masked_fill(fed, -1)


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
