"""Loads adapters to device memory beside the steps. Knows slots and the runner's pages, never tensors.

Jobs whose adapter is being loaded wait in the planner's queue; all other jobs go on.
"""

from collections.abc import Iterable

from services.worker.job import Adapter, Failure
from services.worker.planner.adapter_slots import AdapterSlots
from services.worker.runners.base import AdapterPages

UNSUPPORTED = Failure("UNIMPLEMENTED", "ADAPTERS_UNSUPPORTED", "this worker serves no adapters")


class AdapterLoads:
    """The adapters that are on their way to device memory. Lives on the engine's thread."""

    def __init__(self, slots: AdapterSlots, pages: AdapterPages | None) -> None:
        """pages: None if the runner serves no adapters; then there are no slots."""
        self._slots, self._pages = slots, pages
        self._under_way: list[int] = []

    def begin(self, loads: Iterable[tuple[int, Adapter]]) -> None:
        """Begin to load adapters to slots."""
        for slot, adapter in loads:
            assert self._pages is not None, "a slot without pages"
            self._pages.load(slot, adapter)
            self._under_way.append(slot)

    @property
    def arrived(self) -> bool:
        """Whether a load is complete that was not settled yet."""
        return self._pages is not None and any(map(self._pages.loaded, self._under_way))

    def settle(self) -> None:
        """Let jobs use the adapters that have been loaded."""
        if self._pages is None or not self._under_way:
            return
        for slot in [slot for slot in self._under_way if self._pages.loaded(slot)]:
            self._under_way.remove(slot)
            self._slots.loaded(slot)
