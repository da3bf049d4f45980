"""Chooses the workers of a job: the prefix index, the cost rule, roles. Knows hashes and loads, never jobs or links."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.hashing import KEY_BYTES, split_keys
from services.scheduler.core.messages import Role

BACKLOG_WEIGHT = 0.25  # Blocks of prompt to compute again that cost as much as one block of backlog.

COLD_ADAPTER_BLOCKS = 16  # Blocks of prompt that take about as long to compute as an adapter takes to load.

WORTH_MOVING_BLOCKS = 4
"""Fewer blocks of a prompt are neither fetched from another worker nor computed at one for the sake of another."""


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
    """A worker, its load in blocks of prompt, the number of its jobs, and whether it would load."""

    worker_id: str
    backlog_blocks: float
    jobs: int
    cold_adapter: bool = False
    """The job's adapter is not in its device memory."""
    role: Role = Role.BOTH
    free: bool = True
    """It has a free credit."""


class Choice(NamedTuple):
    """The chosen worker, and how many leading blocks of the prompt it holds according to the prefix index."""

    worker_id: str
    matched_blocks: int
    handoff_to: str = ""
    """The worker that continues after the first token; empty: the same one."""
    source: str = ""
    """host:port of a worker from which blocks of the prompt may be fetched; empty: there is none."""


def stages(workers: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """The workers for prompts and those for answers: of that role, else of both. Both lists are empty where the
    workers' roles do not divide the work."""
    by_role: dict[Role, list[Candidate]] = {role: [] for role in Role}
    for worker in workers:
        by_role[worker.role].append(worker)
    prompts, answers = (by_role[role] or by_role[Role.BOTH] for role in (Role.PREFILL, Role.DECODE))
    return (prompts, answers) if prompts and answers and prompts is not answers else ([], [])


def choose_stages(
    candidates: Iterable[Candidate], prompt_blocks: int, matched: Mapping[str, int], divisible: bool
) -> Choice | None:
    """The cheapest worker for a prompt and, where roles divide the work, the cheapest one for its answer.

    A job is divided unless it is not `divisible`, or the worker for its answer holds nearly all of its prompt. Any
    worker takes a whole job, but one for prompts only if there is no other. None if the job has to wait for a credit.
    """
    workers = list(candidates)
    roles = any(worker.role is not Role.BOTH for worker in workers)
    prompts, answers = stages(workers) if divisible and roles else ([], [])
    if not prompts:
        whole = [worker for worker in workers if worker.role is not Role.PREFILL] or workers
        return choose(whole, prompt_blocks, matched)
    second = choose(answers, prompt_blocks, matched)
    if second is not None and prompt_blocks - second.matched_blocks < WORTH_MOVING_BLOCKS:
        return second
    first = choose(prompts, prompt_blocks, matched)
    if first is not None and second is not None:
        return first._replace(handoff_to=second.worker_id)
    return choose([worker for worker in workers if worker.role is Role.BOTH], prompt_blocks, matched)


def choose(candidates: Iterable[Candidate], prompt_blocks: int, matched: Mapping[str, int]) -> Choice | None:
    """The cheapest candidate with a free credit.

    It costs the uncached blocks of the prompt + 0.25 x backlog + 16 blocks for an adapter to load. Ties go to the
    smallest backlog, then to the fewest jobs, then to the smallest id.

    Longest-prefix routing alone sends all prompts with the same first block to one worker; the backlog term spreads
    them (bench/placement.py measures both).
    """

    def cost(candidate: Candidate) -> tuple[float, float, int, str]:
        uncached = prompt_blocks - matched.get(candidate.worker_id, 0)
        backlog = candidate.backlog_blocks
        loading = COLD_ADAPTER_BLOCKS * candidate.cold_adapter
        return (uncached + loading + BACKLOG_WEIGHT * backlog, backlog, candidate.jobs, candidate.worker_id)

    best = min((candidate for candidate in candidates if candidate.free), key=cost, default=None)
    return best and Choice(best.worker_id, matched.get(best.worker_id, 0))
