"""The scheduler's metrics: their names and labels, most of them read from the core's state. Knows no single job."""

import functools
import time
from collections.abc import Callable, Iterator

from services import metrics
from services.scheduler.core.messages import Assigned
from services.scheduler.core.models import ModelRecord
from services.scheduler.core.scheduler import SchedulerCore

_COUNTERS = {
    "submitted": "Submitted attempts of jobs.",
    "assigned": "Attempts that were assigned to a worker.",
    "joined": "Attempts that joined an identical job.",
    "withdrawn": "Attempts that their gateways withdrew.",
    "ended": "Jobs that ended at their workers.",
    "tokens": "Tokens of ended jobs.",
    "prompt_blocks": "Blocks of the prompts of assigned jobs.",
    "matched_blocks": "Of these, blocks that the chosen worker held according to the prefix index.",
    "workers_attached": "Registrations of workers.",
    "workers_lost": "Workers that were lost.",
}


class SchedulerMetrics:
    """The metrics of one scheduler."""

    def __init__(self, core: SchedulerCore, gateways: Callable[[], int]) -> None:
        self.all = metrics.Metrics()
        self._state = core.state
        add = self.all
        for name, help_ in _COUNTERS.items():
            add.total(f"weft_scheduler_{name}", help_, functools.partial(getattr, self._state.counters, name))
        add.total("weft_scheduler_rejected", "Attempts that were rejected.", self._rejected, "reason")
        add.gauge("weft_scheduler_gateways", "Attached gateways.", gateways)
        self._gauge("waiting_jobs", "Jobs in the queue.", lambda model: len(model.queue))
        self._gauge("following_jobs", "Jobs that follow an identical waiting job.", lambda model: model.followers)
        self._gauge("waiting_tokens", "Prompt tokens of jobs in the queue.", lambda model: model.queue.prompt_tokens)
        self._gauge("running_jobs", "Jobs at workers.", lambda model: sum(len(w.jobs) for w in model.workers.values()))
        self._gauge("workers", "Registered workers.", lambda model: len(model.workers))
        self._gauge("ready_workers", "Workers that accept jobs.", lambda model: len(model.healthy(time.monotonic())))
        self._gauge("credits", "Most jobs at workers.", lambda m: sum(w.hello.credits for w in m.workers.values()))
        self._gauge("free_credits", "Credits without a job.", lambda m: sum(w.free_credits for w in m.workers.values()))
        self._queue = add.histogram(
            "weft_scheduler_queue_seconds", "Time from a job's submission to its assignment.", metrics.SHORT_S
        )

    def assigned(self, answer: Assigned) -> None:
        """Records the queue time of an assigned job."""
        self._queue.observe(answer.queue_s)

    def _gauge(self, name: str, help_: str, of: Callable[[ModelRecord], float]) -> None:
        def read() -> metrics.Series:
            return metrics.by_label((model.name, of(model)) for model in self._models())

        self.all.gauge(f"weft_scheduler_{name}", help_, read, "model")

    def _models(self) -> Iterator[ModelRecord]:
        """Models that a worker serves or served. A record without a card only has a name that a client sent."""
        return (model for model in self._state.models.values() if model.card is not None)

    def _rejected(self) -> metrics.Series:
        return metrics.by_label(self._state.counters.rejected.items())
