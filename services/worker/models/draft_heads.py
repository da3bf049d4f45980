"""Draft heads: one decoder layer that guesses tokens from a base's hidden states.

The idea is EAGLE-3 (Li et al., arXiv:2503.01840). The heads read each token's embedding and what is known of the token
before it: there the base's residual streams before a few layers, fused to one vector; beyond the tokens that the base
has computed, the heads' own output. Embedding, and head unless they have their own, are the base's. Knows no slots and
no files.

T tokens, S of them sampled, W width, L fused layers, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder, Projection
from services.worker.models.family import Split
from services.worker.models.layers import Linear, StepTensors, empty_norm


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """The shape of draft heads, and what they know of their base."""

    layer: ModelConfig
    """The config of a decoder of one layer and the base's width. Its vocabulary is what the heads can guess; tied
    embeddings: the base's head is used."""
    hidden_layers: tuple[int, ...]
    """The heads read the base's residual stream before these layers."""
    draft_tokens: tuple[int, ...]
    """The tokens that an own head guesses, in its order; empty: the base's head is used."""
    base_vocab: int
    base_layers: int
    base_digest: str
    """The digest of the base's embedding, as `kernels.drafts.draft_heads` computes it."""

    @property
    def fused_width(self) -> int:
        """Numbers that are fused to one vector, for each token."""
        return len(self.hidden_layers) * self.layer.hidden_size


class DraftHeads(Decoder):
    """The heads as a `Decoder` of one layer, whose steps have features beside the tokens."""

    def __init__(self, heads: HeadsConfig, base: Decoder, dtype: torch.dtype, max_positions: int) -> None:
        """Allocate the weights for sequences of up to `max_positions` tokens, on the base's device."""
        self.heads_config, self._base = heads, base
        device = base.embedding.device
        self._draft_tokens = torch.tensor(heads.draft_tokens, dtype=torch.int64, device=device)
        super().__init__(heads.layer, base.ops, dtype, max_positions, str(device))

    def _build(self, dtype: torch.dtype) -> None:
        super()._build(dtype)
        width, fused, norm = self.config.hidden_size, self.heads_config.fused_width, self.config.norm
        self.fuse_norm = empty_norm(norm, fused, dtype)
        self.embed_norm, self.hidden_norm = empty_norm(norm, width, dtype), empty_norm(norm, width, dtype)
        self.fuse = Linear(self.ops, fused, width, False, dtype)
        self.combine = Linear(self.ops, 2 * width, width, False, dtype)

    def table_rows(self) -> tuple[int, int]:
        """Rows of the embedding, which is the base's, and of the head."""
        return 0, self.config.vocab_size

    def fused(self, states: Tensor) -> Tensor:
        """The base's residual streams [T, L * W] as features [T, W]."""
        return self.fuse.norm_matmul(states, self.fuse_norm)

    def embed(self, step: StepTensors) -> Tensor:
        """The residual stream before the layer, [T, W]."""
        assert step.features is not None, "heads read features beside the tokens"
        embedded = self.ops.normalize(self._base.lookup(step.token_ids), self.embed_norm)
        before = self.ops.normalize(step.features, self.hidden_norm)
        x = torch.zeros_like(before)
        self.combine.add_matmul(x, torch.cat((embedded, before), -1))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [S, W] -> logits [S, V] of the base's vocabulary; -inf for tokens that are never guessed."""
        if self.config.tied_embeddings:
            return self._base.head_logits(x, self.norm)
        own = self._base.capped(self.head.norm_matmul(x, self.norm))
        every = own.new_full((len(x), self.heads_config.base_vocab), -torch.inf)
        every[:, self._draft_tokens] = own
        return every

    def projections(self) -> list[Projection]:
        """The products with weights of their own."""
        own = {"fuse": self.fuse, "combine": self.combine}
        return super().projections() + [
            Projection(linear, (name,), (linear.outputs,), (linear.outputs,), Split.REPLICATED, False)
            for name, linear in own.items()
        ]

    def destinations(self) -> dict[str, list[Tensor]]:
        """As those of a decoder, with the heads' own norms."""
        norms = {"fuse_norm": self.fuse_norm, "embed_norm": self.embed_norm, "hidden_norm": self.hidden_norm}
        return super().destinations() | {f"{name}.weight": [norm.weight] for name, norm in norms.items()}
