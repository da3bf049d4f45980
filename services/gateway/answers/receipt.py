"""Where the time of a request went. Pure arithmetic over a clock that is given; knows no gRPC calls and no workers."""

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh


class Phase(enum.IntEnum):
    """What a request does at an instant, seen from the gateway."""

    OWN = 0
    """Work of the gateway that has no name of its own: what remains `unaccounted`."""
    TOKENIZE = 1
    """Waiting for the tokenizer, and tokenizing."""
    REMOTE = 2
    """Waiting for scheduler, worker or cache."""
    DETOKENIZE = 3
    """Turning tokens into text."""
    DELIVER = 4
    """Waiting for the client to read."""


_PHASES = len(Phase)


class Timeline:
    """Attributes every instant since its creation to exactly one phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = self.since = clock()
        self.phase = Phase.OWN
        self._spent = [0.0] * _PHASES

    def enter(self, phase: Phase) -> None:
        """What follows belongs to `phase`."""
        now = self._clock()
        self._spent[self.phase] += now - self.since
        self.since = now
        self.phase = phase

    def spent(self, phase: Phase) -> float:
        """Seconds in a phase that was left."""
        return self._spent[phase]

    def wall(self) -> float:
        """Seconds from the creation to the last change of phase."""
        return self.since - self.began


@dataclass(slots=True)
class AttemptCosts:
    """What one continuation cost at scheduler and workers, over all its attempts."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    preemptions: int = 0
    attempts: int = 0
    workers: list[str] = field(default_factory=list)
    hit: bool = False
    joined: bool = False

    def assigned(self, worker_id: str, queue_s: float) -> None:
        """A worker was found."""
        self.attempts += 1
        self.queue_s += queue_s
        if worker_id not in self.workers:
            self.workers.append(worker_id)

    def add(self, cost: mesh.JobCost) -> None:
        """What an attempt cost. The tokens of a generation that was joined are on its leader's receipt."""
        self.queue_s += cost.queue_s
        self.prefill_s += cost.prefill_s
        self.decode_s += cost.decode_s
        if not self.joined:
            self.prefill_tokens += cost.prefill_tokens
            self.cached_tokens += cost.cached_tokens
            self.fetched_tokens += cost.fetched_tokens
            self.preemptions += cost.preemptions

    def answered_by_cache(self) -> None:
        """The result cache had the answer: nothing that was asked of others counts."""
        self.queue_s = self.prefill_s = self.decode_s = 0.0
        self.prefill_tokens = self.cached_tokens = self.fetched_tokens = self.preemptions = self.attempts = 0
        self.workers.clear()
        self.hit = True


def timings(timeline: Timeline, ledger: AttemptCosts | None, first_token_at: float | None) -> api.Timings:
    """Splits the wall time of one request. `ledger` is that of the continuation that ended last.

    What others spent may overlap with the gateway's own work and with a slow client, and of a joined generation only
    its end lies within the request: no instant is counted twice, and what the worker measured goes first.
    """
    ledger = ledger or AttemptCosts()
    remote, deliver = timeline.spent(Phase.REMOTE), timeline.spent(Phase.DELIVER)
    cache_s = remote if ledger.hit else 0.0
    waited = remote - cache_s + deliver
    left = waited + timeline.spent(Phase.DETOKENIZE)
    decode_s = min(ledger.decode_s, left)
    prefill_s = min(ledger.prefill_s, left - decode_s)
    queue_s = min(ledger.queue_s, left - decode_s - prefill_s)
    others_s = decode_s + prefill_s + queue_s
    network_s = max(0.0, waited - others_s)
    return api.Timings(
        wall_s=timeline.wall(),
        tokenize_s=timeline.spent(Phase.TOKENIZE),
        cache_s=cache_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        detokenize_s=max(0.0, left - others_s - network_s),
        network_s=network_s,
        unaccounted_s=timeline.spent(Phase.OWN),
        first_token_s=max(0.0, first_token_at - timeline.began) if first_token_at is not None else 0.0,
    )


def fill_costs(receipt: api.Receipt, ledgers: Iterable[AttemptCosts]) -> None:
    """Adds up what the continuations of a request cost."""
    for ledger in ledgers:
        receipt.prefill_tokens += ledger.prefill_tokens
        receipt.cached_tokens += ledger.cached_tokens
        receipt.fetched_tokens += ledger.fetched_tokens
        receipt.preemptions += ledger.preemptions
        receipt.attempts = max(receipt.attempts, ledger.attempts)
        receipt.result_hit |= ledger.hit
        receipt.joined |= ledger.joined
        receipt.workers.extend(worker for worker in ledger.workers if worker not in receipt.workers)
