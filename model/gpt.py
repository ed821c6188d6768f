"""GPT-2's network with an exchangeable position scheme.

B sequences, T tokens, D width, H heads (Hkv of keys and values), V ids. One forward pass serves training, evaluation,
prefill and decoding: only the positions differ.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import View, softmax_attention
from model.cache import Cache
from model.checks import check_ids, check_positions, check_whole
from model.config import GPTConfig
from model.linear import Linear, linear
from model.linear_attention import CHUNK, linear_attention
from model.positions import NOPE, build_scheme
from model.sampling import stream


class Attention(nn.Module):
    """Causal self-attention; grouped key and value heads where n_kv_head < n_head (Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.dropout, self.linear = layer, config.dropout, config.attention == "linear"
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        kind = config.layers[layer % len(config.layers)]
        self.nope, self.window = kind == "nope", config.window if kind == "window" else None
        scales = config.query_scale == "log" or (config.query_scale == "log_nope" and self.nope)
        self.log_scale = config.train_length if scales else None
        # 1 for queries that see train_length keys; drawn from no generator, so that all other weights stay the same.
        factor = 1 / math.log(max(2, config.train_length))
        self.ssmax = nn.Parameter(torch.full((config.n_head,), factor)) if config.query_scale == "ssmax" else None
        self.sinks = nn.Parameter(torch.zeros(config.n_head)) if config.sinks else None
        self.qkv = Linear(config.width, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=config.bias)
        self.out = Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, p: View) -> Tensor:
        q, k, v = self.heads(x, p)
        start = len(p.key_positions) - len(p.positions)  # tokens that the cache holds
        if self.linear:
            k, v = (x.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for x in (k, v))
            y, state = linear_attention(q, k, v, p.rotate, p.cache.states[self.layer] if start else None)
            if p.cache is not None:
                p.cache.states[self.layer] = state
        else:
            if p.cache is not None:
                k, v = p.cache.append(self.layer, start, k, v)
            y = softmax_attention(q, k, v, self.view(p), self.dropout * self.training)
        return F.dropout(self.out(y.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)

    def heads(self, x: Tensor, p: View) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, head_dim), keys and values (B, Hkv, T, head_dim); rotated, but for linear attention."""
        heads = self.qkv(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # (B, H + 2 Hkv, T, head_dim)
        qk, v = heads.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=1)
        qk = qk if self.linear or self.nope else p.rotate(qk)
        q, k = qk.split((self.n_head, self.n_kv_head), dim=1)
        if self.ssmax is not None:
            keys = len(p.key_positions)  # what is counted is keys, wherever their positions begin
            seen = torch.arange(keys - x.shape[1] + 1, keys + 1, device=x.device).float()
            q = q * (self.ssmax[:, None, None] * seen.clamp(max=self.window or math.inf).log()[:, None]).to(q.dtype)
        elif self.log_scale is not None:  # Llama 4's attn_scale = 0.1, with its floor_scale = train_length
            q = q * (1 + 0.1 * ((p.positions.float() + 1) / self.log_scale).floor().log1p()[:, None]).to(q.dtype)
        return q, k, v

    def view(self, p: View) -> View:
        """What the queries of this layer see."""
        return p._replace(scheme=NOPE if self.nope else p.scheme, window=self.window, sinks=self.sinks)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, p: View) -> Tensor:
        x = x + self.attention(self.attention_norm(x), p)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): pre-LayerNorm blocks, tanh-GELU, output tied to the token embedding.

    With the same seed, models of one shape have the same initial weights outside the position scheme.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        rows = -(-config.vocab_size // 64) * 64  # the next multiple of 64, which matrix products are fastest at
        self.embedding = nn.Embedding(rows, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # keeps the residual stream's variance independent of depth (GPT-2, section 2.3)
            for projection in (block.attention.out, block.mlp.down):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * config.n_layer))
        self.pos = build_scheme(config)
        self.pos.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        scaling_length: int | None = None,
        positions: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) after int64 tokens (B, T); or with int64 targets (B, T), losses (B, T).

        targets[:, t] follows tokens[:, t]. Losses are nats, 0 where the target is -100; float32, or float64 for a
        float64 model. With a cache the tokens continue those it holds, and no gradients are kept. scaling_length: the
        sequence length that frequency scalings go by, instead of the tokens so far. positions: int64 (T,), growing,
        instead of 0, 1, ...; without a cache only. last_only: logits (B, 1, V), after the last token; without targets.

        Raises ValueError for shapes that do not fit, ids outside the vocabulary (on the CPU only: elsewhere looking
        would stall every step), positions past a learned table and a full cache; the cache then keeps what it holds.
        """
        check_ids("tokens", tokens, self)
        if targets is not None:
            if targets.shape != tokens.shape:
                raise ValueError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(tokens.shape)}")
            check_ids("targets", targets.masked_fill(targets == -100, 0), self)
        check_whole("scaling_length", scaling_length, optional=True)
        if cache is not None and (positions is not None or scaling_length not in (None, cache.scaling_length)):
            raise ValueError("positions and scaling_length are the cache's own: leave them out with a cache")
        if positions is not None:
            check_positions(positions, tokens, gaps=not (self.pos.biased or self.config.window))
            positions = positions.to(tokens.device, non_blocking=True)
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            length, start, passed = scaling_length or tokens.shape[1], 0, tokens
            if cache is not None:
                length = cache.scaling_length or cache.length + tokens.shape[1]
                regime = self.pos.regime(length)
                passed, start = cache.pending(tokens, regime)
            end = start + passed.shape[1]
            if self.pos.max_length is not None:
                self.pos.check_position(end - 1 if positions is None else int(positions[-1]))
            key_positions = torch.arange(end, device=tokens.device) if positions is None else positions
            positions = key_positions[start:]
            p = View(self.pos, positions, key_positions, self.pos.rotation(positions, length), cache, {})
            x = F.dropout(self.pos.embed(self.embedding(passed), positions), self.config.dropout, self.training)
            for block in self.blocks:
                x = block(x, p)
            if cache is not None:
                cache.length, cache.regime = end, regime
            x = self.norm(x[:, -1 if last_only else -tokens.shape[1] :])  # (B, T, D)
            if targets is not None:  # evaluation often scores few of many
                scored = slice(None) if self.training else targets.flatten() != -100
                x, wanted = x.flatten(0, 1)[scored], targets.flatten()[scored].long()
            logits = linear(x, self.embedding.weight)[..., : self.config.vocab_size]  # padding rows have no logit
            if targets is None:
                return logits
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = F.cross_entropy(logits, wanted, ignore_index=-100, reduction="none")
            if self.training:
                return losses.view_as(targets)
            return losses.new_zeros(targets.shape).masked_scatter(targets != -100, losses)

    def new_cache(self, batch_size: int, max_length: int, scaling_length: int | None = None) -> Cache:
        """An empty cache on the model's device, in the dtype its keys have (autocast's, where that is on).

        scaling_length: see forward; the length that the sequence will have in the end is the usual choice.
        """
        return Cache(self, batch_size, max_length, scaling_length)

    def generate(self, tokens: Tensor, max_new_tokens: int, **settings) -> Tensor:
        """Continue int64 (B, T) to (B, T + max_new_tokens); other settings and errors as in `sampling.stream`."""
        check_ids("tokens", tokens, self)
        check_whole("max_new_tokens", max_new_tokens, 0)
        new = stream(self, list(tokens), max_new_tokens, **settings) if max_new_tokens else ()
        return torch.cat((tokens, *(ids[:, None] for ids in new)), dim=1)

    def optimizer_groups(self, weight_decay: float, pos_lr_ratio: float = 1.0) -> list[dict]:
        """Decay on matrices only, and never on the position scheme: that would bend comparisons between schemes.

        `lr_ratio`: what a group's learning rate is to be multiplied by; pos_lr_ratio for the scheme's own weights.
        """
        own = list(self.pos.parameters())
        others = [parameter for name, parameter in self.named_parameters() if not name.startswith("pos.")]
        groups = [
            {"params": [parameter for parameter in others if parameter.ndim >= 2], "weight_decay": weight_decay},
            {"params": [parameter for parameter in others if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        if pos_lr_ratio == 1:
            groups[1]["params"] += own
        elif own:
            groups.append({"params": own, "weight_decay": 0.0, "lr_ratio": pos_lr_ratio})
        return groups

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations per token of a forward pass over `length` tokens; a training step does thrice that.

        Matrix products only, a multiply-add as two, masked keys included (Chowdhery et al. 2022, appendix B).
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear | nn.Embedding))
        if self.config.attention == "linear":  # a chunk of scores, the state read and the state written
            length = min(length, CHUNK) + self.config.head_dim
        return 2 * weights + 4 * self.config.n_layer * self.config.width * length
