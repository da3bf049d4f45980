"""A decoder as a function from tokens and past keys and values to logits and new keys and values: what is exported.

Knows no slots and no runtime. Legend: B rows, S tokens of each, P past tokens of each, T = B * S, N wanted tokens,
H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels import quantized_weights
from kernels.operands import Norm, Scores
from kernels.quantized_weights import Weight
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.runtime.session import Call, Computed


@dataclass(slots=True)
class LayerPast:
    """Keys and values of a layer: what an attention reads instead of a pool, and what it leaves there."""

    tokens: int
    """S."""
    keys: Tensor
    """[B, K, P, D]."""
    values: Tensor
    new_keys: Tensor | None = None
    """[B, K, S, D]."""
    new_values: Tensor | None = None


class PastDecoder(nn.Module):
    """A `Decoder` that keeps nothing between calls. Past tokens of a row are at places 0, 1, ... of its past, in order;
    what is behind them is masked."""

    def __init__(self, decoder: Decoder) -> None:
        """The decoder's operations are `DenseOps`."""
        super().__init__()
        self.decoder = decoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, logits_at: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """input_ids, position_ids int64 [B, S]; attention_mask int64 [B, P + S]: 1 for tokens, 0 for padding; logits_at
        int64 [N]: places in the flattened tokens; past: keys and values [B, K, P, D] of each layer in turn.

        -> logits float32 [N, V], then the new keys and values [B, K, S, D] of each layer in turn.
        """
        model, positions = self.decoder, position_ids.flatten()
        tokens = input_ids.shape[1]
        layers = [LayerPast(tokens, keys, values) for keys, values in zip(past[::2], past[1::2], strict=True)]
        step = StepTensors(
            token_ids=input_ids.flatten(),
            positions=positions,
            ropes=model.ropes(lambda cos, sin: RopeTables(cos[positions], sin[positions])),
            slot_mapping=positions,
            plans={
                window: score_bias(attention_mask, position_ids, window, model.embedding.dtype)
                for window in set(model.config.windows)
            },
            sampled=logits_at,
        )
        pools: list[Any] = layers
        x, _ = model.forward(step, pools)
        return model.logits(x).float(), *new_past(layers)


class NetworkSession:
    """A `DecoderSession` of a function with the signature of `PastDecoder.forward`."""

    def __init__(self, forward: Callable[..., Sequence[Tensor]]) -> None:
        self._forward = forward

    def compute(self, call: Call) -> Computed:
        """Compute the tokens of a call."""
        logits, *new = self._forward(*call.tokens, call.logits_at, list(call.past))
        return Computed(logits, new)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of [B, K, H / K, S, P + S]; sinks [H]: as in `Scores`."""
    if sinks is None:
        return scores.softmax(4)
    sink = sinks.to(scores.dtype).reshape(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:4], 1)
    return torch.cat((scores, sink), 4).softmax(4)[..., :-1]


def new_past(layers: list[LayerPast]) -> list[Tensor]:
    """The new keys and values of each layer in turn."""
    tensors = [tensor for layer in layers for tensor in (layer.new_keys, layer.new_values)]
    return [tensor for tensor in tensors if tensor is not None]


def score_bias(attention_mask: Tensor, position_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of each token: 0, or a very negative number for what it does not see
    [B, 1, S, P + S]. A token sees itself in any case, so that padding computes finite numbers."""
    tokens = position_ids.shape[1]
    past = attention_mask.shape[1] - tokens
    queries = position_ids[:, :, None]
    places = torch.arange(past, device=position_ids.device).expand(position_ids.shape[0], past)
    keys = torch.cat((places, position_ids), 1)[:, None]
    own = torch.cat((torch.zeros(tokens, past, dtype=torch.bool), torch.eye(tokens, dtype=torch.bool)), 1)
    seen = (attention_mask[:, None] > 0) & (keys <= queries)
    if window is not None:
        seen = seen & (keys > queries - window)
    # Not minus infinity: a runtime may compute 0 * inf where it fuses the mask.
    least = torch.finfo(dtype).min
    return torch.where(seen | own[None], 0.0, least).to(dtype)[:, None]


class DenseOps(ReferenceOps):
    """Plain torch over `LayerPast`s instead of a paged pool, in operations that exporters know."""

    def empty_weight(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Row-major memory: exporters copy it as it is."""
        return torch.empty(outputs, inputs, dtype=dtype)

    def prepare(self, weight: Weight, dtype: torch.dtype, /) -> Tensor:
        """The weight in `dtype`: runtimes round weights by their own rules."""
        return quantized_weights.dequantize(weight, dtype)

    def rope_and_store(
        self,
        qkv: Tensor,
        rope: RopeTables,
        kv: Any,
        slot_mapping: Tensor,
        heads: int,
        qk_norm: Norm | None,
        kv_scales: Tensor | None = None,
        /,
    ) -> Tensor:
        """Norm and rotation; kv is a `LayerPast`, whose new keys and values are set."""
        kv_heads, dim = kv.keys.shape[1], qkv.shape[2]
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if qk_norm is not None:
            qk = self.normalize(qk, qk_norm)
        swapped = torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), 2)
        qk = qk * rope.cos + swapped * rope.sin
        new = (qk[:, heads:], v)
        kv.new_keys, kv.new_values = (
            each.reshape(kv.keys.shape[0], kv.tokens, kv_heads, dim).transpose(1, 2) for each in new
        )
        return qk[:, :heads]

    def attention(self, q: Tensor, kv: Any, plan: Any, scores: Scores, kv_scales: Tensor | None = None, /) -> Tensor:
        """Causal attention over the past and the new tokens; the plan is a `score_bias`. The past is read where it is:
        scores over the past and over the new tokens are computed apart and normalized together."""
        rows, kv_heads, past, dim = kv.keys.shape
        heads, tokens = q.shape[1], kv.tokens
        share = heads // kv_heads
        grouped = q.reshape(rows, tokens, kv_heads, share, dim).permute(0, 2, 3, 1, 4)
        # Products of three dimensions: with four torch's decomposition broadcasts, which copies the past at each step.
        q = grouped.reshape(rows * kv_heads, share * tokens, dim) * scores.scale
        keys, new_keys, values, new_values = (
            each.flatten(0, 1) for each in (kv.keys, kv.new_keys, kv.values, kv.new_values)
        )
        products = torch.cat((q.bmm(keys.transpose(1, 2)), q.bmm(new_keys.transpose(1, 2))), 2)
        if scores.soft_cap is not None:
            products = (products / scores.soft_cap).tanh() * scores.soft_cap
        biased = products.reshape(rows, kv_heads, share, tokens, past + tokens) + plan[:, :, None]
        chances = _softmax(biased, scores.sinks).reshape(products.shape)
        mixed: Tensor = chances[..., :past].bmm(values) + chances[..., past:].bmm(new_values)
        return mixed.reshape(grouped.shape).permute(0, 3, 1, 2, 4).reshape(rows * tokens, heads * dim)
