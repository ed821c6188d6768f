"""Linear attention (Katharopoulos et al. 2020), for model.attention=linear."""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 128  # tokens that are treated as a small quadratic attention


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
