"""In which lane of its model's queue a job waits, or that it could not be answered in time. Pure; changes nothing.

The express lane is kept so short that its jobs wait no longer than the target. While both lanes have jobs it gets three
quarters of the capacity, so the other lane, for jobs that have time, is forecast at a quarter of its speed.
"""

import enum

from services.scheduler.core import forecast
from services.scheduler.core.fairness import EXPRESS_TURNS
from services.scheduler.core.models import ModelRecord
from services.scheduler.core.records import JobRecord, WorkerRecord

_USABLE = 0.95
"""Share of the time until its deadline that a job may be forecast to take: no forecast is exact."""
_LONGER = 1.5
"""How many times its forecast a wait may take before a job misses its deadline. Under overload each job of the queue
was let in at the edge of its deadline, most likely while the forecast was too short: an error that all of them share
would have many dropped after their wait. A shorter queue costs nothing as long as it is never empty."""
_PATIENCE = 0.1
"""Share of the time until its deadline that a job may wait beyond the target without overtaking others."""


_SHED = 0.25
"""Share of the target that a sheddable job may wait."""


class Lane(enum.Enum):
    """A lane of a queue, or why there is none."""

    EXPRESS = "express"
    NORMAL = "normal"
    SHED = "shed"
    """The job is sheddable, and would wait."""
    TOO_LATE = "too late"
    """By forecast the whole answer would end after the deadline."""


def choose(job: JobRecord, model: ModelRecord, healthy: list[WorkerRecord], target_s: float, now: float) -> Lane:
    """The lane of a new job, which may wait for these workers."""
    loads = model.loads(job, healthy)
    remaining_s = job.deadline - now
    slack_s = (_USABLE * remaining_s - forecast.answer_s(loads, model.answer_tokens(job))) / _LONGER
    whole_s = model.wait_s(loads, healthy, model.queue_position(job.tenant, job.priority), now)
    if job.submit.sheddable and whole_s > _SHED * target_s:
        return Lane.SHED
    patience_s = max(target_s, _PATIENCE * remaining_s)
    # Half of the express lane is left to those that cannot wait.
    if whole_s <= (target_s if patience_s <= target_s else target_s / 2):
        return Lane.EXPRESS if whole_s <= slack_s else Lane.TOO_LATE
    # While both lanes have jobs, the express lane overtakes a job that waits in the other one.
    normal_s = whole_s + EXPRESS_TURNS * max(0.0, whole_s - target_s)
    if normal_s > patience_s:
        express_s = model.wait_s(loads, healthy, model.express_position(job.priority), now)
        if express_s <= min(target_s, slack_s):
            return Lane.EXPRESS
    return Lane.NORMAL if normal_s <= slack_s else Lane.TOO_LATE
