"""Paged KV bookkeeping: which block belongs to whom. Knows hashes and counts, never tensors or sequences.

A block is free (holds nothing), active (jobs use it) or cached (no job uses it, but its content has a key and may be
found again). `free + cached + active == total` always.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks 1 to `total`; block 0 is padding. A block with a key may have several owners, one without has one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._owners = [0] * (total + 1)
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._changes: dict[bytes, bool] = {}
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Called with each cached block and its key before `take` gives it away: its content is still there."""

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that no job uses but that can be found again."""
        return len(self._cached)

    @property
    def active(self) -> int:
        """Blocks that jobs use."""
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that `take` can give: free ones, then cached ones."""
        return self.free + self.cached

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of `keys`. They are not taken: see `share`."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these matched blocks are cached. Sharing one takes it from the available blocks."""
        return sum(block in self._cached for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Add one owner to each of these matched blocks."""
        for block in blocks:
            self._cached.pop(block, None)
            self._owners[block] += 1

    def touch(self, blocks: Sequence[int]) -> None:
        """Make matched blocks of a sequence the last to be evicted, its tail before its head."""
        self.share(blocks)
        self.release(blocks)

    def take(self, count: int) -> list[int]:
        """New blocks, evicting cached ones, the least recently used first. `count` must be available."""
        assert count <= self.available, f"{count} blocks wanted, {self.available} available"
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - len(taken) :]
        taken.reverse()
        while len(taken) < count:
            block, _ = self._cached.popitem(last=False)
            if self.on_evict is not None:
                self.on_evict(block, self._key_of[block])
            self._forget(block)
            taken.append(block)
        for block in taken:
            self._owners[block] = 1
        return taken

    def publish(self, block: int, key: bytes) -> None:
        """Make a computed block findable by `key`. The first block published with a key stays."""
        assert self._owners[block] > 0, f"block {block} has no owner"
        if key not in self._block_of and block not in self._key_of:
            self._key_of[block] = key
            self._block_of[key] = block
            self._changes[key] = True

    def withdraw(self, block: int) -> None:
        """Make the block unfindable, unless several sequences own it."""
        if self._owners[block] == 1:
            self._forget(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each of these blocks of a sequence. Its tail will be evicted before its head."""
        for block in reversed(blocks):
            assert self._owners[block] > 0, f"block {block} has no owner"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    @property
    def changed(self) -> bool:
        """Whether keys became findable or unfindable since they were taken last."""
        return bool(self._changes)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that became findable since the last call, and keys that became unfindable."""
        changes, self._changes = self._changes, {}
        return [k for k, found in changes.items() if found], [k for k, found in changes.items() if not found]

    def check(self) -> None:
        """Assert the invariants of all counts and maps."""
        idle, keyed = {*self._free, *self._cached}, self._key_of.keys()
        owned = self.total + 1 - self._owners.count(0)  # Block 0 never has an owner.
        assert min(self._owners) >= 0, "a block has fewer than no owners"
        assert self.free + self.cached + owned == self.total, (self.free, self.cached, owned, self.total)
        assert len(idle) == self.free + self.cached, "a block is free or cached twice"
        assert not any(map(self._owners.__getitem__, idle)), "an idle block has an owner"
        assert self._cached.keys() <= keyed, "a cached block has no key"
        assert keyed.isdisjoint(self._free), "a free block has a key"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "keys and blocks disagree"

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self._changes[key] = False
