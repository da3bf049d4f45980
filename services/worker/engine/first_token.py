"""The rehearsal of a first token: shortly before it comes, those who will be told of it are told that it comes soon.

Python that has rested for some milliseconds takes twice its time. While the device computes a prompt, all that its
first token needs rests: the engine's thread, the links, the gateway. So word of it takes the same way just before. Only
where few jobs run: many keep the code warm themselves, and need the processors.

Knows how long steps took, not what takes them.
"""

import time
from collections.abc import Callable

from services.worker.planner.planner import Row

MOST_JOBS = 4
"""Of a worker that rehearses."""
LEAD_S = 0.0009
"""From the rehearsal to the end that is expected. It takes most of this itself; what ran much earlier rests again."""
_LOOK_S = 0.0002  # so late the end is noticed of a step that is over before it is expected
_ALIKE_TOKENS = 64  # steps that differ by fewer take about the same time
_SLOWER = 1 / 8  # of what a step took longer than was expected: too early is better than too late


class Rehearsal:
    """Expects the ends of steps; lives on the engine's thread."""

    def __init__(self) -> None:
        self.tell: Callable[[list[int]], None] = lambda keys: None
        """Is given the keys of jobs whose first tokens come soon."""
        self._usual_s: dict[int, float] = {}

    def before(self, rows: list[Row], jobs: int, began: float, over: Callable[[], bool]) -> None:
        """To be called when nothing is to be done until the step that began with these rows is over. Returns soon after
        it has been told that it will be, or when it is, or at once if there is nothing to tell. `jobs` is how many the
        worker has."""
        if jobs > MOST_JOBS:
            return
        keys = [row.sequence.job.key for row in rows if row.samples and not row.sequence.first_token_s]
        usual_s = self._usual_s.get(_size(rows))
        if not keys or usual_s is None or usual_s < LEAD_S:
            return
        while not over():
            left_s = began + usual_s - LEAD_S - time.monotonic()
            if left_s <= 0:
                self.tell(keys)
                return
            time.sleep(min(left_s, _LOOK_S))

    def after(self, rows: list[Row], took_s: float) -> None:
        """A step with these rows took so long."""
        if len(rows) > MOST_JOBS:
            return
        size = _size(rows)
        usual_s = self._usual_s.get(size, took_s)
        self._usual_s[size] = min(took_s, usual_s + _SLOWER * (took_s - usual_s))


def _size(rows: list[Row]) -> int:
    """Steps of one size take about the same time; 0: one of answers alone."""
    tokens = sum(row.tokens for row in rows)
    return -(-tokens // _ALIKE_TOKENS) if tokens > len(rows) else 0
