"""Prefixes between the device's pool and the tiers below: jobs that wait for blocks, blocks that are offered.

Lives on the engine's thread. Knows sequences, keys and contents as bytes; not where a tier keeps them.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from services.worker.kvcache.pool import KvPool
from services.worker.kvcache.tiers import BlockRequest, BlockStore, Contents, HostStore
from services.worker.kvcache.transfer_cost import TransferCost, recompute_s
from services.worker.planner.planner import Planner
from services.worker.planner.sequence import Sequence

LEAST_BLOCKS = 4
"""Shorter prefixes are neither kept nor asked for."""
# Read in one step for tiers below: copying them takes a tenth of a millisecond.
_OFFER_BYTES = 256 << 10
_MOST_OFFERS = 8192
# Blocks for which room in host memory is made together.
_KEPT_AT_ONCE = 32


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """Blocks on their way up: the tiers still to be asked, and who waits."""

    keys: list[bytes]
    deadline: float
    tiers: deque[BlockStore]
    waiting: list[Sequence] = field(default_factory=list)
    arrived: int = 0
    wish: BlockRequest | None = None


@dataclass(slots=True)
class Counts:
    """What became of blocks and of the wish for them, since the start."""

    fetched: int = 0
    """Blocks that came from a tier below."""
    late: int = 0
    """Pulls that were given up when their budget was over."""
    declined: int = 0
    """Prefixes that no tier was asked for, because computing them was predicted to be cheaper."""
    offered: int = 0
    """Blocks that a tier took."""
    spilled: int = 0
    """Evicted blocks that went to host memory."""


class Prefixes:
    """The engine's dealings with the tiers below its pool. Without a tier it does nothing."""

    def __init__(
        self,
        batch: Planner,
        memory: KvPool,
        prefill_rate: Callable[[], float],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """prefill_rate() tells tokens per second; wake() lets the engine look at what has arrived."""
        self.block_bytes = memory.block_bytes
        self.counts = Counts()
        self.parked = 0
        """Jobs that wait for blocks."""
        self._batch, self._memory = batch, memory
        self._prefill_rate, self._wake, self._clock = prefill_rate, wake, clock
        self._host: HostStore | None = None
        self._evicted: list[tuple[int, bytes]] = []
        self._remote: BlockStore | None = None
        self._writing = TransferCost()
        self._pulls: list[PrefixFetch] = []
        self._answers: deque[tuple[BlockRequest, Many[Contents] | None]] = deque()
        self._offers: dict[bytes, None] = {}

    def use_host(self, store: HostStore) -> None:
        """Evicted blocks go to this tier."""
        self._host = store
        self._batch.pool.on_evict = lambda block, key: self._evicted.append((block, key))

    def use_remote(self, store: BlockStore) -> None:
        """Blocks of prompts are offered to this tier."""
        self._remote = store

    # ---- jobs that arrive ----

    def consider(self, sequence: Sequence) -> None:
        """A job has arrived: it is parked if blocks of its prefix are worth waiting for."""
        if self._host is None and self._remote is None:
            return
        pool, usable = self._batch.pool, self._batch.usable_keys(sequence)
        found = pool.match(usable)
        missing = usable[len(found) :]
        if len(missing) < LEAST_BLOCKS or self._batch.is_computing(missing[0]):
            return
        pull = next((pull for pull in self._pulls if missing[0] in pull.keys), None)
        if pull is None:
            missing = missing[: pool.available - pool.idle(found)]
            budget_s = self._budget(len(missing))
            tiers = deque(tier for tier in (self._host, self._remote) if tier is not None)
            pull = PrefixFetch(missing, self._clock() + budget_s, tiers)
            pool.touch(found)
            if not self._ask_next(pull):
                self.counts.declined += 1
                return
            self._pulls.append(pull)
        pull.waiting.append(sequence)
        sequence.parked = True
        self.parked += 1

    def forget(self, sequence: Sequence) -> None:
        """A job has ended. If it was parked, and alone, nobody waits for its blocks any more."""
        if not sequence.parked:
            return
        self._unpark(sequence)
        for pull in self._pulls:
            if sequence in pull.waiting:
                pull.waiting.remove(sequence)
                if not pull.waiting:
                    self._end(pull)
                return

    @property
    def answered(self) -> bool:
        """There is something to settle."""
        return bool(self._answers)

    def settle(self) -> None:
        """Place what has arrived, give up what is late, let jobs go on whose blocks are there."""
        while self._answers:
            wish, payloads = self._answers.popleft()
            pull = next((pull for pull in self._pulls if pull.wish is wish), None)
            if pull is None:
                continue
            if payloads is None:
                if not self._ask_next(pull):
                    self._end(pull)
            elif not self._place(pull, payloads):
                self._end(pull)
        now = self._clock()
        for pull in [pull for pull in self._pulls if pull.deadline <= now]:
            self.counts.late += 1
            self._end(pull)

    # ---- blocks that are offered ----

    def computed(self, sequence: Sequence) -> None:
        """The prompt of a job is computed: its whole blocks are worth keeping, unless fetching them would not pay."""
        blocks = sequence.job.boundary // self._batch.block_size
        if self._remote is None or blocks < LEAST_BLOCKS or not self._batch.caches(sequence):
            return
        for key in self._remote.lacks(sequence.keys(blocks), self._budget(blocks)):
            if len(self._offers) >= _MOST_OFFERS:
                return
            self._offers[key] = None

    def offer_some(self) -> bool:
        """Hand a few blocks to the tier below. Whether it is worth calling again at once."""
        if self._remote is None or not self._offers:
            return False
        for key in list(self._offers)[: max(_OFFER_BYTES // self.block_bytes, 1)]:
            found = self._batch.pool.match([key])
            if found and not self._remote.offer(key, self._memory.read(found)[0]):
                return False
            self.counts.offered += len(found)
            del self._offers[key]
        return bool(self._offers)

    def keep_evicted(self) -> None:
        """Cached blocks were given away: before a step overwrites them, their contents go to host memory."""
        evicted, self._evicted = self._evicted, []
        if self._host is None or not evicted:
            return
        needed_s = recompute_s(len(evicted) * self._batch.block_size, self._prefill_rate())
        missing = set(self._host.lacks([key for _, key in evicted], needed_s))
        for start in range(0, len(evicted), _KEPT_AT_ONCE):
            piece = [(block, key) for block, key in evicted[start : start + _KEPT_AT_ONCE] if key in missing]
            kept = self._memory.keep([block for block, _ in piece])
            for (_, key), contents in zip(piece, kept, strict=False):
                self.counts.spilled += self._host.offer(key, contents)

    # ---- within ----

    def _budget(self, blocks: int) -> float:
        """Seconds that computing so many blocks takes, less those that writing them to the pool would."""
        needed_s = recompute_s(blocks * self._batch.block_size, self._prefill_rate())
        return max(needed_s - (self._writing.predict(blocks * self.block_bytes) or 0.0), 0.0)

    def _ask_next(self, pull: PrefixFetch) -> bool:
        """Ask the next tier for what is still missing. False if there is nothing to wait for."""
        keys = pull.keys[pull.arrived :]
        while keys and pull.tiers:
            tier = pull.tiers.popleft()
            budget_s = min(self._budget(len(keys)), pull.deadline - self._clock())
            if tier.pays(len(keys), budget_s):
                pull.wish = BlockRequest(keys, budget_s, self._take)
                tier.fetch(pull.wish)
                return True
        return False

    def _take(self, wish: BlockRequest, payloads: Many[Contents] | None) -> None:
        """From any thread: what a tier has to say."""
        self._answers.append((wish, payloads))
        self._wake()

    def _place(self, pull: PrefixFetch, payloads: Many[Contents]) -> bool:
        """Write contents to blocks of the pool, where the job will find them. False if they do not fit."""
        keys = pull.keys[pull.arrived : pull.arrived + len(payloads)]
        if len(keys) < len(payloads) or any(len(payload) != self.block_bytes for payload in payloads):
            return False
        pool = self._batch.pool
        new = [(key, payload) for key, payload in zip(keys, payloads, strict=True) if not pool.match([key])]
        if len(new) > pool.available:
            return False
        blocks = pool.take(len(new))
        self.keep_evicted()
        began = self._clock()
        self._memory.write(blocks, [payload for _, payload in new])
        self._writing.moved(len(new) * self.block_bytes, self._clock() - began)
        for block, (key, _) in zip(blocks, new, strict=True):
            pool.publish(block, key)
        pool.release(blocks)
        pull.arrived += len(keys)
        self.counts.fetched += len(new)
        for sequence in pull.waiting:
            sequence.fetched.update(key for key, _ in new)
        return True

    def _end(self, pull: PrefixFetch) -> None:
        """Nothing more will come: who waited goes on with what there is, and computes the rest."""
        self._pulls.remove(pull)
        if pull.wish is not None:
            pull.wish.abandoned = True
        for sequence in pull.waiting:
            self._unpark(sequence)
            self._batch.pool.touch(self._batch.pool.match(self._batch.usable_keys(sequence)))
        if pull.arrived:  # One that shared a shorter prefix may have more to fetch.
            for sequence in pull.waiting[1:]:
                self.consider(sequence)

    def _unpark(self, sequence: Sequence) -> None:
        sequence.parked = False
        self.parked -= 1
