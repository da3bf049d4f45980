"""Ten times the load that the workers can take, against the real core on a simulated clock: what is answered in time,
how soon the rest is refused, and how soon a new job is served afterwards."""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from services.scheduler.core.messages import Assigned, Rejected
from tests.scheduler.stage import Stage

CREDITS, STEP_S, TOKENS = 8, 0.02, 50
SERVICE_S = STEP_S * TOKENS
PEAK = CREDITS / SERVICE_S
BURST_S = 60.0
REPORT_S = 0.05


@dataclass
class Sent:
    """One request and its outcome."""

    at: float
    deadline_s: float | None
    refused_at: float | None = None
    ended_at: float | None = None
    long: bool = False
    """It is answered for a minute."""

    @property
    def good(self) -> bool:
        """It was answered before its deadline."""
        return self.ended_at is not None and (self.deadline_s is None or self.ended_at - self.at <= self.deadline_s)


@dataclass
class Simulation:
    """One worker whose jobs take about a second each."""

    stage: Stage = field(default_factory=lambda: Stage(check=False))
    sent: dict[str, Sent] = field(default_factory=dict)
    running: list[tuple[float, str]] = field(default_factory=list)
    answers_read: int = 0
    reported_at: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(3))

    def __post_init__(self) -> None:
        self.stage.gateway()
        self.stage.worker(credits=CREDITS)

    def run(self, seconds: float, rate: float, deadline_s: float | None) -> list[Sent]:
        """Requests at a constant rate for this number of seconds -> those requests, with their outcomes at the end."""
        stage, first = self.stage, self.stage.now
        before = len(self.sent)
        for number in range(round(seconds * rate)):
            self.advance(first + number / rate)
            name = f"job-{len(self.sent)}"
            self.sent[name] = Sent(stage.now, deadline_s)
            stage.submit(name, max_tokens=TOKENS, deadline_s=deadline_s)
            self.read_answers()
        self.advance(first + seconds)
        return list(self.sent.values())[before:]

    def run_long(self, count: int) -> None:
        """Requests whose answers take a minute."""
        for number in range(count):
            self.sent[f"long-{number}"] = Sent(self.stage.now, None, long=True)
            self.stage.submit(f"long-{number}", max_tokens=60 * TOKENS)
            self.read_answers()

    def advance(self, until: float) -> None:
        """Ends the jobs that end until then."""
        stage = self.stage
        while stage.now < until:
            next_end = self.running[0][0] if self.running else until
            stage.now = min(until, next_end, self.reported_at + REPORT_S)
            ended = []
            while self.running and self.running[0][0] <= stage.now:
                ended.append(heapq.heappop(self.running)[1])
            for name in ended:
                self.sent[name].ended_at = stage.now
            if ended or stage.now >= self.reported_at + REPORT_S:
                self.reported_at = stage.now
                stage.report("w1", *ended, tokens=TOKENS, decode_s=STEP_S, prefill_rate=1e5, running=len(self.running))
                stage.perform(stage.core.on_tick(stage.now))
            self.read_answers()

    def read_answers(self) -> None:
        """Starts the jobs that were assigned."""
        answers = self.stage.inbox["g1"]
        for answer in answers[self.answers_read :]:
            if isinstance(answer, Assigned):
                took_s = SERVICE_S * self.dice.uniform(0.97, 1.03)
                if self.sent[answer.job_id].long:
                    took_s = BURST_S
                heapq.heappush(self.running, (self.stage.now + took_s, answer.job_id))
            elif isinstance(answer, Rejected):
                self.sent[answer.job_id].refused_at = self.stage.now
        self.answers_read = len(answers)


@pytest.mark.parametrize(("deadline_s", "goodput", "late"), [(30.0, 0.95, 0.01), (3 * SERVICE_S, 0.9, 0.01)])
def test_ten_times_the_load_keeps_the_goodput_and_refuses_at_once(
    deadline_s: float, goodput: float, late: float
) -> None:
    simulation = Simulation()
    simulation.run(5, PEAK / 2, deadline_s)
    burst = simulation.run(BURST_S, 10 * PEAK, deadline_s)
    after = simulation.run(10, PEAK / 2, deadline_s)
    simulation.advance(simulation.stage.now + 40)
    assert sum(sent.good for sent in burst + after) >= goodput * PEAK * BURST_S
    refused = [sent for sent in burst if sent.refused_at is not None]
    assert sum(sent.refused_at != sent.at for sent in refused) <= late * len(refused)
    assert sum(sent.ended_at is not None and not sent.good for sent in burst) <= 0.02 * PEAK * BURST_S
    served = [sent.ended_at - sent.at for sent in after if sent.ended_at is not None]
    assert len(served) >= 0.95 * len(after), "requests after the burst are refused"
    assert max(served) <= 3.0 + SERVICE_S


def test_credits_that_long_answers_hold_are_not_counted_on() -> None:
    """Else jobs are let into the queue that are dropped at its end."""
    simulation = Simulation()
    simulation.run(5, PEAK / 2, 3 * SERVICE_S)
    simulation.run_long(2)
    burst = simulation.run(BURST_S / 2, 10 * PEAK, 3 * SERVICE_S)
    refused = [sent for sent in burst if sent.refused_at is not None]
    assert sum(sent.refused_at != sent.at for sent in refused) <= 0.002 * len(refused)
    assert sum(sent.good for sent in burst) >= 0.9 * PEAK * BURST_S / 2 * (CREDITS - 2) / CREDITS


def test_a_request_is_served_soon_although_others_wait_for_long() -> None:
    simulation = Simulation()
    simulation.run(5, PEAK / 2, None)
    patient = simulation.run(0.5, 400, None)
    assert all(sent.refused_at is None for sent in patient)
    urgent = simulation.run(10, PEAK / 4, 10.0)
    simulation.advance(simulation.stage.now + 60)
    assert all(sent.ended_at is not None and sent.ended_at - sent.at <= 3 + SERVICE_S for sent in urgent)
    assert all(sent.ended_at is not None for sent in patient)


def test_sheddable_work_is_shed_first_and_fills_what_others_leave() -> None:
    simulation = Simulation()
    simulation.run(5, PEAK / 2, None)
    stage = simulation.stage
    refused = [stage.submit(f"batch-{number}", max_tokens=TOKENS, sheddable=True) for number in range(40)]
    reasons = [answer.failure.reason for answer in refused if isinstance(answer, Rejected)]
    assert set(reasons) == {"SHED"}
    assert all(answer.failure.retry_after_s > 0 for answer in refused if isinstance(answer, Rejected))
    assert 0 < 40 - len(reasons) < 2 * CREDITS
    assert stage.submit("default", max_tokens=TOKENS, deadline_s=10.0) is None  # It waits.


def test_a_patient_client_is_served_in_order() -> None:
    """A deadline of ten minutes leaves time to wait: but for a second or two, nobody overtakes."""
    simulation = Simulation()
    simulation.run(5, PEAK / 2, None)
    burst = simulation.run(0.5, 200, 600.0)
    simulation.advance(simulation.stage.now + 60)
    ends = [sent.ended_at or 0.0 for sent in burst]
    assert all(late >= early - 2.0 for early, late in itertools.pairwise(ends))
