"""From logits to the next token, and from prompts to their continuations."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.checks import check_whole, is_number
from model.graph import one_token_steps

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


def check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None, device: torch.device
) -> None:
    """Raise ValueError for what `sample` does not take."""
    if not is_number(temperature) or temperature < 0:
        raise ValueError(f"temperature={temperature!r}: must be a finite number of at least 0 (0: the likeliest token)")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"top_k={top_k!r}: must be a whole number of at least 1, or None for all tokens")
    if top_p is not None and (not is_number(top_p) or not 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r}: must be above 0 and at most 1, or None for all tokens")
    if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != device.type):
        found = generator.device if isinstance(generator, torch.Generator) else type(generator).__name__
        raise ValueError(f"generator: must be a torch.Generator on {device}, where the logits are, found {found}")


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One id a row: logits (B, V) -> int64 (B, 1). Ties are cut by id order, so top_k keeps exactly k ids.

    Raises ValueError for a temperature that is not finite and at least 0, top_k below 1, top_p outside (0, 1], and
    (on the CPU only: elsewhere it would stall every step) for a row whose largest logit is not a finite number.
    """
    check_sampling(temperature, top_k, top_p, generator, logits.device)
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
    by its index; a prompt is at its end after max_new_tokens, or after the id `stop`. Until then the model must not
    change. temperature, top_k and top_p as in `sample`, scaling_length as in GPT.forward. Raises ValueError where a
    prompt is empty or a learned table ends too soon, before any work.
    """
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(f"prompts={prompts!r}: must be one or more tensors")
    for prompt in prompts:
        model.check_tokens(prompt)
        if prompt.ndim != 1:
            raise ValueError(f"prompts must be (T,) each, found {tuple(prompt.shape)}")
    check_whole("seed", seed, 0)
    if scaling_length is not None:
        check_whole("scaling_length", scaling_length, open_end=", or None")
    check_whole("max_new_tokens", max_new_tokens, most=2**31 - 1)
    check_sampling(temperature, top_k, top_p, None, torch.device("cpu"))
    last = max(map(len, prompts)) + max_new_tokens - 2  # the last token drawn is never fed back
    model.pos.check_position(last)
    device = next(model.parameters()).device
    generators = [torch.Generator(device).manual_seed(seed) for _ in prompts]
    left = dict.fromkeys(range(len(prompts)), max_new_tokens)
    cache = model.new_cache(len(prompts), last + 1, scaling_length)
    at = min(map(len, prompts))
    chunk = torch.stack([prompt[:at] for prompt in prompts]).to(device)
    step = None
    with evaluating(model):
        while left:
            if step is None and cache.length:
                step = one_token_steps(model, cache)
            logits = step(chunk) if step else model(chunk, cache=cache)[:, -1]
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
