"""How many jobs of a model this gateway lets wait at the scheduler once the queue there was nearly full. Knows counts
and times, never jobs.

To refuse a job costs the scheduler about as much as to place one, and the client waits for both. So the scheduler marks
its answers while a queue is nearly full, as a network marks packets (explicit congestion notification, RFC 3168). From
then on a gateway submits as many jobs as the scheduler answers, and refuses the others itself: its share of the queue
stays full, and the scheduler has time. The share falls with marks and refusals and grows with time, so that the shares
of several gateways become equal.

Time passes between the arrival of a request and the submission of its job. So a request that is read is promised a
place, and the share counts promises like jobs that wait. Otherwise all requests that arrive meanwhile would be read for
the same free place, and all but one of them refused. A promise has no name: the next job that is submitted takes it.
"""

from collections import deque

from services.errors import WeftError, exhausted
from services.gateway.links.adaptive_limit import AdaptiveLimit

QUEUE_FULL = "QUEUE_FULL"
"""The reason of a refusal, by the scheduler or here."""
_LEFT = 7 / 8
"""Share of the waiting jobs that may wait after a mark or a refusal. The queue is never empty for that."""
_SHEDDABLE = 1 / 4
"""Part of the share that sheddable jobs may take: the scheduler, too, sheds them long before its queue is full."""
_PROMISE_S = 0.25
"""How long a place is kept. By then most requests have submitted their job, or were refused or answered otherwise."""


class QueueShare:
    """The jobs of one model that wait for the scheduler's answer, by tenant, and how many may. Pure: the clock is an
    argument, in seconds."""

    def __init__(self) -> None:
        self.waiting = 0
        self._of_tenant: dict[str, int] = {}
        self._promised_at: deque[float] = deque()
        """When each request that is being read was promised a place, the oldest first."""
        self._limit = AdaptiveLimit()
        self._retry_after_s = 0.0

    def promise(self, now: float) -> None:
        """A request is read because there is a place for its job."""
        self._promised_at.append(now)

    def promised(self, now: float) -> int:
        """How many requests are being read for which a place is kept."""
        while self._promised_at and now - self._promised_at[0] > _PROMISE_S:
            self._promised_at.popleft()
        return len(self._promised_at)

    def enter(self, tenant: str) -> None:
        """A job is submitted."""
        if self._promised_at:
            self._promised_at.popleft()
        self.waiting += 1
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A job that waited was answered or withdrawn."""
        self.waiting -= 1
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def refused(self, retry_after_s: float, now: float) -> None:
        """The scheduler has refused a job, which no longer waits, because the queue is full."""
        self._lower(retry_after_s, now)

    def crowded(self, retry_after_s: float, now: float) -> None:
        """The scheduler has placed a job, which no longer waits, and the queue is nearly full."""
        if self.waiting <= self.most(now):  # Else a share that was lowered takes effect still.
            self._lower(retry_after_s, now)

    def _lower(self, retry_after_s: float, now: float) -> None:
        self._limit.lower(self.waiting * _LEFT, now)
        self._retry_after_s = retry_after_s

    def forget(self) -> None:
        """Any number of jobs may wait: there is another scheduler."""
        self._limit.forget()
        self._promised_at.clear()

    def bounded(self, now: float) -> bool:
        """Whether the queue was full, or nearly, in the last seconds; then the number of waiting jobs is bounded."""
        return self._limit.active(now)

    def mostly_taken(self, now: float) -> bool:
        """Whether more than half of the jobs wait that may."""
        return self.waiting > self.most(now) / 2

    def most(self, now: float) -> float:
        """How many jobs may wait."""
        return self._limit.most(now)

    def refusal(self, tenant: str, sheddable: bool, now: float) -> WeftError | None:
        """Why the job of a request that was read is not submitted; None if it is.

        A promise is kept if the share was lowered after it: the scheduler's queue has room beyond all shares.
        """
        if sheddable and self.waiting >= self.most(now) * _SHEDDABLE:
            return exhausted("SHED", "the mesh is busy, and the request is sheddable", self._retry_after_s)
        return None if self.promised(now) else self._refusal(tenant, 0, now)

    def refusal_unread(self, tenant: str, now: float) -> WeftError | None:
        """Why a request that arrives is not read; None if there is a place for its job."""
        return self._refusal(tenant, self.promised(now), now)

    def _refusal(self, tenant: str, promised: int, now: float) -> WeftError | None:
        """Why one more may not wait beside those that are promised a place, of whatever tenant.

        As at the scheduler a tenant may let its equal share wait beyond what all may, up to twice of that: a tenant
        that fills the queue does not lock the others out.
        """
        most, waiting = self.most(now), self.waiting + promised + 1
        if waiting <= most:
            return None
        own = self._of_tenant.get(tenant, 0)
        tenants = len(self._of_tenant) + (not own)
        if waiting <= 2 * most and own + promised < most / tenants:
            return None
        return self.full()

    def full(self) -> WeftError:
        """No more jobs may wait."""
        return exhausted(QUEUE_FULL, "the queue of this model is full", self._retry_after_s)
