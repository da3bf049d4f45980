"""What the scheduler counts: names and labels of its metrics, most of them read off the pool. Knows no single job."""

import functools
import time
from collections.abc import Callable, Iterator

from services import metrics
from services.scheduler.core.pool import Pool
from services.scheduler.messages import Assigned
from services.scheduler.models import Model

_COUNTERS = {
    "submitted": "Attempts that asked for a worker.",
    "assigned": "Attempts that got one.",
    "joined": "Attempts that were sent to an identical job.",
    "withdrawn": "Attempts that were taken back.",
    "ended": "Jobs that their workers ended.",
    "tokens": "Tokens of ended jobs.",
    "prompt_blocks": "Blocks of prompts that were placed.",
    "matched_blocks": "Of these, blocks that the chosen worker was thought to hold.",
    "workers_attached": "Times that a worker said hello.",
    "workers_lost": "Workers given up.",
}


class SchedulerMetrics:
    """The metrics of one scheduler."""

    def __init__(self, pool: Pool, gateways: Callable[[], int]) -> None:
        self.all = metrics.Metrics()
        self._pool = pool
        add = self.all
        for name, help_ in _COUNTERS.items():
            add.total(f"weft_scheduler_{name}", help_, functools.partial(getattr, pool.counters, name))
        add.total("weft_scheduler_rejected", "Attempts that were refused.", self._rejected, "reason")
        add.gauge("weft_scheduler_gateways", "Gateways attached.", gateways)
        self._gauge("waiting_jobs", "Jobs in line.", lambda model: len(model.line))
        self._gauge("following_jobs", "Jobs that wait with an identical one.", lambda model: model.following)
        self._gauge("waiting_tokens", "Prompt tokens in line.", lambda model: model.line.prompt_tokens)
        self._gauge("running_jobs", "Jobs at workers.", lambda model: sum(len(w.jobs) for w in model.workers.values()))
        self._gauge("workers", "Workers.", lambda model: len(model.workers))
        self._gauge("ready_workers", "Workers that take jobs.", lambda model: len(model.healthy(time.monotonic())))
        self._gauge("credits", "Jobs that workers want.", lambda m: sum(w.hello.credits for w in m.workers.values()))
        self._gauge("free_credits", "Of these, not taken.", lambda m: sum(w.free_credits for w in m.workers.values()))
        self._queue = add.histogram(
            "weft_scheduler_queue_seconds", "From a job's submission to its worker.", metrics.SHORT_S
        )

    def assigned(self, answer: Assigned) -> None:
        """A job has a worker."""
        self._queue.observe(answer.queue_s)

    def _gauge(self, name: str, help_: str, of: Callable[[Model], float]) -> None:
        def read() -> metrics.Series:
            return metrics.by_label((model.name, of(model)) for model in self._models())

        self.all.gauge(f"weft_scheduler_{name}", help_, read, "model")

    def _models(self) -> Iterator[Model]:
        """Those that are or were served: without a card it is but a name that some client wrote."""
        return (model for model in self._pool.models.values() if model.card is not None)

    def _rejected(self) -> metrics.Series:
        return metrics.by_label(self._pool.counters.rejected.items())
