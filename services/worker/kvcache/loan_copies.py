"""The copies of one loan's blocks: which layers of them were copied, and which copies are whole. Knows no messages.

Layers of a block may be copied before the block is lent. They count only if the lender names them when it lends it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from services.worker.kvcache.shared_memory import CannotShare, MappedPool
from services.worker.kvcache.tiers import Contents

_layers = attrgetter("layers")


@dataclass(slots=True)
class _Copy:
    """A block of the other worker, and its copy."""

    place: int
    contents: Contents | None = None
    """None: there was no room yet."""
    layers: int = 0
    """How many of its first layers are copied; none without contents."""


class LoanCopies:
    """One thread at a time uses it. `begin` and `copy` take as long as the copying."""

    def __init__(self, pool: MappedPool) -> None:
        """pool: the other worker's memory."""
        self._pool = pool
        self._begun: list[_Copy] = []
        """The blocks that are to be lent next."""
        self._lent: deque[_Copy] = deque()
        self._whole: deque[Contents] = deque()
        self.copied = 0
        """Blocks that were copied whole so far."""

    @property
    def waiting(self) -> bool:
        """Whether blocks are lent that are not copied."""
        return bool(self._lent)

    @property
    def unconfirmed(self) -> bool:
        """Whether there are whole copies that were not taken."""
        return bool(self._whole)

    def begin(self, places: Sequence[int], first: int, layers: int) -> None:
        """Copy layers of blocks that are not lent yet, for as many as there is room. first: 0 if nothing counts that
        was copied of such blocks before; layers: how many layers are computed. Raises CannotShare."""
        if not first:
            self._begun = [_Copy(place) for place in places]
        elif [copy.place for copy in self._begun] != list(places):
            raise CannotShare("the other worker has named other blocks than before")
        for _, each in groupby(sorted(self._begun, key=_layers), _layers):
            group = list(each)
            if group[0].layers < layers:
                for copy, contents in zip(group, self._copied(group, layers), strict=False):
                    copy.contents, copy.layers = contents, layers

    def lend(self, places: Sequence[int], first: int) -> None:
        """Note that these blocks are lent. first: the number of their layers whose copies count."""
        begun, self._begun = self._begun[: len(places)], self._begun[len(places) :]
        known = {copy.place: copy for copy in begun}
        for place in places:
            copy = known.get(place)
            self._lent.append(_Copy(place) if copy is None or copy.layers > first else copy)

    def copy(self) -> tuple[int, bool]:
        """Copy what is missing of the lent blocks; of the first ones alone, if there is no room for all. -> how many
        are whole now, and whether nothing was copied of them before. Raises CannotShare."""
        made, anew = 0, True
        while self._lent:
            layers, each = next(groupby(self._lent, _layers))
            group = list(each)
            copied = self._copied(group, None)
            self._whole += copied
            for _ in copied:
                self._lent.popleft()
            made, anew = made + len(copied), anew and not layers
            if len(copied) < len(group):
                break
        self.copied += made
        return made, anew

    def take(self, count: int) -> list[Contents]:
        """The first whole copies that were not taken."""
        return [self._whole.popleft() for _ in range(count)]

    def _copied(self, group: Sequence[_Copy], end: int | None) -> Sequence[Contents]:
        """Copy further layers of blocks of which equally many were copied."""
        into = [copy.contents for copy in group if copy.contents is not None]
        return self._pool.copy([copy.place for copy in group], into, group[0].layers, end)
