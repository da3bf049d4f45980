"""Which adapter is in which slot of device memory, and which one makes room. Knows fingerprints, never tensors.

A slot is free, or holds an adapter that is being loaded, that running jobs use, or that is idle: the adapter that has
been idle for longest makes room for another one.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from services.worker.job import Adapter


class AdapterSlots:
    """Slots 1 to `count`; slot 0 stands for no adapter."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._loading: dict[int, bytes] = {}
        self._users: Counter[bytes] = Counter()
        self._loads: list[tuple[int, Adapter]] = []
        self.resident: tuple[bytes, ...] = ()
        """Fingerprints of the adapters that jobs can use at once."""

    @property
    def loading(self) -> bool:
        """Whether an adapter is being loaded."""
        return bool(self._loading)

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether the adapter is in a slot."""
        return adapter.fingerprint in self._slot_of and adapter.fingerprint not in self._loading.values()

    def request(self, adapter: Adapter) -> bool:
        """Have the adapter loaded, unless it is. False if all slots are in use."""
        name = adapter.fingerprint
        if name in self._slot_of:
            return True
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return False
        self._slot_of[name] = slot
        self._loading[slot] = name
        self._loads.append((slot, adapter))
        self._changed()
        return True

    def take_loads(self) -> list[tuple[int, Adapter]]:
        """The adapters whose loading is to begin now, and their slots."""
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, slot: int) -> None:
        """The adapter that was to be loaded to this slot is there."""
        del self._loading[slot]
        self._changed()

    def use(self, adapter: Adapter) -> int:
        """-> the slot of an adapter that is ready, for one more running job."""
        assert self.is_ready(adapter), f"adapter {adapter.name} is not loaded"
        self._users[adapter.fingerprint] += 1
        self._slot_of.move_to_end(adapter.fingerprint)
        return self._slot_of[adapter.fingerprint]

    def release(self, adapter: Adapter) -> None:
        """A job that used the adapter has left the batch."""
        name = adapter.fingerprint
        assert self._users[name] > 0, f"adapter {adapter.name} has no users"
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
        self._slot_of.move_to_end(name)

    def check(self, used: Iterable[bytes]) -> None:
        """Assert the invariants; `used`: the fingerprint of the adapter of each job in the batch that has one."""
        assert sorted([*self._free, *self._slot_of.values()]) == list(range(1, self.count + 1)), "a slot is lost"
        assert Counter(used) == self._users, "users are counted wrongly"
        assert all(name in self._slot_of for name in self._users), "an adapter in use has no slot"

    def _evict(self) -> int | None:
        busy = self._loading.values()
        idle = next((name for name in self._slot_of if not self._users[name] and name not in busy), None)
        return None if idle is None else self._slot_of.pop(idle)

    def _changed(self) -> None:
        loading = self._loading.values()
        self.resident = tuple(name for name in self._slot_of if name not in loading)
