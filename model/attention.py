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

from model.positions import PositionScheme

BLOCK = 2**23  # numbers of a bias that exist at once, 32 MiB of float32; for 12 heads of 8,192 tokens all are 3 GB
CHUNK = 128  # tokens that linear attention treats as a small quadratic attention


class View(NamedTuple):
    """What the queries of a layer see, and what a scheme adds to it."""

    scheme: PositionScheme
    positions: Tensor  # int64 (Tq,), of the queries
    key_positions: Tensor  # int64 (Tk,)
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None: all before it
    sinks: Tensor | None = None  # (H,): logits in the softmax's denominator whose value is 0 (gpt-oss, 2025)
    shared: dict | None = None  # biases of earlier layers of a pass, by block of queries

    def bias(self, q: Tensor, block: int | None = None) -> Tensor:
        """The scheme's bias, -inf at keys not seen: (1 or B, 1 or H, Tq, Tk) in q's dtype. Nothing else masks.

        With sinks (1 or B, H, Tq, 1 + Tk): the first column is theirs, for a key of zeros before the others. block:
        where its queries begin, to share the bias with other layers; None: not to be shared.
        """
        shared = {} if self.shared is None or block is None or self.scheme.bias_sees_queries else self.shared
        key = self.scheme, self.window, block
        if key not in shared:
            shared[key] = self._masked_bias(q)
        if self.sinks is None:
            return shared[key]
        sinks = self.sinks.to(q.dtype)[None, :, None, None].expand(len(shared[key]), -1, len(self.positions), 1)
        return torch.cat((sinks, shared[key].expand(-1, q.shape[1], -1, -1)), dim=-1)

    def _masked_bias(self, q: Tensor) -> Tensor:
        scheme, positions, key_positions, window, *_ = self
        hidden = key_positions > positions[:, None]
        if window is not None:
            hidden = hidden | (key_positions <= positions[:, None] - window)
        bias = scheme.bias(q, positions, key_positions) if scheme.biased else q.new_zeros((1, *hidden.shape))
        bias = bias.to(q.dtype).masked_fill(hidden, -math.inf)
        return bias if bias.ndim == 4 else bias[None]


def attention_weights(q: Tensor, k: Tensor, view: View, block: int | None = None) -> Tensor:
    """softmax(q kᵀ / √head_dim + bias), (B, H, Tq, Tk), 0 at keys not seen. q and k as rotated, with as many heads."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    if view.sinks is not None:
        scores = F.pad(scores, (1, 0))
    weights = (scores + view.bias(q, block)).softmax(dim=-1)
    return weights if view.sinks is None else weights[..., 1:]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, view: View, dropout: float = 0.0) -> Tensor:
    """softmax(q kᵀ / √head_dim + bias) v, (B, H, Tq, head_dim).

    A bias goes in blocks of queries, each with the keys it sees, so that no large bias (H, Tq, Tk) exists whole.
    """
    scheme, positions, key_positions, window, sinks, _ = view
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
        at = view._replace(positions=positions[block], key_positions=key_positions[seen])
        share = start if H * Tq * Tk <= BLOCK else None
        if plain:
            weights = F.dropout(attention_weights(part, keys, at, share).to(v.dtype), dropout)
            output = weights @ values
            if scheme.weighs_values:
                output = output + scheme.values(weights, at.positions, at.key_positions)
            outputs.append(output)
        else:
            bias = at.bias(part, share)
            if sinks is not None:
                keys, values = (F.pad(x, (0, 0, 1, 0)) for x in (keys, values))
            outputs.append(F.scaled_dot_product_attention(part, keys, values, bias, dropout, enable_gqa=grouped))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor], state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Attention whose cost grows with T instead of T² (Katharopoulos et al. 2020), with RoPE (Su et al. 2021, eq. 19).

    With φ(x) = elu(x) + 1 the output at m is Σ_n (R_m φ(q_m))·(R_n φ(k_n)) v_n / Σ_n φ(q_m)·φ(k_n), n ≤ m. The
    normaliser, which has to stay positive, is not rotated. q, k, v: not yet rotated, as many heads each. state: sums
    over earlier tokens, R φ(k) vᵀ (B, H, head_dim, head_dim) and φ(k) (B, H, head_dim), in float32 or better. Returns
    the output in q's dtype and the state after these tokens.
    """
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.promote_types(q.dtype, torch.float32)
        # exp below 0, x + 1 above: elu(x) + 1 would round to 0 below -17, and with it the normaliser.
        fq, fk = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q.to(wide), k.to(wide)))
        rq, rk, values = rotate(fq), rotate(fk), v.to(wide)
        B, H, T, width = q.shape
        sums, norms = state or (rk.new_zeros(B, H, width, width), rk.new_zeros(B, H, width))
        outputs = []
        for start in range(0, T, CHUNK):
            at = (slice(None), slice(None), slice(start, start + CHUNK))
            weights = (rq[at] @ rk[at].mT).tril()
            normaliser = fk[at].cumsum(dim=2) + norms[:, :, None]  # (B, H, chunk, head_dim)
            outputs.append((weights @ values[at] + rq[at] @ sums) / (fq[at] * normaliser).sum(dim=-1, keepdim=True))
            sums, norms = sums + rk[at].mT @ values[at], normaliser[:, :, -1]
        return torch.cat(outputs, dim=2).to(q.dtype), (sums, norms)
