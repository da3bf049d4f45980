"""The tiers below the device's pool: their interface, and the one in host memory.

Knows keys and bytes, never tensors, sequences or the network.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Protocol

from services.worker.kvcache.transfer_cost import ADVANTAGE

_PIECE_BLOCKS = 16

Contents = Sized
"""The contents of a block, whose length is their number of bytes: bytes, or a runner's page in host memory."""


@dataclass(slots=True, eq=False)
class BlockRequest:
    """A request for the contents of these blocks, in order. After `budget_s` seconds computing them is cheaper."""

    keys: Sequence[bytes]
    budget_s: float
    answer: Callable[["BlockRequest", Sequence[Contents] | None], None] = field(repr=False)
    """Called with the next contents, and with None when no more will come. May be called from any thread."""
    follow: bool = False
    """The blocks are being computed: wait for those that are not there yet."""
    abandoned: bool = False
    """No job waits for it any more."""


class BlockStore(Protocol):
    """A tier. The engine's thread calls it, so no method waits; answers may come from another thread."""

    def is_faster(self, blocks: int, recompute_s: float) -> bool:
        """Whether fetching `blocks` blocks is predicted to be faster than computing them in `recompute_s` seconds."""

    def fetch(self, request: BlockRequest) -> None:
        """Answer with the contents that it has, from the first block on, and then in any case with None."""

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        """The blocks among these that it lacks; none if fetching them all would take far longer than computing them."""

    def offer(self, key: bytes, payload: bytes) -> bool:
        """Take the contents of a block. False if there is no room for offers now."""


Peers = Callable[[str], BlockStore]
"""The tier of the worker at a host:port."""


class HostStore:
    """Contents in host memory, bounded in bytes; the least recently used are dropped first."""

    def __init__(self, max_bytes: int, block_s: float = 0.0) -> None:
        """block_s: seconds that a block takes there and back, if the pool is not in host memory itself."""
        self.max_bytes, self._block_s = max_bytes, block_s
        self.bytes = 0
        self._contents: OrderedDict[bytes, Contents] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contents)

    def is_faster(self, blocks: int, recompute_s: float) -> bool:
        """Predicted from the time of a block's way there and back. Within host memory that is zero: the engine itself
        accounts for its copy."""
        return bool(self._contents) and recompute_s > 0 and blocks * self._block_s <= ADVANTAGE * recompute_s

    def fetch(self, request: BlockRequest) -> None:
        """Answer at once."""
        found: list[Contents] = []
        for key in request.keys:
            payload = self._contents.get(key)
            if payload is None:
                break
            found.append(payload)
        for key in reversed(request.keys[: len(found)]):  # The tail is dropped before the head.
            self._contents.move_to_end(key)
        for start in range(0, len(found), _PIECE_BLOCKS):
            request.answer(request, found[start : start + _PIECE_BLOCKS])
        request.answer(request, None)

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        """The blocks that it does not have; none if moving them is known to take longer than computing them."""
        if 0 < recompute_s < len(keys) * self._block_s:
            return []
        return [key for key in keys if key not in self._contents]

    def offer(self, key: bytes, payload: Contents) -> bool:
        """Keep the contents, and drop others for them."""
        if key in self._contents:
            self._contents.move_to_end(key)
            return True
        if len(payload) > self.max_bytes:
            return False
        self._contents[key] = payload
        self.bytes += len(payload)
        while self.bytes > self.max_bytes:
            _, dropped = self._contents.popitem(last=False)
            self.bytes -= len(dropped)
        return True
