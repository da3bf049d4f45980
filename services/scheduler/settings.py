"""Settings of the scheduler, read from the environment. Knows names and defaults, never what uses them."""

from pydantic import Field

from services.scheduler.core.limits import Limits
from services.settings import SCHEDULER_ADDRESS, CommonSettings


class SchedulerSettings(CommonSettings):
    """WEFT_SCHEDULER_... and the settings that all services share."""

    listen: str = Field(SCHEDULER_ADDRESS, description="host:port to listen at; port 0 takes a free one.")
    scheduler_queue_limit: int = Field(2048, ge=0, description="Most jobs that may wait for one model.")
    scheduler_queue_target_s: float = Field(
        2.0,
        gt=0,
        description="Longest forecast wait in the express lane of a queue: new requests are served soon after a burst.",
    )
    scheduler_grace_s: float = Field(2.0, ge=0, description="Seconds that a worker whose link broke keeps its jobs.")
    scheduler_stall_s: float = Field(
        2.0,
        gt=0,
        description="Seconds, or three predicted steps if longer, after which a busy worker without progress is lost.",
    )
    scheduler_orphan_s: float = Field(
        2.0, ge=0, description="Seconds that jobs wait for the first healthy worker of their model."
    )
    scheduler_absent_s: float = Field(
        30.0, ge=0, description="Seconds that an interrupted answer waits if no worker of its model is in sight."
    )
    scheduler_resume_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that an interrupted answer waits while a worker of its model loads or is silent.",
    )
    scheduler_remember_s: float = Field(30.0, ge=0, description="Seconds that a model without workers stays known.")

    def limits(self) -> Limits:
        """The limits that the core applies."""
        return Limits(
            queue_limit=self.scheduler_queue_limit,
            target_s=self.scheduler_queue_target_s,
            grace_s=self.scheduler_grace_s,
            stall_s=self.scheduler_stall_s,
            unserved_s=self.scheduler_orphan_s,
            absent_s=self.scheduler_absent_s,
            resume_s=self.scheduler_resume_s,
            remember_s=self.scheduler_remember_s,
        )
