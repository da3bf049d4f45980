"""The contents of KV blocks on a device, as the engine and its tiers see them. Knows blocks by number, no tensors.

Block 0 is padding: rows that belong to no sequence write there.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from services.worker.kvcache.tiers import Contents

LayersComputed = Callable[[int, int], None]
"""Called between two layers of a step with the number of layers that are computed, and that of all layers."""


class KvPool(Protocol):
    """A device's pool of keys and values of all layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers."""

    @property
    def host_block_s(self) -> float:
        """Measured seconds that a block takes to host memory and back; 0: the pool is in host memory."""

    def scrub(self, blocks: list[int], /) -> None:
        """Zero blocks that may hold NaN, after all launched steps: a masked key still meets its value as 0 * NaN."""

    def read(self, blocks: list[int], /) -> list[bytes]:
        """The contents of computed blocks: keys and values, layer after layer."""

    def keep(self, blocks: list[int], /) -> Sequence[Contents]:
        """Copies of computed blocks in host memory; fewer if there is no room. Steps launched later may overwrite the
        blocks."""

    def write(self, blocks: list[int], payloads: Sequence[Contents], /) -> None:
        """Fill blocks that no job uses with what `read` or `keep` returned, after all launched steps."""


@runtime_checkable
class LayeredPool(KvPool, Protocol):
    """A pool whose layers the engine's thread computes one after another: contents can be read between two of them."""

    def read_layers(self, blocks: list[int], begin: int, end: int, /) -> list[bytes]:
        """Of the contents of blocks, those of layers `begin` to `end`."""

    def on_layers(self, call: LayersComputed, /) -> None:
        """Call this between the layers of steps."""
