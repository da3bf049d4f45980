"""A decoder that embeds or scores labels, on a GPU, as `runner.py` runs it: what describes a batch of texts to the
kernels of a step.

Keys and values of a batch lie in blocks 1, 2, ... of a pool, which the next batch writes over; those of tokens of no
text lie in block 0. B texts, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import attention, kv_pages
from kernels.attention import AttentionPlan
from kernels.operands import Pooling
from kernels.texts import pool_texts
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.cuda.encoders.word_parts import word_parts
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.packed_ids import PackedIds

LAYER_WORK = 1.5e11
"""Tokens times weights that the GPU computes in about the time that launching the kernels of a layer takes: 0.5 ms."""

NO_SHORT_ROWS = 0
"""Texts of one token are rows for attention's tile kernel, too, so the kernel of answers is not launched."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What a batch has room for, and where its parts are in its words: tokens, positions, places in the pool, starts,
    first blocks."""

    tokens: int
    texts: int

    @property
    def parts(self) -> tuple[slice, ...]:
        """The parts of its words."""
        return word_parts(self.tokens, self.tokens, self.tokens, self.texts + 1, self.texts)

    @property
    def words(self) -> int:
        """Words of the batch."""
        return int(self.parts[-1].stop)


class DecoderNetwork:
    """A `TextNetwork` of a decoder."""

    first_position = 0

    def __init__(
        self,
        model: Decoder,
        ops: TritonOps,
        pools: list[Tensor],
        longest: int,
        most_texts: int,
        pooling: Pooling,
        labels: Tensor | None = None,
    ) -> None:
        """pools: pages of each layer, for the tokens of a batch in blocks that no two texts share, and one more. labels
        [labels, hidden]: the head, which reads the vector of the last token; None: there is none."""
        self.model, self.pools, self.device, self.longest = model, pools, model.embedding.device, longest
        self._ops, self._most_texts, self._pooling, self._labels = ops, most_texts, pooling, labels
        self._block_size = kv_pages.block_size_of(pools[0])
        self._blocks = torch.arange(-(-longest // self._block_size), dtype=torch.int32, device=self.device)
        self.width = model.config.hidden_size if labels is None else len(labels)
        products = [each.linear for each in model.projections() if each.linear is not model.head]
        self.work = float(sum(linear.inputs * linear.outputs for linear in products))
        self.launch_work = LAYER_WORK * len(model.layers)

    def sizes(self, tokens: int, texts: int, /) -> DecoderSizes:
        """As in `TextNetwork`."""
        return DecoderSizes(tokens, texts)

    def sizes_of(self, packed: PackedIds, /) -> DecoderSizes:
        """As in `TextNetwork`: as many texts as there may be, so that kernels are compiled for one number of them."""
        return DecoderSizes(len(packed.token_ids), self._most_texts)

    def lay_out(self, packed: PackedIds, sizes: DecoderSizes, into: npt.NDArray[np.int32], /) -> None:
        """As in `TextNetwork`."""
        token_ids, positions, places, starts, firsts = (into[part] for part in sizes.parts)
        into[:] = 0
        count, texts, size = len(packed.token_ids), len(packed.starts) - 1, self._block_size
        lengths = np.diff(packed.starts)
        blocks = -(-lengths // size)
        firsts[:texts] = 1 + np.cumsum(blocks) - blocks
        token_ids[:count], positions[:count] = packed.token_ids, packed.positions
        places[:count] = np.repeat(firsts[:texts] * size, lengths) + packed.positions
        starts[:] = count
        starts[: texts + 1] = packed.starts

    @torch.inference_mode()
    def forward(self, words: Tensor, sizes: DecoderSizes, /) -> Tensor:
        """As in `TextNetwork`."""
        token_ids, positions, places, starts, firsts = (words[part] for part in sizes.parts)
        contexts, model = starts.diff(), self.model
        # Blocks behind a text are in its row, too: they are not read, but must exist.
        tables = (firsts[:, None] + self._blocks).clamp_(max=len(self.pools[0]) - 1)
        at, last = positions.long(), (starts[1:] - 1).clamp_(min=0).long()
        whole = self._pooling is not Pooling.LAST
        step = StepTensors(
            token_ids=token_ids.long(),
            positions=at,
            ropes=model.ropes(lambda cos, sin: RopeTables(cos, sin, at)),
            slot_mapping=places.long(),
            plans={w: self._plan(starts, contexts, tables, w, sizes.tokens) for w in set(model.config.windows)},
            sampled=None if whole else last,
        )
        x, _ = model.forward(step, self.pools)
        x = model.ops.normalize(x, model.norm)
        if whole:
            x = pool_texts(x, starts, self._pooling)
        return x if self._labels is None else torch.nn.functional.linear(x, self._labels)

    def _plan(
        self, starts: Tensor, contexts: Tensor, tables: Tensor, window: int | None, long_tokens: int
    ) -> AttentionPlan:
        config, dtype = self.model.config, self.model.embedding.dtype
        shapes = attention.config_for(config.head_dim, dtype, len(contexts), self._ops.invariant, dtype, NO_SHORT_ROWS)
        return attention.plan_attention(
            starts, contexts, tables, config.heads, config.kv_heads, config.head_dim, self._block_size, dtype, window,
            NO_SHORT_ROWS, long_tokens, shapes, config.has_plain_scores,
        )  # fmt: skip
