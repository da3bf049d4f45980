"""How many jobs may wait in the scheduler, and its time-outs. Knows no job."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The length of a queue, and time-outs in seconds."""

    queue_limit: int = 2048  # Most jobs that wait for one model.
    target_s: float = 2.0  # Longest forecast wait in the express lane of a queue.
    grace_s: float = 2.0  # A worker whose link broke keeps its jobs for this long.
    stall_s: float = 2.0  # A busy worker is lost after this long, and three predicted steps, without progress.
    unserved_s: float = 2.0  # Jobs wait this long for the first healthy worker of their model.
    absent_s: float = 30.0  # A resumed job waits this long if no worker of its model is in sight.
    resume_s: float = 60.0  # A resumed job waits this long while a worker of its model loads or is silent.
    remember_s: float = 30.0  # A model without workers stays known for this long.
