"""Settings of the scheduler, read from the environment. Knows names and defaults, never what they steer."""

from pydantic import Field

from services.scheduler.limits import Limits
from services.settings import SCHEDULER_ADDRESS, CommonSettings


class SchedulerSettings(CommonSettings):
    """What the scheduler reads: WEFT_SCHEDULER_..., beside what every service does."""

    listen: str = Field(SCHEDULER_ADDRESS, description="host:port to listen at; port 0 takes a free one.")
    scheduler_queue_limit: int = Field(2048, ge=0, description="Most jobs that wait for one model.")
    scheduler_grace_s: float = Field(2.0, ge=0, description="Seconds that a worker whose link broke keeps its jobs.")
    scheduler_stall_s: float = Field(
        2.0, gt=0, description="Seconds without progress, if three announced steps are not longer, that mean death."
    )
    scheduler_orphan_s: float = Field(2.0, ge=0, description="Seconds that jobs wait for a first healthy worker.")
    scheduler_remember_s: float = Field(30.0, ge=0, description="Seconds that a model without workers stays known.")

    def limits(self) -> Limits:
        """What the pool reads."""
        return Limits(
            queue_limit=self.scheduler_queue_limit,
            grace_s=self.scheduler_grace_s,
            stall_s=self.scheduler_stall_s,
            orphan_s=self.scheduler_orphan_s,
            remember_s=self.scheduler_remember_s,
        )
