"""Lends blocks to other workers, which copy them out of this one's memory: lent blocks are neither evicted nor reused.

Runs on the engine's thread. Knows keys and numbers of blocks, not who borrows them or how they are copied.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.worker.engine.base import BlockLoan
from services.worker.engine.block_reads import FOLLOW_S
from services.worker.planner.block_pool import BlockPool

LOAN_S = 2.0
"""Seconds that a loan lasts without a block being lent or returned, while some are lent."""
_LEAST_LEFT = 4
"""One block of so many of the pool may be lent."""


@dataclass(slots=True)
class _Lent:
    """What is lent of a loan."""

    until: float
    blocks: deque[int] = field(default_factory=deque)
    """Those that were not given back to the pool, in the order of the loan's keys."""
    freed: int = 0
    """How many were."""


class BlockLoans:
    """The loans of other workers. `add` and `pending` may be used from any thread."""

    def __init__(self, pool: BlockPool, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """wake() makes the engine call `serve`."""
        self._pool, self._wake, self._clock = pool, wake, clock
        self._new: deque[BlockLoan] = deque()
        self._loans: dict[BlockLoan, _Lent] = {}

    def add(self, loan: BlockLoan) -> None:
        """Answer this request."""
        self._new.append(loan)
        self._wake()

    @property
    def pending(self) -> bool:
        """Whether there is something that `serve` has not seen."""
        return bool(self._new) or any(
            loan.cancelled or loan.returned > lent.freed for loan, lent in list(self._loans.items())
        )

    @property
    def blocks(self) -> Iterator[int]:
        """The blocks that are lent."""
        return (block for lent in self._loans.values() for block in lent.blocks)

    def serve(self) -> None:
        """Take back what was copied, lend what was computed, end what is over."""
        if not self._new and not self._loans:
            return
        now = self._clock()
        while self._new:
            self._loans[self._new.popleft()] = _Lent(now + FOLLOW_S)
        for loan, lent in list(self._loans.items()):
            self._serve(loan, lent, now)

    def _serve(self, loan: BlockLoan, lent: _Lent, now: float) -> None:
        if loan.returned > lent.freed:
            lent.until = now + (LOAN_S if loan.lent > loan.returned else FOLLOW_S)
            self._free(lent, loan.returned - lent.freed)
        if loan.cancelled:
            self._end(loan, lent)
            return
        room = self._pool.total // _LEAST_LEFT - sum(len(each.blocks) for each in self._loans.values())
        found = self._pool.match(loan.keys[loan.lent : loan.lent + max(room, 0)])
        if found:
            self._pool.share(found)
            lent.blocks.extend(found)
            loan.lent += len(found)
            lent.until = now + LOAN_S
            loan.answer(found)
        elif now > lent.until or (not lent.blocks and (loan.lent == len(loan.keys) or not (loan.follow or room <= 0))):
            self._end(loan, lent)

    def _free(self, lent: _Lent, count: int) -> None:
        lent.freed += count
        self._pool.release([lent.blocks.popleft() for _ in range(count)])

    def _end(self, loan: BlockLoan, lent: _Lent) -> None:
        loan.over = True  # Before the blocks are free: copies that are returned later may be wrong.
        del self._loans[loan]
        self._free(lent, len(lent.blocks))
        loan.answer(None)
