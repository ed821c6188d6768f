"""Causal attention as functions of queries (B, H, Tq, head_dim), keys and values (B, Hkv, Tk, head_dim).

The queries are the last Tq of the Tk positions: with a cache there are fewer queries than keys.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model import flex
from model.positions import PositionScheme

# The largest block of biases that is formed at once, in numbers: 32 MiB of float32. A bias for all of
# 12 heads and 8,192 tokens would be a hundred times that.
BLOCK = 2**23
# Tokens that linear attention treats as a small quadratic attention before their sums join the state.
CHUNK = 128


def _plain_is_faster(q: Tensor) -> bool:
    """In bfloat16 a CPU trains three times as fast on plain matrix products as on its fused kernel.

    They round the scores once more, so that a pass without gradients, by which models are measured, keeps that one.
    """
    trains = torch.is_grad_enabled() and q.requires_grad
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and trains


class Biases:
    """What a pass adds to its scores: the scheme's bias, and -inf where a key is later than the query.

    positions: int64 (Tk,), of the keys; the queries have the last of them. newest: int64 (1,), the position of a single
    query that is not the last of them: keys past it are room not yet filled. flexible: FlexAttention where it goes.
    """

    def __init__(self, scheme: PositionScheme, positions: Tensor, newest: Tensor | None = None, flexible: bool = False):
        self.scheme, self.positions, self.newest, self.flexible = scheme, positions, newest, flexible
        # For the next layer, where it is one block and does not depend on the layer, and what it is good for.
        self.kept, self.kind = None, None

    def where(self, start: int, part: int, Tq: int) -> tuple[Tensor, Tensor]:
        """Positions of `part` of the Tq queries from `start` on, and of the keys that they may see."""
        seen = len(self.positions) - Tq + start + part
        at = self.positions[seen - part : seen] if self.newest is None else self.newest
        return at, self.positions[:seen]

    def __call__(self, q: Tensor, start: int, Tq: int) -> Tensor:
        """For a part of the Tq queries, (B, H, rows, head_dim), from `start` on: (1 or B, 1 or H, rows, seen keys)."""
        kind = q.dtype, torch.is_grad_enabled()
        shared = q.shape[2] == Tq and (self.scheme.shared or not self.scheme.biased)
        if shared and kind == self.kind:
            return self.kept
        bias = masked_bias(q, self.scheme, *self.where(start, q.shape[2], Tq))
        if shared and not bias.requires_grad:  # else layers that are run again for their gradients would share a graph
            self.kept, self.kind = bias, kind
        return bias


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, biases: Biases, dropout: float = 0.0) -> Tensor:
    """softmax(q kᵀ / √head_dim + bias) v, (B, H, Tq, head_dim), each query seeing the keys up to its own position.

    A biased scheme is evaluated in blocks of queries, so that no (H, Tq, Tk) bias exists at once; each block stops at
    the last key it can see.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    scheme = biases.scheme
    H, grouped = q.shape[1], q.shape[1] != k.shape[1]
    if biases.flexible and scheme.shared and Tq == Tk and Tk % flex.BLOCK == 0 and not dropout:
        return flex.flex_attention(q, k, v, scheme.by_distance(torch.arange(Tk, device=q.device)))
    plain = scheme.weighs_values or _plain_is_faster(q)
    if not scheme.biased and not plain:
        # is_causal would align its triangle with the first key, not the last
        mask = biases(q, 0, Tq) if biases.newest is not None or 1 < Tq < Tk else None
        causal = mask is None and Tq > 1
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped)
    if plain and grouped:
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    # Where the weights have to be formed, every sequence has its own, and there are about four such blocks at a time.
    rows = max(16, BLOCK // (H * Tk * (4 * len(q) if scheme.weighs_values else 1)))
    rows = min(256, rows) if plain else rows  # larger products are not faster, and have more keys that no query sees
    blocks = []
    for start in range(0, Tq, rows):
        part = q[:, :, start : start + rows]
        bias = biases(part, start, Tq)
        keys, values = (x[:, :, : bias.shape[-1]] for x in (k, v))
        if not plain:
            blocks.append(F.scaled_dot_product_attention(part, keys, values, bias, dropout, enable_gqa=grouped))
            continue
        weights = F.dropout(_scores(part, keys, bias).softmax(dim=-1), dropout).to(q.dtype)
        blocks.append(weights @ values)
        if scheme.weighs_values:
            blocks[-1] = blocks[-1] + scheme.values(weights, *biases.where(start, part.shape[2], Tq))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def softmax_weights(q: Tensor, k: Tensor, scheme: PositionScheme, at: Tensor, key_positions: Tensor) -> Tensor:
    """softmax(q kᵀ / √head_dim + bias), (B, H, Tq, Tk) in float32 or better: what softmax_attention weighs values with.

    q and k as rotated, as many heads each. at, key_positions: int64 (Tq,) and (Tk,); a later key's weight is 0.
    """
    scores = _scores(q, k, masked_bias(q, scheme, at, key_positions))
    return scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))


