"""A job in the engine: when things happened to it, and what it cost. Knows the clock's values, never the plan.

The engine is the only writer.
"""

from services.worker.job import Cost, Job
from services.worker.planner.sequence import Sequence


class ActiveJob:
    """A job, its sequence in the planner, and its times on the clock `time.monotonic` (0: not yet)."""

    __slots__ = (
        "arrived_s", "first_token_s", "job", "last_token_s", "paused_s", "prefill_steps", "prefill_tokens", "sequence",
        "started_s", "steps",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, arrived_s: float) -> None:
        self.job: Job = sequence.job
        self.sequence = sequence
        self.arrived_s, self.started_s, self.first_token_s, self.last_token_s = arrived_s, 0.0, 0.0, 0.0
        self.paused_s: list[float] = []
        self.steps = self.prefill_steps = self.prefill_tokens = 0

    def cost(self, now: float) -> Cost:
        """What the job has cost until now."""
        started = self.started_s or now
        first = self.first_token_s or now
        sequence = self.sequence
        return Cost(
            queue_s=started - self.arrived_s,
            prefill_s=first - started,
            decode_s=(self.last_token_s or now) - first,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=sequence.cached_tokens,
            preemptions=sequence.preemptions,
            steps=self.steps,
            prefill_steps=self.prefill_steps,
            fetched_tokens=sequence.fetched_tokens,
            first_token=self.first_token_s > 0,
            preempted_s=tuple(at - self.arrived_s for at in self.paused_s),
        )
