"""A rank's part of a decoder: a stage of layers, and in each its share of heads, neurons and vocabulary.

The rest of the decoder is as it is for one process: what ranks exchange is here and in the operations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import Ops
from services.worker.models.sharding import config_of, table_rows
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.shards import Shard, share


class StageDecoder(Decoder):
    """A `Decoder` that exchanges activations with other ranks. All ranks of a grid compute the same steps in the same
    order."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        dtype: torch.dtype,
        max_positions: int,
        device: str = "cpu",
        *,
        shard: Shard,
        others: Collectives,
        meta_linears: bool = False,
    ) -> None:
        """config: of the whole model."""
        self._shard, self._others = shard, others
        self._rows = table_rows(config, shard)
        super().__init__(config_of(config, shard), ops, dtype, max_positions, device, meta_linears=meta_linears)

    @property
    def draws(self) -> bool:
        """Whether it is of the stage that has logits."""
        return self._shard.is_last

    def table_rows(self) -> tuple[int, int]:
        """Rows of the embedding and of the head."""
        return self._rows

    def lookup(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding, [T, hidden]: each is on one of the stage's ranks."""
        if self._shard.ranks == 1:
            return super().lookup(token_ids)
        taken = self._others.take_rows(token_ids, self.embedding, self._shard.vocabulary.start)
        if taken is not None:
            return taken
        own = token_ids - self._shard.vocabulary.start
        here = (own >= 0) & (own < self._shard.vocabulary.count)
        found = self.embedding[torch.where(here, own, 0)]
        return self._others.sum(found.masked_fill_(~here[:, None], 0))

    def embed(self, step: StepTensors) -> Tensor:
        """The residual stream before the stage's first layer, [T, hidden]."""
        if self._shard.is_first:
            return super().embed(step)
        received = self.embedding.new_empty(len(step.token_ids), self.config.hidden_size)
        return self._others.receive(received)

    def forward(self, step: StepTensors, pools: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As `Decoder.forward` on the last stage. Others send the residual stream to the next stage, and sample from no
        token. Where some tokens are not sampled from, their second result is of one column, and finite if those of all
        ranks are: the logits, which show it for the others, are all ranks'."""
        if self._shard.is_last:
            x, attended = super().forward(step, pools)
            if self._shard.ranks > 1 and step.sampled is not None:
                self._others.settle()
                attended = self._others.sum((attended.float() * 0).sum(1, keepdim=True))
            return x, attended
        self._adapted.step = step.adapters
        x = self.embed(step)
        for layer, pool in zip(self.layers, pools, strict=True):
            layer.attention(x, step, pool)
            layer.mlp(x)
        self._others.settle()
        self._others.send(x)
        return x[:0], x

    def agreed(self, ids: Tensor) -> Tensor:
        """The token ids [n, m] of the stage's first rank: what each rank's draft model guesses might differ."""
        return self._others.first(ids)

    def pick(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The rows of the residual stream x [T, hidden] of these tokens, with all sums that were begun."""
        self._others.settle()
        return super().pick(x, tokens)

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [S, hidden] -> logits [S, vocabulary], the same on all ranks of the stage."""
        own = super().logits(x)
        if self._shard.ranks == 1:
            return own
        return self._others.gather_columns(own, self._widths())

    def _widths(self) -> list[int]:
        ranks: Sequence[int] = range(self._shard.ranks)
        return [share(self.config.vocab_size, self._shard.ranks, rank).count for rank in ranks]
