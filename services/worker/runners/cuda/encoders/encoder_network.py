"""An encoder's network on a GPU, as `runner.py` runs it: what describes a batch of packed texts to its kernels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.packed_texts import TILE_WORDS, TilePlan, TileShape, most_tiles, shape_for, tiles_of
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.encoders.ops import PackedTexts
from services.worker.runners.cuda.encoders.word_parts import word_parts
from services.worker.runners.packed_ids import PackedIds

LAUNCH_WORK = 1.25e11
"""As in `TextNetwork`: about 0.5 ms."""


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """What a batch has room for, and where its parts are in its words: tokens, positions, segments, starts, tiles."""

    tokens: int
    texts: int
    tiles: int
    shape: TileShape
    """Of attention's programs."""

    @property
    def parts(self) -> tuple[slice, ...]:
        """The parts of its words."""
        return word_parts(self.tokens, self.tokens, self.tokens, self.texts + 1, TILE_WORDS * self.tiles)

    @property
    def words(self) -> int:
        """Words of the batch."""
        return int(self.parts[-1].stop)


class EncoderNetwork:
    """A `TextNetwork` of an encoder."""

    launch_work = LAUNCH_WORK

    def __init__(self, model: Encoder) -> None:
        self.model, self.device, self.width = model, model.embedding.device, model.width
        self.first_position, self.longest = model.config.first_position, model.config.context_length
        weights = sum(each.linear.inputs * each.linear.outputs for each in model.projections())
        self.work = weights * model.config.layers / model.config.unique_layers

    def sizes(self, tokens: int, texts: int, /) -> EncoderSizes:
        """As in `TextNetwork`."""
        shape = self._shape(tokens)
        return EncoderSizes(tokens, texts, most_tiles(tokens, texts, shape.queries), shape)

    def sizes_of(self, packed: PackedIds, /) -> EncoderSizes:
        """As in `TextNetwork`."""
        tokens, texts = len(packed.token_ids), len(packed.starts) - 1
        shape = self._shape(tokens)
        return EncoderSizes(tokens, texts, int((-(-np.diff(packed.starts) // shape.queries)).sum()), shape)

    def lay_out(self, packed: PackedIds, sizes: EncoderSizes, into: npt.NDArray[np.int32], /) -> None:
        """As in `TextNetwork`."""
        token_ids, positions, segments, starts, tiles = (into[part] for part in sizes.parts)
        into[:] = 0
        token_ids[: len(packed.token_ids)] = packed.token_ids
        positions[: len(packed.token_ids)] = packed.positions
        if packed.segments is not None:
            segments[: len(packed.token_ids)] = packed.segments
        starts[:] = len(packed.token_ids)
        starts[: len(packed.starts)] = packed.starts
        real = tiles_of(packed.starts, sizes.shape.queries).reshape(-1)
        tiles[: len(real)] = real

    @torch.inference_mode()
    def forward(self, words: Tensor, sizes: EncoderSizes, /) -> Tensor:
        """As in `TextNetwork`."""
        token_ids, positions, segments, starts, tiles = (words[part] for part in sizes.parts)
        plan = TilePlan(tiles.view(-1, TILE_WORDS), sizes.shape)
        has_segments = self.model.config.segments > 1
        return self.model.forward(PackedTexts(token_ids, positions, segments if has_segments else None, starts, plan))

    def _shape(self, tokens: int) -> TileShape:
        return shape_for(tokens, self.model.config.head_dim, self.model.embedding.dtype)
