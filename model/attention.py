"""Causal attention: queries (B, H, Tq, head_dim), keys and values (B, Hkv, Tk, head_dim), their positions given.

Positions are int64 (Tq,) and (Tk,), each counting up by one. The queries have the last of the keys' positions, and a
query sees the keys up to its own: with a cache there are fewer queries than keys.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Cache
from model.positions import PositionScheme

BLOCK = 2**23  # numbers of a bias that exist at once, 32 MiB of float32; for 12 heads of 8,192 tokens all are 3 GB


class View(NamedTuple):
    """What all layers of a pass share. window and sinks are a layer's own, and so is NOPE as its scheme."""

    scheme: PositionScheme
    positions: Tensor  # int64 (Tq,), of the queries, which are the tokens passed
    key_positions: Tensor  # int64 (Tk,), of all tokens so far
    rotate: Callable[[Tensor], Tensor] | None = None  # queries or keys -> the same, turned by their positions
    cache: Cache | None = None
    shared: dict | None = None  # biases of earlier layers of a pass, by block of queries
    block: int | None = None  # where its queries begin, to share their bias with other layers; None: not to be shared
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None: all before it
    sinks: Tensor | None = None  # (H,): logits in the softmax's denominator whose value is 0 (gpt-oss, 2025)

    def bias(self, q: Tensor) -> Tensor:
        """The scheme's bias, -inf at keys not seen: (1 or B, 1 or H, Tq, Tk) in q's dtype. Nothing else masks.

        With sinks (1 or B, H, Tq, 1 + Tk): the first column is theirs, for a key of zeros before the others.
        """
        shared = {} if self.shared is None or self.block is None or self.scheme.bias_sees_queries else self.shared
        key = self.scheme, self.window, self.block, len(self.positions)  # blocks of layers may differ in size
        if key not in shared:
            hidden = self.key_positions > self.positions[:, None]
            if self.window is not None:
                hidden = hidden | (self.key_positions <= self.positions[:, None] - self.window)
            bias = self.scheme.bias(q, self.positions, self.key_positions).to(q.dtype).masked_fill(hidden, -math.inf)
            shared[key] = bias if bias.ndim == 4 else bias[None]
        if self.sinks is None:
            return shared[key]
        sinks = self.sinks.to(q.dtype)[None, :, None, None].expand(len(shared[key]), -1, len(self.positions), 1)
        return torch.cat((sinks, shared[key].expand(-1, q.shape[1], -1, -1)), dim=-1)


def attention_weights(q: Tensor, k: Tensor, view: View) -> Tensor:
    """softmax(q kᵀ / √head_dim + bias), (B, H, Tq, Tk), 0 at keys not seen. q and k as rotated, with as many heads."""
    k = k if view.sinks is None else F.pad(k, (0, 0, 1, 0))
    weights = ((q / math.sqrt(q.shape[-1])) @ k.mT + view.bias(q)).softmax(dim=-1)
    return weights if view.sinks is None else weights[..., 1:]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, view: View, dropout: float = 0.0) -> Tensor:
    """softmax(q kᵀ / √head_dim + bias) v, (B, H, Tq, head_dim).

    A bias goes in blocks of queries, each with the keys it sees, so that no large bias (H, Tq, Tk) exists whole.
    """
    scheme, positions, key_positions, *_, window, sinks = view
    H, Tq, Tk, grouped = q.shape[1], q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    # In bfloat16 a CPU trains three times as fast on plain products as on the fused kernel. Measurements keep the
    # kernel, which rounds the scores once less.
    plain = scheme.weighs_values or (q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad)
    if not (scheme.biased or window or sinks is not None or plain):
        # is_causal aligns its triangle with the first key; a chunk after cached tokens needs the mask written out.
        mask = view.bias(q) if 1 < Tq < Tk else None
        causal = mask is None and Tq > 1
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped)
    if grouped and plain:
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    # Plain products form the weights of every sequence, about four such blocks at a time; larger ones are no faster.
    rows = min(256, max(16, BLOCK // (4 * len(q) * H * Tk))) if plain else max(16, BLOCK // (H * Tk))
    rows = min(rows, max(16, window)) if window else rows  # most keys of a larger block are hidden
    outputs = []
    for start in range(0, Tq, rows):
        block, past = slice(start, start + rows), Tk - Tq + start
        seen = slice(max(0, past + 1 - window) if window else 0, past + min(rows, Tq - start))
        part, keys, values = q[:, :, block], k[:, :, seen], v[:, :, seen]
        share = start if H * Tq * Tk <= BLOCK else None
        at = view._replace(positions=positions[block], key_positions=key_positions[seen], block=share)
        if plain:
            weights = F.dropout(attention_weights(part, keys, at).to(v.dtype), dropout)
            output = weights @ values
            if scheme.weighs_values:
                output = output + scheme.values(weights, at.positions, at.key_positions)
            outputs.append(output)
        else:
            bias = at.bias(part)
            if sinks is not None:
                keys, values = (F.pad(x, (0, 0, 1, 0)) for x in (keys, values))
            outputs.append(F.scaled_dot_product_attention(part, keys, values, bias, dropout, enable_gqa=grouped))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
