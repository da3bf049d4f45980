"""The contents of KV blocks on a device, as the engine and its tiers see them. Knows blocks by number, no tensors.

Block 0 is padding: rows that belong to no sequence write there.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from services.worker.kvcache.tiers import Contents

PARTS = 4
"""Parts in which a block leaves while its layers are computed, at most."""

LayersComputed = Callable[[int, int], bool]
"""Called while a step is computed with the number of layers that are computed, and that of all layers. -> whether other
workers may want more of the step."""


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
    """A pool of whose blocks some layers can be read while the step computes the others."""

    @property
    def beside(self) -> bool:
        """Whether a device computes the layers, so that the engine's thread can read other blocks meanwhile."""

    @property
    def settled(self) -> bool:
        """Whether all that was written to the pool is in place: what is copied out of it by others is then right."""

    def read_layers(self, blocks: list[int], begin: int, end: int, /) -> list[bytes]:
        """Of the contents of blocks, those of layers `begin` to `end`, which are computed."""

    def on_layers(self, call: LayersComputed, /) -> None:
        """Call this from the engine's thread as layers of a step are computed: between two of them, or again and again
        while the thread waits for the step and the call returns True."""
