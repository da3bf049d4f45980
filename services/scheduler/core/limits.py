"""How many jobs may wait in the scheduler, and its time-outs. Knows no job."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The length of a queue, and time-outs in seconds."""

    queue_limit: int = 2048  # Most jobs that wait for one model.
    grace_s: float = 2.0  # A worker whose link broke keeps its jobs for this long.
    stall_s: float = 2.0  # A busy worker is lost after this long, and three predicted steps, without progress.
    unserved_s: float = 2.0  # Jobs wait this long for the first healthy worker of their model.
    remember_s: float = 30.0  # A model without workers stays known for this long.
