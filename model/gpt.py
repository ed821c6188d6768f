"""GPT-2's network with an exchangeable position scheme. Shapes: B sequences, T tokens, D width, H heads, V ids."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import CHUNK, Biases, linear_attention, softmax_attention
from model.cache import Cache, KVCache, StateCache
from model.checks import check_memory, check_tensor, check_whole
from model.config import GPTConfig
from model.gelu import gelu
from model.graph import one_token_steps
from model.linear import Linear, linear
from model.loss import token_losses
from model.positions import build_scheme
from model.sampling import check_sampling, evaluating, sample


@dataclass(frozen=True)
class Step:
    """What one pass has in common for all layers."""

    biases: Biases
    rotate: Callable[[Tensor], Tensor]
    cache: Cache | None


class Attention(nn.Module):
    """Causal self-attention; grouped key and value heads where n_kv_head < n_head (Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.dropout, self.linear = layer, config.dropout, config.attention == "linear"
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.qkv = Linear(config.width, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=config.bias)
        self.out = Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, step: "Step") -> Tensor:
        B, T, D = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H + 2 Hkv, T, head_dim)
        qk, v = heads.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=1)
        y = self._linear(qk, v, step) if self.linear else self._softmax(qk, v, step)  # (B, H, T, head_dim)
        return F.dropout(self.out(y.transpose(1, 2).reshape(B, T, D)), self.dropout, self.training)

    def _softmax(self, qk: Tensor, v: Tensor, step: "Step") -> Tensor:
        q, k = step.rotate(qk).split((self.n_head, self.n_kv_head), dim=1)
        if step.cache is not None:
            k, v = step.cache.append(self.layer, k, v)
        return softmax_attention(q, k, v, step.biases, self.dropout if self.training else 0.0)

    def _linear(self, qk: Tensor, v: Tensor, step: "Step") -> Tensor:
        q, k = qk.split((self.n_head, self.n_kv_head), dim=1)
        k, v = (x.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for x in (k, v))
        held = step.cache is not None and step.cache.past > 0
        y, state = linear_attention(q, k, v, step.rotate, step.cache.states[self.layer] if held else None)
        if step.cache is not None:
            step.cache.states[self.layer] = state
        return y


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(gelu(self.up(x))), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, step: "Step") -> Tensor:
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): pre-LayerNorm blocks, tanh-GELU, output tied to the token embedding.

    The position scheme is all that differs between two models of the same shape; with the same seed even the initial
    weights outside it are equal.
    """

    flex_attention = False  # true: schemes whose bias goes by distance train with it (model/flex.py)

    def __init__(self, config: GPTConfig):
        super().__init__()
        if torch.get_default_device().type == "cpu":
            count = config.num_parameters()
            way_out = "use fewer layers or heads, a smaller head_dim or vocabulary"
            check_memory(4 * count, f"the model's {count:,} parameters", way_out)
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
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
        first_position: int = 0,
    ) -> Tensor:
        """Logits, or per-token losses.

        tokens: int64 (B, T). Without targets: logits (B, T, vocab_size). With targets, int64 (B, T), where
        targets[:, t] follows tokens[:, t]: negative log-likelihoods (B, T) in nats, 0 where the target is -100;
        float32, or float64 for a float64 model. With a cache, the tokens continue the ones it holds, and are appended;
        such a pass keeps no gradients.

        scaling_length: the sequence length that the frequency scalings `dynamic`, `longrope`, and those with an open
        factor go by, instead of the tokens so far. Without it their frequencies change as a sequence grows; a cached
        pass is then still equal to the full pass over the tokens so far, at the full pass's cost whenever they change
        (longrope: once; the others: at every step past the training length), since a key's rotation is not all that
        depends on them: deeper keys and values came from rows computed under the older ones.

        first_position: the position of tokens[:, 0], without a cache only. The frequencies go by the sequence's length
        all the same, not by its last position.

        Raises ValueError for shapes that do not fit, ids outside the vocabulary (checked on the CPU only: elsewhere it
        would stall every step), positions past a learned table and a full cache; the cache is then as it was.
        """
        self._check_batch(tokens)
        if targets is not None:
            check_tensor("targets", targets)
            if targets.shape != tokens.shape:
                raise ValueError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(tokens.shape)}")
            targets = targets.long()
        if scaling_length is not None:
            check_whole("scaling_length", scaling_length, open_end=", or None")
        check_whole("first_position", first_position, 0, 2**53)  # what float64 counts to
        if first_position and cache is not None:
            raise ValueError(f"first_position={first_position}: must be 0 with a cache, whose tokens start at 0")
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_tokens(tokens)
            if targets is not None:
                self.check_tokens(targets.masked_fill(targets == -100, 0))
        with contextlib.nullcontext() if cache is None else torch.no_grad():
            x = self._rows(tokens, cache, scaling_length, first_position)
            return self._logits(x) if targets is None else self._losses(x, targets)

    def _rows(self, tokens: Tensor, cache: Cache | None, scaling_length: int | None, first: int = 0) -> Tensor:
        """Rows after the last norm, (B, T, D), with or without a cache."""
        if cache is None:
            return self._pass(tokens, 0, scaling_length or tokens.shape[1], None, first)
        return self._cached_pass(tokens, cache, scaling_length)

    def _cached_pass(self, tokens: Tensor, cache: Cache, scaling_length: int | None) -> Tensor:
        cache.check(*tokens.shape)
        if scaling_length not in (None, cache.scaling_length):
            raise ValueError(f"scaling_length={scaling_length}: the cache was made for {cache.scaling_length}")
        length = cache.scaling_length or cache.length + tokens.shape[1]
        regime = self.pos.regime(length)
        passed = cache.begin(tokens, regime)
        x = self._pass(passed, cache.past, length, cache)
        cache.advance(passed, regime)
        return x[:, -tokens.shape[1] :]

    def _pass(self, tokens: Tensor, past: int, length: int, cache: Cache | None, first: int = 0) -> Tensor:
        """Rows after the last norm, (B, T, D), for the T tokens after `past` others, the first of all at `first`."""
        end = first + past + tokens.shape[1]
        self.pos.check_position(end - 1)
        positions = torch.arange(first, end, device=tokens.device)
        return self._layers(tokens, positions, positions[past:], length, cache)

    def fixed_step(self, token: Tensor, cache: KVCache) -> Tensor:
        """Logits (B, V) after token int64 (B, 1), by operations that are the same whatever the cache holds.

        The token's position is cache.newest, and counting it up is the caller's. See model/graph.py.
        """
        positions = torch.arange(cache.room, device=token.device)
        length = cache.scaling_length or cache.max_length
        return self._logits(self._layers(token, positions, cache.newest, length, cache)[:, -1])

    def _layers(self, tokens: Tensor, positions: Tensor, new: Tensor, length: int, cache: Cache | None) -> Tensor:
        """positions: int64 (Tk,), of all keys; new: (T,), of the tokens."""
        on_cpu = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
        # On the CPU the embedding's gradient stays rows until it joins that of the output matrix, a whole one anyway.
        rows = F.embedding(tokens, self.embedding.weight, sparse=on_cpu)
        x = self.dropout(self.pos.embed(rows, new))  # (B, T, D)
        newest = cache.newest if isinstance(cache, KVCache) else None
        biases = Biases(self.pos, positions, newest, self.flex_attention and self.training)
        step = Step(biases, self.pos.rotation(new, length), cache)
        for block in self.blocks:
            x = block(x, step)
        return self.norm(x)

    def _logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., vocab_size). The padding rows are cut off: their ids have no logit and no probability."""
        return linear(x, self.embedding.weight)[..., : self.config.vocab_size]

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        shared = (self.embedding.weight, self.config.vocab_size)
        if self.training:
            rows = token_losses(x.flatten(0, 1), shared[0], targets.flatten(), shared[1], torch.compiler.is_compiling())
            return rows.view_as(targets)
        scored = targets != -100  # evaluation often scores few of a window's tokens: the others need no logits
        losses = token_losses(x[scored], shared[0], targets[scored], shared[1])
        return losses.new_zeros(targets.shape).masked_scatter(scored, losses)

    def _check_batch(self, tokens: Tensor) -> None:
        check_tensor("tokens", tokens)
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must be (B, T) with B and T of at least 1, found {tuple(tokens.shape)}")
        if tokens.device != self.embedding.weight.device:
            raise ValueError(f"tokens are on {tokens.device}, the model is on {self.embedding.weight.device}")

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise ValueError unless every id is in [0, vocab_size)."""
        check_tensor("tokens", tokens)
        if tokens.is_meta or not tokens.numel():
            raise ValueError(f"at least one token is needed, found {tuple(tokens.shape)} on {tokens.device}")
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            found = low if low < 0 else high
            raise ValueError(f"token id {found} is outside the vocabulary (0 to {self.config.vocab_size - 1})")

    def new_cache(self, batch_size: int, max_length: int, scaling_length: int | None = None) -> Cache:
        """An empty cache for this model on its device, in the dtype its keys have (autocast's, where that is on).

        scaling_length: see forward; the length the sequence will have in the end is the usual choice.
        """
        weight, c = self.embedding.weight, self.config
        if c.attention == "linear":
            return StateCache(c.n_layer, batch_size, max_length, weight.device, scaling_length)
        device_type = weight.device.type
        autocast = torch.is_autocast_enabled(device_type) and weight.dtype == torch.float32
        dtype = torch.get_autocast_dtype(device_type) if autocast else weight.dtype
        shape = (c.n_layer, batch_size, c.n_kv_head, max_length, c.head_dim)
        return KVCache(shape, dtype, weight.device, scaling_length)

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
        scaling_length: int | None = None,
    ) -> Tensor:
        """Continue int64 (B, T) to (B, T + max_new_tokens), T at least 1.

        temperature 0 takes the likeliest id; otherwise one is drawn with `generator` from the top_k likeliest, or from
        the smallest set that holds top_p of the probability (Holtzman et al. 2020), or from both. With and without the
        cache the tokens are the same, but for ties that rounding decides. scaling_length: see forward. Dropout is off.
        Raises ValueError for settings out of range and, before any work, where a learned table is too short.
        """
        self._check_batch(tokens)
        check_whole("max_new_tokens", max_new_tokens, 0, 2**31 - 1)
        check_sampling(temperature, top_k, top_p, generator, tokens.device)
        if scaling_length is not None:
            check_whole("scaling_length", scaling_length, open_end=", or None")
        self.check_tokens(tokens)
        B, T = tokens.shape
        last = T + max_new_tokens - 2  # the last token drawn is never fed back
        if max_new_tokens:
            self.pos.check_position(last)
        cache = self.new_cache(B, last + 1, scaling_length) if use_cache and max_new_tokens else None
        text = F.pad(tokens.long(), (0, max_new_tokens))
        with torch.inference_mode(), evaluating(self):
            step = None
            for t in range(T, T + max_new_tokens):
                if step is None and cache is not None and cache.length:
                    step = one_token_steps(self, cache)
                if step:
                    logits = step(text[:, t - 1 : t])
                else:
                    logits = self._logits(self._rows(text[:, :t], cache, scaling_length)[:, -1])
                text[:, t : t + 1] = sample(logits, temperature, top_k, top_p, generator)
        return text

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
        if self.config.attention == "linear":  # a chunk of scores, the state read and the state written
            length = min(length, CHUNK) + self.config.head_dim
        return 2 * weights + 4 * self.config.n_layer * self.config.width * length
