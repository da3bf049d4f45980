"""A gateway's share of the scheduler's queue: once that was full, the scheduler has few jobs to refuse, and its queue
is never empty."""

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from grpc import StatusCode

from services.errors import WeftError
from services.gateway.links.queue_share import QueueShare

# ---- one gateway ----


def filled(tenants: dict[str, int], refused_at: float = 0.0) -> QueueShare:
    """A share whose jobs wait, after a refusal."""
    share = QueueShare()
    for tenant, jobs in tenants.items():
        for _ in range(jobs):
            share.enter(tenant)
    share.refused(0.7, refused_at)
    return share


def reason(error: WeftError | None) -> str:
    """Why a job is refused; empty if it is not."""
    return error.reason if error is not None else ""


def test_any_number_waits_until_the_scheduler_refuses_one() -> None:
    share = QueueShare()
    for _ in range(5000):
        assert share.refusal("t", False, 0.0) is None
        share.enter("t")
    share.refused(0.7, 1.0)
    error = share.refusal("t", False, 1.0)
    assert error is not None
    assert (error.code, error.reason, error.retry_after_s) == (StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 0.7)
    assert share.refusal("t", False, 20.0) is None


def test_as_many_are_submitted_as_are_answered() -> None:
    share = filled({"t": 800})
    for _ in range(100):
        share.leave("t")
    assert reason(share.refusal("t", False, 0.0)) == "QUEUE_FULL"
    share.leave("t")
    assert share.refusal("t", False, 0.0) is None


def test_another_scheduler_is_not_full() -> None:
    share = filled({"t": 80})
    share.forget()
    assert share.refusal("t", False, 0.0) is None


def test_the_queue_of_others_is_asked_again_soon_but_not_at_once() -> None:
    share = filled({})
    assert reason(share.refusal("t", False, 0.01)) == "QUEUE_FULL"
    assert share.refusal("t", False, 0.1) is None


def test_a_tenant_that_fills_the_queue_does_not_lock_the_others_out() -> None:
    share = filled({"many": 80})
    assert reason(share.refusal("many", False, 0.0)) == "QUEUE_FULL"
    entered = 0
    while share.refusal("few", False, 0.0) is None:
        share.enter("few")
        entered += 1
    assert entered == 35, "half of the seventy that may wait"
    for number in range(1000):
        if share.refusal(f"tenant {number}", False, 0.0) is None:
            share.enter(f"tenant {number}")
    assert share.waiting <= 140, "at most twice as many wait"


def test_a_nearly_full_queue_lowers_the_share_once_until_that_takes_effect() -> None:
    share = QueueShare()
    for _ in range(80):
        share.enter("t")
    for _ in range(10):
        share.leave("t")
        share.crowded(0.7, 0.0)
    assert (share.waiting, share.most(0.0)) == (70, 79 * 7 / 8)
    error = share.refusal("t", False, 0.0)
    assert error is not None
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 0.7)
    share.leave("t")
    share.crowded(0.7, 0.0)
    assert share.most(0.0) == 69 * 7 / 8


def test_a_place_is_kept_for_a_request_that_is_read() -> None:
    share = filled({"t": 80})
    for _ in range(15):
        share.leave("t")
    read = 0
    while share.refusal_unread("t", 0.1) is None:
        share.promise(0.1)
        read += 1
    assert (read, share.promised(0.1)) == (9, 9), "73 may wait by then, and one more of a tenant that has fewer"
    share.crowded(0.7, 0.1)  # The share is lowered below what waits; the promises hold.
    for left in range(8, -1, -1):
        assert share.refusal("t", False, 0.2) is None
        share.enter("t")
        assert share.promised(0.2) == left
    assert reason(share.refusal("t", False, 0.2)) == "QUEUE_FULL"


def test_a_request_that_does_not_take_its_place_keeps_it_for_a_short_time() -> None:
    share = filled({"t": 80})
    for _ in range(10):
        share.leave("t")
    share.promise(0.0)
    assert reason(share.refusal_unread("t", 0.02)) == "QUEUE_FULL"
    assert share.refusal_unread("t", 0.3) is None
    assert share.promised(0.3) == 0


def test_sheddable_jobs_are_refused_first() -> None:
    share = filled({"t": 80})
    for _ in range(50):
        share.leave("t")
    assert share.refusal("t", False, 0.0) is None
    assert reason(share.refusal("t", True, 0.0)) == "SHED"
    for _ in range(20):
        share.leave("t")
    assert share.refusal("t", True, 0.0) is None


# ---- several gateways and one scheduler, on a simulated clock ----

READ_S, ANSWER_S, LIMIT = 2e-3, 1e-3, 200
"""The scheduler reads 500 jobs a second, 333 with what follows from one, and has room for 200."""
ENDS_PER_S = 200.0
NETWORK_S = 2e-3