def _scores(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    B, H = q.shape[:2]
    bias = bias[0] if bias.shape[:2] == (1, 1) else bias.expand(B, H, -1, -1).flatten(0, 1)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=1 / math.sqrt(q.shape[-1]))
    return scores.unflatten(0, (B, H))


def masked_bias(q: Tensor, scheme: PositionScheme, at: Tensor, key_positions: Tensor) -> Tensor:
    """The scheme's bias, and -inf where a key is later than the query: (1 or B, 1 or H, Tq, Tk) in q's dtype."""
    if scheme.shared:  # and masked
        return scheme.bias(q, at, key_positions)[None]
    later = key_positions > at[:, None]
    if scheme.biased:
        bias = scheme.bias(q, at, key_positions)
    else:
        bias = torch.zeros((1, *later.shape), dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(later, -math.inf).to(q.dtype)
    return bias if bias.ndim == 4 else bias[None]


def _elu_plus_one(x: Tensor) -> Tensor:
    """exp(x) below 0, x + 1 above: elu(x) + 1 would round to 0 below -17, and with it the normaliser."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention(q: Tensor, k: Tensor, v: Tensor, rotate, state: tuple[Tensor, Tensor] | None = None):
    """Attention whose cost grows with T instead of T² (Katharopoulos et al. 2020), with RoPE (Su et al. 2021, eq. 19).

    Feature map φ(x) = elu(x) + 1. The output of position m is Σ_n (R_m φ(q_m))·(R_n φ(k_n)) v_n / Σ_n φ(q_m)·φ(k_n),
    n ≤ m: the rotation acts after the feature map, and the normaliser, which has to stay positive, is not rotated.
    q, k, v not yet rotated, as many heads each. state: the sums over all earlier tokens, of R φ(k) vᵀ
    (B, H, head_dim, head_dim) and of φ(k) (B, H, head_dim). Returns the output, (B, H, T, head_dim) in q's dtype, and
    the state after these tokens. Sums are kept in float32 or better, outside autocast.
    """
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        features_q, features_k = (_elu_plus_one(x.to(dtype)) for x in (q, k))
        turned_q, turned_k, values = rotate(features_q), rotate(features_k), v.to(dtype)
        if state is None:
            shape = (*q.shape[:2], q.shape[3])
            state = values.new_zeros(*shape, q.shape[3]), values.new_zeros(shape)
        sums, norms = state
        outputs = []
        for start in range(0, q.shape[2], CHUNK):
            part = slice(start, start + CHUNK)
            rq, rk, x = turned_q[:, :, part], turned_k[:, :, part], values[:, :, part]
            scores = (rq @ rk.mT).tril()
            normaliser = features_k[:, :, part].cumsum(dim=2) + norms[:, :, None]  # (B, H, chunk, head_dim)
            outputs.append((scores @ x + rq @ sums) / (features_q[:, :, part] * normaliser).sum(dim=-1, keepdim=True))
            sums, norms = sums + rk.mT @ x, normaliser[:, :, -1]
        return torch.cat(outputs, dim=2).to(q.dtype), (sums, norms)
