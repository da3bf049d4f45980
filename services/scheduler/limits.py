"""How much the scheduler lets wait, and how long it waits itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The pool's patience."""

    queue_limit: int = 2048  # Jobs that may wait for one model.
    grace_s: float = 2.0  # A worker whose link broke keeps its jobs so long.
    stall_s: float = 2.0  # A busy worker without progress for so long, and for three announced steps, is lost.
    orphan_s: float = 2.0  # Jobs wait so long for a first healthy worker.
    remember_s: float = 30.0  # A model without workers is known so long.
