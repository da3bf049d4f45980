"""A job in the engine: when things happened to it, and what it cost. Knows the clock's values, never the plan.

The engine is the only writer.
"""

import math

from services.worker.job import Cost, Job
from services.worker.planner.sequence import Sequence
from services.worker.structured.base import Matcher


class ActiveJob:
    """A job, its sequence in the planner, and its times on the clock `time.monotonic` (0: not yet)."""

    __slots__ = (
        "accepted_tokens", "arrived_s", "deadline_s", "drafted_tokens", "end_tokens", "first_token_s", "job",
        "last_token_s", "matcher", "paused_s", "prefill_steps", "prefill_tokens", "sequence", "started_s", "steps",
    )  # fmt: skip

    def __init__(
        self, sequence: Sequence, arrived_s: float, eos_token_ids: frozenset[int], matcher: Matcher | None = None
    ) -> None:
        """matcher: follows the answer, if it has a form."""
        self.matcher = matcher
        self.job: Job = sequence.job
        params = self.job.params
        self.end_tokens = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
        """Tokens that end the answer once it has `min_tokens`."""
        self.deadline_s = math.inf if self.job.deadline is None else self.job.deadline
        self.sequence = sequence
        self.arrived_s, self.started_s, self.first_token_s, self.last_token_s = arrived_s, 0.0, 0.0, 0.0
        self.paused_s: list[float] = []
        self.steps = self.prefill_steps = self.prefill_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0

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
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
