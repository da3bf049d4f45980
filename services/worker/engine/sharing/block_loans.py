"""Lends blocks to other workers, which copy them out of this one's memory: lent blocks are neither evicted nor reused.

Layers of a block that are computed are named before the block is whole. They are not lent: copies of them count only if
the block is lent as soon as its step has succeeded, because until then it belongs to the job that computes it.

Runs on the engine's thread. Knows keys and numbers of blocks, not who borrows them or how they are copied.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

from services.worker.engine.base import BlockLoan, LentBlocks
from services.worker.engine.sharing.block_reads import FOLLOW_S, Computing
from services.worker.kvcache.pool import PARTS
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
    begun: list[int] = field(default_factory=list)
    """The next blocks, which the running step computes, if layers of them were named."""
    layers: int = 0
    """How many of their layers were."""


class BlockLoans:
    """The loans of other workers. `add` and `pending` may be used from any thread."""

    def __init__(
        self,
        pool: BlockPool,
        wake: Callable[[], None],
        computing: Computing = lambda keys: [],
        settled: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wake() makes the engine call `serve`. settled(): all that was written to the pool is in place."""
        self._pool, self._wake, self._computing, self._settled, self._clock = pool, wake, computing, settled, clock
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

    def serve(self) -> bool:
        """Take back what was copied, lend what was computed, end what is over. -> whether to call again at once:
        blocks that were fetched are not in place yet, and a borrower would copy what was there before."""
        if not self._new and not self._loans:
            return False
        now, settled = self._clock(), self._settled()
        self._take_new(now)
        for loan, lent in list(self._loans.items()):
            self._serve(loan, lent, now, settled)
        return not settled

    def layers_computed(self, computed: int, layers: int) -> bool:
        """Name these layers of the blocks of the step for the loans that wait for them. -> whether there are any
        loans."""
        now = self._clock()
        self._take_new(now)
        for loan, lent in self._loans.items():
            blocks = self._computing(loan.keys[loan.lent :]) if loan.in_parts and loan.follow else []
            if blocks and not lent.blocks:
                lent.until = now + FOLLOW_S
            if blocks and computed - lent.layers >= max(layers // PARTS, 1):
                loan.answer(LentBlocks(blocks, lent.layers, computed))
                lent.begun, lent.layers = blocks, computed
        return bool(self._loans)

    def void_parts(self) -> None:
        """The step was computed, or failed: layers of blocks that were not lent at once count no more."""
        for lent in self._loans.values():
            lent.begun, lent.layers = [], 0

    def _take_new(self, now: float) -> None:
        while self._new:
            self._loans[self._new.popleft()] = _Lent(now + FOLLOW_S)

    def _serve(self, loan: BlockLoan, lent: _Lent, now: float, settled: bool) -> None:
        if loan.returned > lent.freed:
            lent.until = now + (LOAN_S if loan.lent > loan.returned else FOLLOW_S)
            self._free(lent, loan.returned - lent.freed)
        if loan.cancelled:
            self._end(loan, lent)
            return
        if not settled:
            return
        room = self._pool.total // _LEAST_LEFT - sum(len(each.blocks) for each in self._loans.values())
        found = self._pool.match(loan.keys[loan.lent : loan.lent + max(room, 0)])
        if found:
            self._pool.share(found)
            lent.blocks.extend(found)
            loan.lent += len(found)
            lent.until = now + LOAN_S
            same = sum(takewhile(bool, map(eq, found, lent.begun)))
            for part in (LentBlocks(found[:same], lent.layers), LentBlocks(found[same:])):
                if part.blocks:
                    loan.answer(part)
            lent.begun, lent.layers = [], 0
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
