"""Cuts an adapter into the parts of a grid's ranks, as the weights are cut. Knows matrices, no slot and no process.

If ranks share the outputs of a module, each rank has the rows of B for its own outputs. If they share the inputs, each
rank has the columns of A for its own inputs; what its part adds is summed over the ranks together with the products.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.family import Split
from services.worker.models.lora import Matrices, fit_adapter, module_of
from services.worker.models.ops import Ops
from services.worker.models.sharding import ModulePiece, pieces_of
from services.worker.parallel.shards import Shard


class AdapterParts:
    """Cuts the adapters of a model into the parts of its ranks."""

    def __init__(self, config: ModelConfig, ops: Ops, dtype: torch.dtype, shards: Sequence[Shard]) -> None:
        """config: of the whole model; shards: of all ranks."""
        whole = Decoder(config, ops, dtype, 1, "meta", meta_linears=True)
        self._products, self._family, self._dtype = whole.adaptable(), whole.family, dtype
        adapted = {module for product in self._products for module in product.modules}
        self._pieces = [
            {name: piece for name, piece in pieces_of(whole.family, config, shard).items() if name in adapted}
            for shard in shards
        ]

    def cut(self, stored: Matrices) -> list[Matrices]:
        """The part of each rank, its modules named as in the rank's model. Raises CheckpointError as `fit_adapter` does
        for the whole model."""
        fit_adapter(self._products, self._family, stored, self._dtype)
        named = {module_of(self._family, name): matrices for name, matrices in stored.items()}
        return [
            {piece.name: self._cut(*named[module], piece) for module, piece in pieces.items() if module in named}
            for pieces in self._pieces
        ]

    def _cut(self, a: Tensor, b: Tensor, piece: ModulePiece) -> tuple[Tensor, Tensor]:
        if piece.split is Split.COLUMN:
            b = torch.cat([b[span.start : span.stop] for span in piece.spans])
        elif piece.split is Split.ROW:
            a = torch.cat([a[:, span.start : span.stop] for span in piece.spans], 1)
        return a.to(self._dtype), b.to(self._dtype)
