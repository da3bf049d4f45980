"""One worker at ten times its load, against the real core on a simulated clock. Knows durations, computes no tokens.

The worker's speed may change while its jobs run, and so may what it reports of its speed.
"""

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.core.messages import Assigned, Rejected
from tests.scheduler.stage import Stage

STEP_S, TOKENS = 0.02, 50
SERVICE_S = STEP_S * TOKENS
LONG_S = 60.0
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


class Change(NamedTuple):
    """From `at` seconds after the simulation's start, jobs proceed at this multiple of the usual speed."""

    at: float
    speed: float


@dataclass
class Simulation:
    """One worker whose jobs take about a second each."""

    credits: int = 8
    changes: Sequence[Change] = ()
    """Changes of the worker's speed, in their order."""
    varies: float = 0.03
    """How much the durations of jobs differ, as a share."""
    noise: float = 0.0
    """How much the reported time of a step differs from the true one, as a share."""
    stage: Stage = field(default_factory=lambda: Stage(check=False))
    sent: dict[str, Sent] = field(default_factory=dict)
    running: list[tuple[float, str]] = field(default_factory=list)
    """When each job ends, in seconds of work at the usual speed."""
    work_s: float = 0.0
    speed: float = 1.0
    answers_read: int = 0
    reported_at: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(3))

    def __post_init__(self) -> None:
        self.coming = [Change(self.stage.now + at, speed) for at, speed in self.changes]
        self.stage.gateway()
        self.stage.worker(credits=self.credits)

    @property
    def peak(self) -> float:
        """Answers a second at the usual speed."""
        return self.credits / SERVICE_S

    def capacity(self, first: float, last: float) -> float:
        """Answers that the worker can give between these times after the start, at its speed."""
        steps = [Change(0.0, 1.0), *self.changes, Change(last, 0.0)]
        spans = ((max(first, a.at), min(last, b.at), a.speed) for a, b in itertools.pairwise(steps))
        return self.peak * sum(speed * max(0.0, until - since) for since, until, speed in spans)

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
            self._pass_time(min(until, self._next_end(), self.reported_at + REPORT_S))
            ended = []
            while self.running and self.running[0][0] <= self.work_s + 1e-9:
                ended.append(heapq.heappop(self.running)[1])
            for name in ended:
                self.sent[name].ended_at = stage.now
            if ended or stage.now >= self.reported_at + REPORT_S:
                self._report(ended)
            self.read_answers()

    def read_answers(self) -> None:
        """Starts the jobs that were assigned."""
        answers = self.stage.inbox["g1"]
        for answer in answers[self.answers_read :]:
            if isinstance(answer, Assigned):
                took_s = SERVICE_S * self.dice.uniform(1 - self.varies, 1 + self.varies)
                if self.sent[answer.job_id].long:
                    took_s = LONG_S
                heapq.heappush(self.running, (self.work_s + took_s, answer.job_id))
            elif isinstance(answer, Rejected):
                self.sent[answer.job_id].refused_at = self.stage.now
        self.answers_read = len(answers)

    def _next_end(self) -> float:
        """When the next job ends, unless the speed changes before."""
        if not self.running or not self.speed:
            return float("inf")
        return self.stage.now + max(0.0, self.running[0][0] - self.work_s) / self.speed

    def _pass_time(self, until: float) -> None:
        """Lets the jobs proceed until then, or until the next change of speed."""
        change = self.coming[0] if self.coming and self.coming[0].at <= until else None
        until = change.at if change else until
        self.work_s += (until - self.stage.now) * self.speed
        self.stage.now = until
        if change:
            self.speed = self.coming.pop(0).speed

    def _report(self, ended: Sequence[str]) -> None:
        stage = self.stage
        self.reported_at = stage.now
        step_s = STEP_S / max(self.speed, 0.5) * self.dice.uniform(1 - self.noise, 1 + self.noise)
        stage.report("w1", *ended, tokens=TOKENS, decode_s=step_s, prefill_rate=1e5, running=len(self.running))
        stage.perform(stage.core.on_tick(stage.now))
