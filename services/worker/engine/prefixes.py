"""Moves prefixes between the device's pool and the tiers below: jobs wait for blocks, computed blocks are offered.

Runs on the engine's thread. Knows sequences, keys and contents as bytes; not where a tier keeps them.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from services.worker.kvcache.pool import KvPool
from services.worker.kvcache.tiers import BlockRequest, BlockStore, Contents, HostStore, Peers
from services.worker.kvcache.transfer_cost import TransferCost, recompute_s
from services.worker.planner.planner import Planner
from services.worker.planner.sequence import Sequence

LEAST_BLOCKS = 4
"""Shorter prefixes are neither offered nor fetched."""
PREFETCH_S = 60.0
"""Seconds that blocks are fetched for a job that has not come."""
# Blocks are fetched ahead of their job even if that takes up to 4 times as long as computing them: no job waits.
_HOPELESS = 4.0
_MOST_AHEAD = 1 << 16
_OFFER_BYTES = 256 << 10  # offered in one step: copying them takes a tenth of a millisecond
_MOST_OFFERS = 8192
_KEPT_AT_ONCE = 32  # blocks for which host memory makes room together


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """Blocks that are being fetched for waiting sequences, and the tiers that were not asked yet."""

    keys: list[bytes]
    deadline: float
    tiers: deque[BlockStore]
    waiting: list[Sequence] = field(default_factory=list)
    arrived: int = 0
    request: BlockRequest | None = None
    ahead: BlockStore | None = None
    """The tier that is asked for a job that has not come; None: jobs wait."""


@dataclass(slots=True)
class Counts:
    """Blocks and fetches by outcome, since the start."""

    fetched: int = 0
    """Blocks that came from a tier below."""
    late: int = 0
    """Fetches that were given up when their budget was over."""
    declined: int = 0
    """Prefixes that were not fetched because computing them was predicted to be faster."""
    offered: int = 0
    """Blocks that a tier took."""
    spilled: int = 0
    """Evicted blocks that were copied to host memory."""


class Prefixes:
    """The tiers below the engine's pool. Without a tier it does nothing."""

    def __init__(
        self,
        planner: Planner,
        kv: KvPool | None,
        prefill_rate: Callable[[], float],
        wake: Callable[[], None],
        overwritten: Callable[[Many[int]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """kv: None if blocks have no contents, so that no tier can be used. prefill_rate() returns tokens per second;
        wake() makes the engine look at what has arrived. overwritten() is called with the blocks of the pool that got
        new contents."""
        self.block_bytes = 0 if kv is None else kv.block_bytes
        self.counts = Counts()
        self.waiting = 0
        """Jobs that wait for blocks."""
        self._planner, self._kv = planner, kv
        self._prefill_rate, self._wake, self._overwritten, self._clock = prefill_rate, wake, overwritten, clock
        self._host: HostStore | None = None
        self._evicted: list[tuple[int, bytes]] = []
        self._remote: BlockStore | None = None
        self._peers: Peers | None = None
        self._ahead: dict[bytes, None] = {}
        """Keys of blocks that were fetched for jobs that have not come."""
        self._writing = TransferCost()
        self._fetches: list[PrefixFetch] = []
        self._answers: deque[tuple[BlockRequest, Many[Contents] | None]] = deque()
        self._offers: dict[bytes, None] = {}

    def use_host(self, store: HostStore) -> None:
        """Copy evicted blocks to this tier."""
        assert self._kv is not None, "blocks without contents cannot be kept"
        self._host = store
        self._planner.pool.on_evict = lambda block, key: self._evicted.append((block, key))

    def use_remote(self, store: BlockStore) -> None:
        """Offer blocks of prompts to this tier."""
        assert self._kv is not None, "blocks without contents cannot be shared"
        self._remote = store

    def use_peers(self, peers: Peers) -> None:
        """Fetch blocks from the workers that jobs name."""
        assert self._kv is not None, "blocks without contents cannot be fetched"
        self._peers = peers

    # ---- jobs that arrive ----

    def prefetch(self, source: str, keys: Many[bytes]) -> None:
        """Begin to fetch blocks that another worker computes, unless that is predicted to take far too long."""
        if self._peers is None:
            return
        pool = self._planner.pool
        found = pool.match(keys)
        missing = list(keys[len(found) :][: pool.available - pool.idle(found)])
        if len(missing) < LEAST_BLOCKS or self._planner.is_computing(missing[0]) or self._fetch_of(missing[0]):
            return
        tier = self._peers(source)
        if not tier.is_faster(len(missing), _HOPELESS * self._budget(len(missing))):
            self.counts.declined += 1
            return
        pool.touch(found)
        fetch = PrefixFetch(missing, self._clock() + PREFETCH_S, deque(), ahead=tier)
        fetch.request = BlockRequest(missing, PREFETCH_S, self._answer, follow=True)
        self._fetches.append(fetch)
        tier.fetch(fetch.request)

    def consider(self, sequence: Sequence) -> None:
        """A job has arrived: hold it if fetching blocks of its prefix is predicted to be faster than computing them."""
        peer = self._peers(sequence.job.source) if self._peers is not None and sequence.job.source else None
        if self._host is None and self._remote is None and peer is None:
            return
        pool, usable = self._planner.pool, self._planner.usable_keys(sequence)
        if self._ahead:
            self._planner.note_fetched(sequence, [key for key in usable if self._ahead.pop(key, key) is None])
        found = pool.match(usable)
        missing = usable[len(found) :]
        if not missing or self._planner.is_computing(missing[0]):
            return
        fetch = self._fetch_of(missing[0])
        if fetch is not None and fetch.ahead is not None and not self._is_worth_waiting(fetch, len(missing)):
            return
        if fetch is None:
            if len(missing) < LEAST_BLOCKS:
                return
            missing = missing[: pool.available - pool.idle(found)]
            budget_s = self._budget(len(missing))
            tiers = deque(tier for tier in (self._host, peer, self._remote) if tier is not None)
            fetch = PrefixFetch(missing, self._clock() + budget_s, tiers)
            pool.touch(found)
            if not self._ask_next(fetch):
                self.counts.declined += 1
                return
            self._fetches.append(fetch)
        fetch.waiting.append(sequence)
        self._planner.hold(sequence)
        self.waiting += 1

    def forget(self, sequence: Sequence) -> None:
        """A job has ended. A fetch for which no other job waits is abandoned."""
        if not sequence.waiting_for_blocks:
            return
        self._resume(sequence)
        for fetch in self._fetches:
            if sequence in fetch.waiting:
                fetch.waiting.remove(sequence)
                if not fetch.waiting:
                    self._end(fetch)
                return

    @property
    def answered(self) -> bool:
        """Whether there are answers to settle."""
        return bool(self._answers)

    def settle(self) -> None:
        """Write arrived blocks to the pool, give up late fetches, resume jobs whose fetches have ended."""
        while self._answers:
            request, payloads = self._answers.popleft()
            fetch = next((fetch for fetch in self._fetches if fetch.request is request), None)
            if fetch is None:
                continue
            if payloads is None:
                if not self._ask_next(fetch):
                    self._end(fetch)
            elif not self._write(fetch, payloads):
                self._end(fetch)
        if self._fetches:
            now = self._clock()
            for fetch in [fetch for fetch in self._fetches if fetch.deadline <= now]:
                self.counts.late += 1
                self._end(fetch)

    # ---- blocks that are offered ----

    def computed(self, sequence: Sequence) -> None:
        """A job's prompt is computed: offer its whole blocks, unless fetching them would take far longer. Blocks that
        another worker has computed are offered by that one, if at all."""
        blocks = sequence.job.prompt_len // self._planner.block_size
        if self._remote is None or blocks < LEAST_BLOCKS or not self._planner.caches(sequence):
            return
        found = sequence.found_tokens // self._planner.block_size if sequence.job.source else 0
        keys = sequence.keys.first(blocks)[found:]
        for key in self._remote.lacks(keys, self._budget(len(keys))):
            if len(self._offers) >= _MOST_OFFERS:
                return
            self._offers[key] = None

    def offer_some(self) -> bool:
        """Pass a few blocks to the remote tier. -> whether there are more to pass at once."""
        if self._remote is None or self._kv is None or not self._offers:
            return False
        for key in list(self._offers)[: max(_OFFER_BYTES // self.block_bytes, 1)]:
            found = self._planner.pool.match([key])
            if found and not self._remote.offer(key, self._kv.read(found)[0]):
                return False
            self.counts.offered += len(found)
            del self._offers[key]
        return bool(self._offers)

    def keep_evicted(self) -> None:
        """Copy the contents of evicted blocks to host memory before a step overwrites them."""
        if self._host is None or self._kv is None or not self._evicted:
            return
        evicted, self._evicted = self._evicted, []
        needed_s = recompute_s(len(evicted) * self._planner.block_size, self._prefill_rate())
        missing = set(self._host.lacks([key for _, key in evicted], needed_s))
        for start in range(0, len(evicted), _KEPT_AT_ONCE):
            piece = [(block, key) for block, key in evicted[start : start + _KEPT_AT_ONCE] if key in missing]
            kept = self._kv.keep([block for block, _ in piece])
            for (_, key), contents in zip(piece, kept, strict=False):
                self.counts.spilled += self._host.offer(key, contents)

    # ---- one fetch ----

    def _fetch_of(self, key: bytes) -> PrefixFetch | None:
        """The fetch of this block."""
        return next((fetch for fetch in self._fetches if key in fetch.keys), None)

    def _is_worth_waiting(self, fetch: PrefixFetch, blocks: int) -> bool:
        """The job has come for which blocks are being fetched: whether it waits for the rest. If not, the fetch
        ends."""
        assert fetch.ahead is not None, fetch
        budget_s = self._budget(blocks)
        if fetch.ahead.is_faster(blocks, budget_s):
            fetch.ahead, fetch.deadline = None, self._clock() + budget_s
            return True
        self.counts.declined += 1
        self._end(fetch)
        return False

    def _budget(self, blocks: int) -> float:
        """Seconds that computing `blocks` blocks takes, less those that writing them to the pool would take."""
        needed_s = recompute_s(blocks * self._planner.block_size, self._prefill_rate())
        return max(needed_s - (self._writing.predict(blocks * self.block_bytes) or 0.0), 0.0)

    def _ask_next(self, fetch: PrefixFetch) -> bool:
        """Request the missing blocks from the next tier. False if there is no tier that would be faster."""
        keys = fetch.keys[fetch.arrived :]
        while keys and fetch.tiers:
            tier = fetch.tiers.popleft()
            budget_s = min(self._budget(len(keys)), fetch.deadline - self._clock())
            if tier.is_faster(len(keys), budget_s):
                fetch.request = BlockRequest(keys, budget_s, self._answer)
                tier.fetch(fetch.request)
                return True
        return False

    def _answer(self, request: BlockRequest, payloads: Many[Contents] | None) -> None:
        """Queue a tier's answer. Called from any thread."""
        self._answers.append((request, payloads))
        self._wake()

    def _write(self, fetch: PrefixFetch, payloads: Many[Contents]) -> bool:
        """Write contents to blocks of the pool, where the job will find them. False if they do not fit."""
        keys = fetch.keys[fetch.arrived : fetch.arrived + len(payloads)]
        if self._kv is None or len(keys) < len(payloads):
            return False
        if any(len(payload) != self.block_bytes for payload in payloads):
            return False
        pool = self._planner.pool
        new = [(key, payload) for key, payload in zip(keys, payloads, strict=True) if not pool.match([key])]
        if len(new) > pool.available:
            return False
        blocks = pool.take(len(new))
        self.keep_evicted()
        began = self._clock()
        self._kv.write(blocks, [payload for _, payload in new])
        self._overwritten(blocks)
        self._writing.moved(len(new) * self.block_bytes, self._clock() - began)
        for block, (key, _) in zip(blocks, new, strict=True):
            pool.publish(block, key)
        pool.release(blocks)
        fetch.arrived += len(keys)
        self.counts.fetched += len(new)
        for sequence in fetch.waiting:
            self._planner.note_fetched(sequence, (key for key, _ in new))
        if not fetch.waiting and len(self._ahead) < _MOST_AHEAD:
            self._ahead.update(dict.fromkeys(key for key, _ in new))
        return True

    def _end(self, fetch: PrefixFetch) -> None:
        """The fetch is over: its jobs go on with the blocks that arrived and compute the rest."""
        self._fetches.remove(fetch)
        if fetch.request is not None:
            fetch.request.abandoned = True
        pool = self._planner.pool
        for sequence in fetch.waiting:
            self._resume(sequence)
            pool.touch(pool.match(self._planner.usable_keys(sequence)))
        if fetch.arrived:  # A job that shared a shorter prefix may have more blocks to fetch.
            for sequence in fetch.waiting[1:]:
                self.consider(sequence)

    def _resume(self, sequence: Sequence) -> None:
        self._planner.resume(sequence)
        self.waiting -= 1
