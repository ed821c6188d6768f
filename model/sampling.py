"""From logits to the next token, and from prompts to their continuations."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from model.gpt import GPT


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off meanwhile; the model's mode is put back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


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


@torch.inference_mode()
def continuations(
    model: "GPT",
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    scaling_length: int | None = None,
) -> Iterator[dict[int, int]]:
    """Continue prompts of different lengths in one batch, each with what it gives alone, but for rounding.

    prompts: int64 (T,) each, T at least 1. All start at position 0. While the shorter ones are continued, the longer
    ones are still fed their own tokens: no padding, so no position and no mask differs from decoding alone. Each draws
    from a generator of its own, all with the same seed. Yields, step by step, the new id of each prompt that gets one,
    by its index; a prompt is at its end after max_new_tokens, or after the id `stop`. temperature, top_k and top_p as
    in `sample`, scaling_length as in GPT.forward. Raises ValueError where a prompt is empty or a learned table ends too
    soon, before any work.
    """
    if not prompts or any(prompt.ndim != 1 or not len(prompt) for prompt in prompts):
        raise ValueError("prompts must be one or more sequences of at least one token")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be a whole number of at least 1")
    last = max(map(len, prompts)) + max_new_tokens - 2  # the last token drawn is never fed back
    model.pos.check_position(last)
    device = next(model.parameters()).device
    generators = [torch.Generator(device).manual_seed(seed) for _ in prompts]
    left = dict.fromkeys(range(len(prompts)), max_new_tokens)
    cache = model.new_cache(len(prompts), last + 1, scaling_length)
    at = min(map(len, prompts))
    chunk = torch.stack([prompt[:at] for prompt in prompts]).to(device)
    with evaluating(model):
        while left:
            logits = model(chunk, cache=cache)[:, -1]
            chunk = torch.zeros((len(prompts), 1), dtype=torch.int64, device=device)
            drawn = {}
            for row, prompt in enumerate(prompts):
                if at < len(prompt):
                    chunk[row] = prompt[at]
                elif row in left:
                    chunk[row] = sample(logits[row : row + 1], temperature, top_k, top_p, generators[row])[0]
                    drawn[row] = int(chunk[row])
                    left[row] -= 1
                    if left[row] == 0 or drawn[row] == stop:
                        del left[row]
            at += 1
            if drawn:
                yield drawn
