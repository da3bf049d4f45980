"""Draft heads as they are trained: one decoder layer that is unrolled over its own guesses. Knows no files.

The worker computes the same a token at a time (`services/worker/models/draft_heads.py`). Training unrolls all positions
of a window at once, as EAGLE-3 does (Li et al., arXiv:2503.01840): at depth d each position reads the heads' output of
depth d - 1 for the position before it, and attends to keys as they would be after d guesses.

Legend: B windows, T tokens, W width, L fused layers, H query heads, K kv heads, D head dimension, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LAYER = "model.layers.0."
_NAMES: Mapping[str, str] = {
    "q": f"{_LAYER}self_attn.q_proj",
    "k": f"{_LAYER}self_attn.k_proj",
    "v": f"{_LAYER}self_attn.v_proj",
    "o": f"{_LAYER}self_attn.o_proj",
    "gate": f"{_LAYER}mlp.gate_proj",
    "up": f"{_LAYER}mlp.up_proj",
    "down": f"{_LAYER}mlp.down_proj",
    "attention_norm": f"{_LAYER}input_layernorm",
    "mlp_norm": f"{_LAYER}post_attention_layernorm",
    "norm": "model.norm",
}
"""What a module is called in the folder, if not by its own name."""
_KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """The sizes of the heads' layer."""

    width: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    fused: int
    """Layers whose hidden states are fused."""
    rope_theta: float = 10000.0
    eps: float = 1e-5


class _Norm(nn.RMSNorm):
    """The norm in float32, as its weights are; on a GPU other numbers are in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class HeadsNetwork(nn.Module):
    """The layer, and its own head if it has one."""

    def __init__(self, shape: HeadsShape, embedding_VW: Tensor, own_head: Tensor | None) -> None:
        """embedding_VW: the base's, which is not trained. own_head: what a head of the heads' own begins as."""
        super().__init__()
        self.shape, width, inner = shape, shape.width, shape.heads * shape.head_dim
        self.register_buffer("embedding", embedding_VW.detach(), persistent=False)
        self.embedding: Tensor
        self.fuse_norm = _Norm(shape.fused * width, shape.eps)
        self.fuse = nn.Linear(shape.fused * width, width, bias=False)
        self.embed_norm, self.hidden_norm = _Norm(width, shape.eps), _Norm(width, shape.eps)
        self.combine = nn.Linear(2 * width, width, bias=False)
        self.attention_norm, self.mlp_norm = _Norm(width, shape.eps), _Norm(width, shape.eps)
        self.q = nn.Linear(width, inner, bias=False)
        self.k, self.v = (nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(inner, width, bias=False)
        self.gate, self.up = (nn.Linear(width, shape.neurons, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.neurons, width, bias=False)
        self.norm = _Norm(width, shape.eps)
        self.lm_head = None if own_head is None else nn.Linear(width, len(own_head), bias=False)
        if self.lm_head is not None and own_head is not None:
            self.lm_head.weight.data.copy_(own_head)

    def unroll(self, ids_BT: Tensor, states_BTF: Tensor, depth: int) -> Iterator[Tensor]:
        """The normed outputs [B, T, W] at each depth, which a head turns into logits of the next token.

        states: the base's streams before the fused layers, F = L * W. Positions before the depth mean nothing.
        """
        features, computed = self.fuse(self.fuse_norm(states_BTF)), list[_KeyValue]()
        cos_TD, sin_TD = self._rotation(ids_BT.shape[1], ids_BT.device)
        embedded = self.embed_norm(self.embedding[ids_BT])
        for _ in range(depth):
            x = self.combine(torch.cat((embedded, self.hidden_norm(_later(features, 1))), -1))
            h = self.attention_norm(x)
            q, k, v = (self._split(each(h)) for each in (self.q, self.k, self.v))
            computed.append((self._by_query(_rotated(k, cos_TD, sin_TD)), self._by_query(v)))
            attended = _attend(_rotated(q, cos_TD, sin_TD), computed)
            x = x + self.o(attended.transpose(1, 2).flatten(2))
            h = self.mlp_norm(x)
            features = x + self.down(F.silu(self.gate(h)) * self.up(h))
            yield self.norm(features)

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their names in the folder."""
        found = dict[str, Tensor]()
        for name, weight in self.named_parameters():
            module, _, kind = name.rpartition(".")
            found[f"{_NAMES.get(module, module)}.{kind}"] = weight
        return found

    def _split(self, x_BTN: Tensor) -> Tensor:
        return x_BTN.view(*x_BTN.shape[:-1], -1, self.shape.head_dim).transpose(1, 2)

    def _by_query(self, x_BKTD: Tensor) -> Tensor:
        return x_BKTD.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)

    def _rotation(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.shape.head_dim, 2, device=device).float() / self.shape.head_dim
        angles = torch.outer(torch.arange(tokens, device=device).float(), self.shape.rope_theta**-half)
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def _rotated(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, -1)
    return x_BHTD * cos_TD + torch.cat((-second, first), -1) * sin_TD


def _later(x: Tensor, places: int) -> Tensor:
    """Rows of the second dimension but one, moved to later positions; zeros come before them."""
    return F.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


def _attend(q_BHTD: Tensor, computed: list[_KeyValue]) -> Tensor:
    """Attention at depth d = len(computed) - 1: a position p sees the keys of depth 0 up to p - d, and of each depth i
    from 1 on that of position p - d + i."""
    depth, tokens, scale = len(computed) - 1, q_BHTD.shape[2], q_BHTD.shape[3] ** -0.5
    keys, values = computed[0]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BHTD.device).tril(-depth)
    scores = [(q_BHTD @ keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)]
    own = [(_later(k, depth - at), _later(v, depth - at)) for at, (k, v) in enumerate(computed)][1:]
    scores += [(q_BHTD * k).sum(-1, keepdim=True) for k, _ in own]
    shares = (torch.cat(scores, -1).float() * scale).softmax(-1).nan_to_num().to(q_BHTD.dtype)
    attended: Tensor = shares[..., :tokens] @ values
    for at, (_, v) in enumerate(own):
        attended = attended + shares[..., tokens + at, None] * v
    return attended
