"""Which worker a job goes to: the prefix index and the cost rule. Knows hashes and loads, never jobs or links."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.hashing import KEY_BYTES, split_keys

BACKLOG_WEIGHT = 0.25  # Blocks of recomputation that one block of backlog is worth.


class PrefixIndex:
    """Which workers hold which prompt block, by chained key.

    Workers are bits of an integer, so following one prompt costs one look-up per matched block however many workers
    there are.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._keys: dict[str, set[bytes]] = {}
        self._bits: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """Number of different blocks held anywhere."""
        return len(self._holders)

    def add(self, worker_id: str, joined_keys: bytes) -> None:
        """A worker has cached blocks."""
        bit = self._bit(worker_id)
        held = self._keys[worker_id]
        for key in split_keys(joined_keys):
            held.add(key)
            self._holders[key] = self._holders.get(key, 0) | bit

    def drop(self, worker_id: str, joined_keys: bytes) -> None:
        """A worker has evicted blocks."""
        held = self._keys.get(worker_id, set())
        for key in split_keys(joined_keys):
            if key in held:
                held.remove(key)
                self._clear(key, self._bits[worker_id])

    def forget(self, worker_id: str) -> None:
        """A worker is gone with all it held."""
        if worker_id not in self._bits:
            return
        bit = self._bits.pop(worker_id)
        del self._owners[bit]
        for key in self._keys.pop(worker_id):
            self._clear(key, bit)
        self._free_bits.append(bit)

    def match(self, joined_keys: bytes) -> dict[str, int]:
        """How many leading blocks of a prompt each worker holds; workers that hold none are absent."""
        matched: dict[str, int] = {}
        remaining = self._holders.get(joined_keys[:KEY_BYTES], 0) if joined_keys else 0
        depth = 0
        while remaining:
            depth += 1
            key = joined_keys[depth * KEY_BYTES : (depth + 1) * KEY_BYTES]
            further = remaining & self._holders.get(key, 0)
            stopped = remaining ^ further
            while stopped:
                bit = stopped & -stopped
                matched[self._owners[bit]] = depth
                stopped ^= bit
            remaining = further
        return matched

    def _bit(self, worker_id: str) -> int:
        if worker_id not in self._bits:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
            self._bits[worker_id] = bit
            self._owners[bit] = worker_id
            self._keys[worker_id] = set()
        return self._bits[worker_id]

    def _clear(self, key: bytes, bit: int) -> None:
        rest = self._holders[key] & ~bit
        if rest:
            self._holders[key] = rest
        else:
            del self._holders[key]


class Candidate(NamedTuple):
    """A worker with a free credit, and what it still has to do, in blocks of prompt."""

    worker_id: str
    backlog_blocks: float
    jobs: int


class Choice(NamedTuple):
    """The worker picked and how many leading blocks of the prompt it is thought to hold."""

    worker_id: str
    matched_blocks: int


def choose(candidates: Iterable[Candidate], prompt_blocks: int, matched: Mapping[str, int]) -> Choice | None:
    """The cheapest candidate for a prompt: uncached blocks + 0.25 x backlog; ties go to the least busy, then by id.

    Pure longest-prefix routing collapses on one worker when all prompts share a first block; the backlog term is what
    spreads them (bench/placement.py measures both).
    """

    def cost(candidate: Candidate) -> tuple[float, float, int, str]:
        uncached = prompt_blocks - matched.get(candidate.worker_id, 0)
        backlog = candidate.backlog_blocks
        return (uncached + BACKLOG_WEIGHT * backlog, backlog, candidate.jobs, candidate.worker_id)

    best = min(candidates, key=cost, default=None)
    return best and Choice(best.worker_id, matched.get(best.worker_id, 0))