@dataclass
class Simulation:
    """Gateways with equal loads, a queue, and a scheduler that does one thing at a time."""

    shares: list[QueueShare]
    marks: bool = True
    """The scheduler marks its answers while the queue is nearly full."""
    now: float = 0.0
    waiting: list[int] = field(default_factory=list)
    """The gateway of each job in the scheduler's queue."""
    placed: Counter[int] = field(default_factory=Counter)
    """Jobs that got a worker, by gateway."""
    waits: list[float] = field(default_factory=list)
    """How long each job waited that the scheduler refused."""
    starved: int = 0
    """Times that a worker was free and no job waited."""
    reading_s: float = 0.0
    """From the arrival of a request until its job is submitted."""
    read_for_nothing: int = 0
    """Requests that a gateway refused after it had read them."""
    _busy_until: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def run(self, seconds: float, rates: list[float]) -> None:
        """Jobs arrive at each gateway at its rate."""
        ends = self.now + seconds
        for gateway, rate in enumerate(rates):
            for number in range(round(seconds * rate)):
                due = self.now + (number + gateway / len(rates)) / rate
                self._at(due, functools.partial(self._arrive, gateway))
        for number in range(round(seconds * ENDS_PER_S)):
            self._at(self.now + number / ENDS_PER_S, self._place)
        while self._events and self._events[0][0] <= ends:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _scheduler(self, seconds: float) -> float:
        """The scheduler does something that takes so long, after all before -> when it is done."""
        self._busy_until = max(self._busy_until, self.now) + seconds
        return self._busy_until

    def _arrive(self, gateway: int) -> None:
        share = self.shares[gateway]
        if share.refusal_unread("t", self.now) is None:
            if share.bounded(self.now):
                share.promise(self.now)
            self._at(self.now + self.reading_s, lambda: self._submit(gateway))

    def _submit(self, gateway: int) -> None:
        share, sent_at = self.shares[gateway], self.now
        if share.refusal("t", False, self.now) is None:
            share.enter("t")
            self._at(self._scheduler(READ_S), lambda: self._read(gateway, sent_at))
        else:
            self.read_for_nothing += 1

    def _read(self, gateway: int, sent_at: float) -> None:
        if len(self.waiting) < LIMIT:
            self.waiting.append(gateway)
        else:
            self._at(self.now + NETWORK_S, lambda: self._refused(gateway, sent_at))

    def _refused(self, gateway: int, sent_at: float) -> None:
        self.waits.append(self.now - sent_at)
        self.shares[gateway].leave("t")
        self.shares[gateway].refused(0.5, self.now)

    def _place(self) -> None:
        if not self.waiting:
            self.starved += 1
            return
        gateway = self.waiting.pop(0)
        self.placed[gateway] += 1
        crowded = self.marks and len(self.waiting) >= 7 / 8 * LIMIT
        self._at(self._scheduler(ANSWER_S) + NETWORK_S, lambda: self._placed(gateway, crowded))

    def _placed(self, gateway: int, crowded: bool) -> None:
        self.shares[gateway].leave("t")
        if crowded:
            self.shares[gateway].crowded(0.5, self.now)


class Unbounded(QueueShare):
    """Passes every job on to the scheduler."""

    def refused(self, retry_after_s: float, now: float) -> None:
        """Changes nothing."""

    def crowded(self, retry_after_s: float, now: float) -> None:
        """Changes nothing."""


class Promiseless(QueueShare):
    """Keeps no places."""

    def promise(self, now: float) -> None:
        """Changes nothing."""


@pytest.mark.parametrize("rate", [100.0, 200.0])
def test_gateways_refuse_what_a_queue_that_is_nearly_full_cannot_take(rate: float) -> None:
    simulation = Simulation([QueueShare() for _ in range(4)])
    simulation.run(3, [rate] * 4)  # Two and four times what the workers can do: the queue fills meanwhile.
    simulation.waits.clear()
    simulation.starved = 0
    simulation.placed.clear()
    simulation.run(20, [rate] * 4)
    assert simulation.starved == 0
    assert not simulation.waits, "the scheduler refuses none"
    assert len(simulation.waiting) > 0.7 * LIMIT
    assert min(simulation.placed.values()) > 0.8 * 20 * ENDS_PER_S / 4, "the gateways have equal shares"


def slow_readers(share: type[QueueShare]) -> Simulation:
    """20 s of four times what the workers can do, once the queue is full; reading a request takes 0.1 s."""
    simulation = Simulation([share() for _ in range(4)], reading_s=0.1)
    simulation.run(3, [200.0] * 4)
    simulation.waits.clear()
    simulation.starved = simulation.read_for_nothing = 0
    simulation.run(20, [200.0] * 4)
    return simulation


def test_no_request_is_read_for_nothing() -> None:
    simulation = slow_readers(QueueShare)
    assert (simulation.read_for_nothing, simulation.starved, simulation.waits) == (0, 0, [])


def test_without_promises_many_requests_are_read_for_nothing() -> None:
    assert slow_readers(Promiseless).read_for_nothing > 500, "of 16,000"


def test_without_marks_the_scheduler_refuses_few_and_the_queue_is_never_empty() -> None:
    simulation = Simulation([QueueShare() for _ in range(4)], marks=False)
    simulation.run(3, [200.0] * 4)  # Four times what the workers can do: the queue fills meanwhile.
    simulation.waits.clear()
    simulation.starved = 0
    simulation.placed.clear()
    simulation.run(20, [200.0] * 4)
    assert simulation.starved == 0
    assert len(simulation.waits) < 0.5 * 20 * ENDS_PER_S, "of three times as many"
    assert sorted(simulation.waits)[int(0.95 * len(simulation.waits))] < 0.02
    assert min(simulation.placed.values()) > 0.6 * 20 * ENDS_PER_S / 4, "the gateways have equal shares"


def test_without_shares_a_refusal_waits_behind_all_others() -> None:
    simulation = Simulation([Unbounded() for _ in range(4)])
    simulation.run(10, [200.0] * 4)
    assert max(simulation.waits) > 1.0


@pytest.mark.parametrize("first", [0, 3])
def test_what_one_gateway_no_longer_needs_the_others_get(first: int) -> None:
    simulation = Simulation([QueueShare() for _ in range(4)])
    simulation.run(5, [800.0 if gateway == first else 0.5 for gateway in range(4)])
    others = [0.5 if gateway == first else 250.0 for gateway in range(4)]
    simulation.run(5, others)
    simulation.starved = 0
    simulation.placed.clear()
    simulation.run(10, others)
    assert simulation.starved == 0
    assert min(simulation.placed[gateway] for gateway in range(4) if gateway != first) > 0.6 * 10 * ENDS_PER_S / 3
