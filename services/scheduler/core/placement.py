"""Chooses the worker of a job: the prefix index and the cost rule. Knows hashes and loads, never jobs or links."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.hashing import KEY_BYTES, split_keys

BACKLOG_WEIGHT = 0.25  # Blocks of prompt to compute again that cost as much as one block of backlog.

COLD_ADAPTER_BLOCKS = 16  # Blocks of prompt that take about as long to compute as an adapter takes to load.


class PrefixIndex:
    """Which workers hold which blocks of prompts, by chained key.

    Each worker is one bit of an integer, so matching a prompt costs one look-up per matched block, whatever the number
    of workers.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._keys: dict[str, set[bytes]] = {}
        self._bits: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """The number of different blocks that at least one worker holds."""
        return len(self._holders)

    def add(self, worker_id: str, joined_keys: bytes) -> None:
        """Adds blocks that a worker has cached; `joined_keys` are 32-byte keys, joined."""
        bit = self._bit(worker_id)
        held = self._keys[worker_id]
        for key in split_keys(joined_keys):
            held.add(key)
            self._holders[key] = self._holders.get(key, 0) | bit

    def remove(self, worker_id: str, joined_keys: bytes) -> None:
        """Removes blocks that a worker has evicted; unknown keys are ignored."""
        held = self._keys.get(worker_id, set())
        for key in split_keys(joined_keys):
            if key in held:
                held.remove(key)
                self._clear(key, self._bits[worker_id])

    def remove_worker(self, worker_id: str) -> None:
        """Removes a worker with all its blocks; an unknown worker is ignored."""
        if worker_id not in self._bits:
            return
        bit = self._bits.pop(worker_id)
        del self._owners[bit]
        for key in self._keys.pop(worker_id):
            self._clear(key, bit)
        self._free_bits.append(bit)

    def match(self, joined_keys: bytes) -> dict[str, int]:
        """The number of leading blocks of a prompt that each worker holds; workers that hold none are absent."""
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
    """A worker with a free credit, its load in blocks of prompt, the number of its jobs, and whether it would load."""

    worker_id: str
    backlog_blocks: float
    jobs: int
    cold_adapter: bool = False
    """The job's adapter is not in its device memory."""


class Choice(NamedTuple):
    """The chosen worker, and how many leading blocks of the prompt it holds according to the prefix index."""

    worker_id: str
    matched_blocks: int


def choose(candidates: Iterable[Candidate], prompt_blocks: int, matched: Mapping[str, int]) -> Choice | None:
    """The cheapest candidate for a prompt: uncached blocks + 0.25 x backlog + 16 blocks for an adapter to load.

    Ties go to the smallest backlog, then to the fewest jobs, then to the smallest id.

    Longest-prefix routing alone sends all prompts with the same first block to one worker; the backlog term spreads
    them (bench/placement.py measures both).
    """

    def cost(candidate: Candidate) -> tuple[float, float, int, str]:
        uncached = prompt_blocks - matched.get(candidate.worker_id, 0)
        backlog = candidate.backlog_blocks
        loading = COLD_ADAPTER_BLOCKS * candidate.cold_adapter
        return (uncached + loading + BACKLOG_WEIGHT * backlog, backlog, candidate.jobs, candidate.worker_id)

    best = min(candidates, key=cost, default=None)
    return best and Choice(best.worker_id, matched.get(best.worker_id, 0))
