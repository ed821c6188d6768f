"""GPT-2's network with an exchangeable position scheme. Shapes: B sequences, T tokens, D width, H heads, V ids."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache
from model.config import GPTConfig
from model.positions import build_scheme
from model.sampling import sample


class Attention(nn.Module):
    """Causal self-attention; grouped key and value heads where n_kv_head < n_head (Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.dropout = layer, config.dropout
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.qkv = nn.Linear(config.width, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotate: Callable, mask: Tensor | None, causal: bool, cache: KVCache | None) -> Tensor:
        B, T, D = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H + 2 Hkv, T, head_dim)
        qk, v = heads.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=1)
        q, k = rotate(qk).split((self.n_head, self.n_kv_head), dim=1)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.n_kv_head != self.n_head,
        )  # (B, H, T, head_dim)
        return self.residual_dropout(self.out(y.transpose(1, 2).reshape(B, T, D)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual_dropout(self.down(F.gelu(self.up(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotate: Callable, mask: Tensor | None, causal: bool, cache: KVCache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate, mask, causal, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): pre-LayerNorm blocks, tanh-GELU, output tied to the token embedding.

    The position scheme is all that differs between two models of the same shape; with the same seed even the initial
    weights outside it are equal.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.apply(self._init_weights)
        for block in self.blocks:  # keeps the residual stream's variance independent of depth (GPT-2, section 2.3)
            for projection in (block.attention.out, block.mlp.down):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * config.n_layer))
        self.pos = build_scheme(config)
        self.pos.reset_parameters()

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits, or per-token losses.

        tokens: int64 (B, T). Without targets: logits (B, T, vocab_size). With targets, int64 (B, T), where
        targets[:, t] follows tokens[:, t]: negative log-likelihoods (B, T) in nats, 0 where the target is -100;
        float32, or float64 for a float64 model. With a cache, the tokens continue the ones it holds, and are appended;
        such a pass keeps no gradients. Raises ValueError for shapes that do not fit, ids outside the vocabulary
        (checked on the CPU only: elsewhere it would stall every step), positions past a learned table and a full
        cache; the cache is then as it was.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be (B, T) with T of at least 1, found {tuple(tokens.shape)}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_tokens(tokens)
        if cache is None:
            return self._forward(tokens, targets, None)
        cache.check(*tokens.shape)
        with torch.no_grad():
            out = self._forward(tokens, targets, cache)
        cache.advance(tokens.shape[1])
        return out

    def _forward(self, tokens: Tensor, targets: Tensor | None, cache: KVCache | None) -> Tensor:
        past, T = cache.length if cache is not None else 0, tokens.shape[1]
        self.pos.check_position(past + T - 1)
        key_positions = torch.arange(past + T, device=tokens.device)
        query_positions = key_positions[past:]

        x = self.dropout(self.pos.embed(self.embedding(tokens), query_positions))  # (B, T, D)
        rotate = self.pos.rotation(query_positions)
        bias = self.pos.bias(query_positions, key_positions)
        mask, causal = _attention_mask(query_positions, key_positions, past, bias)
        for block in self.blocks:
            x = block(x, rotate, mask, causal, cache)
        x = self.norm(x)
        if targets is None:
            return self._logits(x)
        return self._losses(x, targets)

    def _logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., vocab_size). The padding rows are cut off: their ids have no logit and no probability."""
        return F.linear(x, self.embedding.weight)[..., : self.config.vocab_size]

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        if not self.training:  # evaluation often scores few of a window's tokens: the others need no logits
            scored = targets != -100
            losses = torch.zeros(targets.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            if self.embedding.weight.dtype != torch.float64:
                losses = losses.float()
            losses[scored] = _cross_entropy(self._logits(x[scored]), targets[scored]).to(losses.dtype)
            return losses
        return _cross_entropy(self._logits(x).flatten(0, 1), targets.flatten()).view_as(targets)

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise ValueError unless every id is in [0, vocab_size)."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be integers (int64), found {tokens.dtype}")
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary (0 to {self.config.vocab_size - 1})"
            )

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for this model on its device, in the dtype its keys have (autocast's, where that is on)."""
        weight, c = self.embedding.weight, self.config
        device_type = weight.device.type
        autocast = torch.is_autocast_enabled(device_type) and weight.dtype == torch.float32
        dtype = torch.get_autocast_dtype(device_type) if autocast else weight.dtype
        return KVCache(c.n_layer, batch_size, c.n_kv_head, max_length, c.head_dim, dtype, weight.device)

    @torch.inference_mode()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue int64 (B, T) to (B, T + max_new_tokens), T at least 1.

        temperature 0 takes the likeliest id; otherwise one is drawn with `generator` from the top_k likeliest, or from
        the smallest set that holds top_p of the probability (Holtzman et al. 2020), or from both. With and without the
        cache the tokens are the same. Dropout is off. Raises ValueError for settings out of range and, before any
        work, where a learned table is too short.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be (B, T) with T of at least 1, found {tuple(tokens.shape)}")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be a whole number of at least 0")
        self.check_tokens(tokens)
        B, T = tokens.shape
        last = T + max_new_tokens - 2  # the last token drawn is never fed back
        if max_new_tokens:
            self.pos.check_position(last)
        cache = self.new_cache(B, last + 1) if use_cache and max_new_tokens else None
        was_training = self.training
        self.eval()
        try:
            chunk = tokens
            for _ in range(max_new_tokens):
                logits = self(chunk, cache=cache)[:, -1]
                following = sample(logits, temperature, top_k, top_p, generator)
                tokens = torch.cat((tokens, following), dim=1)
                chunk = tokens if cache is None else following
        finally:
            self.train(was_training)
        return tokens

    def optimizer_groups(self, weight_decay: float) -> list[dict]:
        """Decay on matrices only: not on norms, biases, or anything of the position scheme.

        GPT-2's recipe decays the position table too; here that would bend the comparison between schemes.
        """
        of_scheme = {id(parameter) for parameter in self.pos.parameters()}
        decayed, kept = [], []
        for parameter in self.parameters():
            (decayed if parameter.ndim >= 2 and id(parameter) not in of_scheme else kept).append(parameter)
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]

    def num_parameters(self) -> int:
        """All trained numbers; the tied embedding once, the vocabulary's padding included."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations a token of a forward pass over `length` tokens; a training step does thrice that.

        Matrix products only, a multiply-add as two; attention's two products over all `length` keys, although half of
        them are masked (Chowdhery et al. 2022, appendix B). Position schemes add too little to count.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        weights += self.embedding.weight.numel()  # as the output matrix; looking rows up is no arithmetic
        return 2 * weights + 4 * self.config.n_layer * self.config.width * length


def _attention_mask(
    query_positions: Tensor, key_positions: Tensor, past: int, bias: Tensor | None
) -> tuple[Tensor | None, bool]:
    """The mask for scaled_dot_product_attention, (Tq, Tk) bool or (H, Tq, Tk) float32, or None, and its is_causal flag.

    A key may be seen if its position is not past the query's. `is_causal` is used for square scores only: with fewer
    queries than keys it would align the triangle with the first key, not the last.
    """
    T = query_positions.shape[0]
    if bias is None and past == 0:
        return None, T > 1
    if bias is None and T == 1:
        return None, False
    visible = key_positions <= query_positions[:, None]  # (Tq, Tk)
    return visible if bias is None else bias.masked_fill(~visible, -math.inf), False


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target), from log-sum-exp in float32 (float64 for float64 logits); 0 where the target is -100."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
