"""What perplexity does not show of a trained model past its training length: three probes of a text's tokens (1-D)."""

from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from measure.measurement import token_array
from measure.statistics import standard_error
from measure.windows import score, widening_edges
from model import GPT
from model.attention import View, attention_weights
from model.gpt import Attention
from model.sampling import evaluating

ROWS = 256  # queries whose attention weights are formed at once: all of a long window are gigabytes


def recall(
    model: GPT, tokens: Tensor | np.ndarray, longest: int, string_length: int = 16, trials: int = 64, seed: int = 0
) -> list[dict]:
    """Recall at a distance: the loss on a random string whose first copy lies 2^k tokens back, as induction heads use
    it (Olsson et al. 2022). A string of ids of the text, then text, then the string again; the control's first copy is
    another string. Distances, from start to start, are those that fit into `longest` positions, with equal strings.

    Returns one dict per distance: distance; nll, nats per token on the second copy without its first token;
    control_nll, the same in the control; gain, control_nll - nll; stderr and gain_stderr, standard errors over trials
    (None for one trial). Distances end with a learned table. Raises ValueError for settings that do not fit.
    """
    tokens, longest = token_array(tokens), min(longest, model.pos.max_length or longest)
    fed = string_length - 1  # tokens of the second copy that are inputs
    distances = [2**k for k in range(fed.bit_length(), longest.bit_length()) if 2**k + fed <= longest]
    if not distances:
        least = 2 ** fed.bit_length() + fed
        raise ValueError(f"longest={longest}: must be at least {least} for string_length={string_length}")
    strings, others = np.random.default_rng(seed).choice(np.unique(tokens), (2, trials, string_length))
    text = _windows(tokens, distances[-1] - string_length, trials, distinct=False)
    rows = []
    for distance in distances:
        between = text[:, : distance - string_length]
        ids = np.concatenate([np.hstack((start, between, strings)) for start in (strings, others)])
        nll, control = _losses(model, ids, scored=fed).mean(axis=1).reshape(2, trials)
        row = {"distance": distance, "nll": float(nll.mean()), "stderr": standard_error(nll)}
        gain = {"gain": float((control - nll).mean()), "gain_stderr": standard_error(control - nll)}
        rows.append(row | {"control_nll": float(control.mean())} | gain)
    return rows


def shift(model: GPT, tokens: Tensor | np.ndarray, windows: int = 32) -> list[dict]:
    """Shift test: the loss on the same text, its positions starting at s instead of 0 (Sinha et al. 2022).

    A scheme that goes by distances alone changes by rounding only, so autocast is off. Shifts: 0, n = min(64, T // 4),
    T and 8T, T being the training length. Up to `windows` windows are T - n tokens long, so that a learned table can be
    tried at one shift; frequency scalings go by this length.

    Returns one dict per shift: shift; length; nll, nats per token; difference, of nll to that at shift 0; stderr, the
    standard error of difference over windows (None for one window); mean_change and max_change, mean and maximum over
    tokens of |loss - loss at shift 0|. Shifts end with a learned table.
    """
    train_length, limit = model.config.train_length, model.pos.max_length
    near = min(64, train_length // 4)
    length, rows = train_length - near, []
    ids = _windows(token_array(tokens), length + 1, windows)
    with torch.autocast(model.embedding.weight.device.type, enabled=False):
        base = _losses(model, ids, length)
        for first in sorted({0, near, train_length, 8 * train_length}):
            if limit is None or first + length <= limit:
                losses = _losses(model, ids, length, first)
                change = losses - base
                row = {"shift": first, "length": length, "nll": float(losses.mean())}
                row |= {"difference": float(change.mean()), "stderr": standard_error(change.mean(axis=1))}
                row |= {"mean_change": float(abs(change).mean()), "max_change": float(abs(change).max())}
                rows.append(row)
    return rows


def attention_by_distance(model: GPT, tokens: Tensor | np.ndarray, length: int, windows: int = 4) -> dict:
    """Mean attention weight by layer, head and distance (position of the query minus that of the key).

    Over up to `windows` windows of `length` tokens (at most a learned table's), without autocast. Returns edges,
    weights, windows and length. Bin i has the distances edges[i] to edges[i + 1] - 1; weights[layer][head][i] is the
    mean over all pairs of a query and a key in it. Raises ValueError for linear attention, which has no such weights.
    """
    if model.config.attention == "linear":
        raise ValueError("model.attention=linear: has no attention weights to look at, only softmax has")
    length = min(length, model.pos.max_length or length)
    edges, c, device = widening_edges(length), model.config, next(model.parameters()).device
    sums = torch.zeros(c.n_layer, c.n_head, len(edges) - 1, dtype=torch.float64)
    ids = _windows(token_array(tokens), length, windows)

    def add(module: Attention, inputs: tuple[Tensor, View]) -> None:
        q, k, _ = module.heads(*inputs)
        k, view = k.repeat_interleave(module.n_head // module.n_kv_head, dim=1), module.view(inputs[1])
        for start in range(0, length, ROWS):
            rows = slice(start, start + ROWS)
            part = view._replace(positions=view.positions[rows])
            weights = attention_weights(q[:, :, rows], k, part)[0]  # (H, rows, T), 0 at later keys
            distances = (part.positions[:, None] - part.key_positions).clamp(min=0).cpu()
            bin_of = torch.bucketize(distances, torch.tensor(edges[1:]), right=True).flatten()
            sums[module.layer].index_add_(1, bin_of, weights.flatten(1).cpu().double())

    with ExitStack() as hooks, torch.inference_mode(), evaluating(model), torch.autocast(device.type, enabled=False):
        for block in model.blocks:
            hooks.enter_context(block.attention.register_forward_pre_hook(add))
        for window in torch.from_numpy(ids):
            model(window[None].to(device), targets=torch.full((1, length), -100, device=device))  # no logits needed
    pairs = torch.tensor([sum(length - distance for distance in range(*ends)) for ends in pairwise(edges)])
    weights = (sums / (len(ids) * pairs)).tolist()
    return {"edges": edges, "weights": weights, "windows": len(ids), "length": length}


def _windows(tokens: np.ndarray, size: int, count: int, distinct: bool = True) -> np.ndarray:
    """`count` windows spread evenly over tokens, int64 (count, size); distinct: fewer where they would be the same."""
    if size > len(tokens):
        raise ValueError(f"a window of {size} tokens does not fit into the {len(tokens)} of the text; use more text")
    starts = np.linspace(0, len(tokens) - size, count).round().astype(np.int64)
    starts = np.unique(starts) if distinct else starts
    return tokens[starts[:, None] + np.arange(size)].astype(np.int64)


def _losses(model: GPT, ids: np.ndarray, scored: int, first_position: int = 0) -> np.ndarray:
    """Nats of predicting the last ids of each window: float64 (windows, scored), of ids (windows, T + 1)."""
    windows, size = ids.shape
    ends = size * np.arange(1, windows + 1)
    spans = np.stack((ends - size, ends - scored, ends), axis=1)
    (losses,) = score(model, ids.ravel(), [(size - 1, spans)], first_position=first_position)
    return losses.reshape(windows, scored)


PROBES = {  # of a model, a text's tokens and the longest length
    "recall": recall,
    "shift": lambda model, tokens, longest: shift(model, tokens),
    "attention": attention_by_distance,
}
