"""The tiers below the device's pool: what each can do with the contents of blocks, and the one in host memory.

Knows keys and bytes, never tensors, sequences or the network.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Protocol

from services.worker.kvcache.transfer_cost import ADVANTAGE

_PIECE_BLOCKS = 16

Contents = Sized
"""The contents of a block, as many bytes as their length says: bytes, or what a runner keeps in host memory."""


@dataclass(slots=True, eq=False)
class BlockRequest:
    """The contents of these blocks are wanted, in order, before `budget_s` is over: then computing them is cheaper."""

    keys: Sequence[bytes]
    budget_s: float
    answer: Callable[["BlockRequest", Sequence[Contents] | None], None] = field(repr=False)
    """Takes the next contents, and None when no more will come. May be called from any thread."""
    abandoned: bool = False
    """Nobody waits for it any more."""


class BlockStore(Protocol):
    """A tier. The engine's thread calls it, so nothing here waits; answers may come from another thread."""

    def pays(self, blocks: int, recompute_s: float) -> bool:
        """Whether fetching so many blocks is predicted to be cheaper than computing them in `recompute_s`."""

    def fetch(self, wish: BlockRequest) -> None:
        """Answers the wish with what it has of it from the first block on, and then, in any case, with None."""

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        """Which of these blocks it may want to be offered: none if fetching them all is far from paying."""

    def offer(self, key: bytes, payload: bytes) -> bool:
        """Takes the contents of a block. False if it has no room for offers now."""


class HostStore:
    """Contents in host memory, bounded in bytes; the least recently used go first."""

    def __init__(self, max_bytes: int, block_s: float = 0.0) -> None:
        """block_s: seconds that a block takes there and back, if that is another memory than the pool's."""
        self.max_bytes, self._block_s = max_bytes, block_s
        self.bytes = 0
        self._contents: OrderedDict[bytes, Contents] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contents)

    def pays(self, blocks: int, recompute_s: float) -> bool:
        """By the time of a block's way there and back. Within the machine's memory that is nothing: the engine has
        counted its own copy."""
        return bool(self._contents) and recompute_s > 0 and blocks * self._block_s <= ADVANTAGE * recompute_s

    def fetch(self, wish: BlockRequest) -> None:
        """Answers at once."""
        found: list[Contents] = []
        for key in wish.keys:
            payload = self._contents.get(key)
            if payload is None:
                break
            found.append(payload)
        for key in reversed(wish.keys[: len(found)]):  # The tail goes before the head.
            self._contents.move_to_end(key)
        for start in range(0, len(found), _PIECE_BLOCKS):
            wish.answer(wish, found[start : start + _PIECE_BLOCKS])
        wish.answer(wish, None)

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        """Those that it does not have; none if their way is known to be longer than computing them."""
        if 0 < recompute_s < len(keys) * self._block_s:
            return []
        return [key for key in keys if key not in self._contents]

    def offer(self, key: bytes, payload: Contents) -> bool:
        """Keeps it, and drops others for it."""
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
