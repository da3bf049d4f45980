"""Requests that are refused before they are read: all while the scheduler is behind, and those of a tenant whose models
all have a full queue.

Knows credentials and names of models, no requests. To read, validate and record a request costs several times what it
costs to refuse it. While a queue is full, only the result cache may still have the answer to a request that was read:
as long as some answers are found there, every request is read.
"""

import random
import time

from services.errors import WeftError
from services.gateway.access.authorizer import Authorizer, Credentials
from services.gateway.access.tenants import Tenant
from services.gateway.links.catalog import Catalog
from services.gateway.links.scheduler_link import SchedulerLink

_FEW = 1 / 16
"""Share of answers found in the result cache below which requests are refused unread, and share of these requests that
are read nevertheless: without any, nothing would show that answers are found again."""
_PAUSE_S = 0.25
"""Time between two of these, at least: a client waits longer for the refusal of a request that was read."""
_WEIGHT = 1 / 64
"""Weight of one request in that share, at least; the n-th one since the queue is full has 1 / (n + 2)."""
_ASSUMED = 2
"""Answers that are taken for found before the first request: so the first 31 are read."""


class EarlyRefusal:
    """Refuses requests that only the result cache could answer, while it answers few."""

    def __init__(self, access: Authorizer, catalog: Catalog, scheduler: SchedulerLink) -> None:
        self.refused = 0
        self._access, self._catalog, self._scheduler = access, catalog, scheduler
        self._found = 1.0
        """Share of answers found in the result cache, among these and requests that the scheduler's link refused."""
        self._noted = _ASSUMED
        """How many of these there were since it refuses any."""
        self._read_at = 0.0
        """When the last of the few was read."""

    def note(self, found: bool) -> None:
        """A request that was read had its answer in the result cache, or else the scheduler's link refused it."""
        self._noted += 1
        self._found += (found - self._found) * max(_WEIGHT, 1 / self._noted)

    def refusal(self, credentials: Credentials) -> WeftError | None:
        """Why a request for an answer that arrives now is refused unread; None if it is read."""
        if not self._scheduler.refuses:
            self._found, self._noted = 1.0, _ASSUMED
            return None
        if self._found >= _FEW:
            return None
        try:
            error = self._refusal(self._access.tenant(credentials))
        except WeftError:
            return None  # Without a valid key it is refused for that.
        if error is None or self._reads_nevertheless(time.monotonic()):
            return None
        self.refused += 1
        return error

    def _reads_nevertheless(self, now: float) -> bool:
        """Whether a request that arrives now is one of the few."""
        if now - self._read_at < _PAUSE_S or random.random() >= _FEW:
            return False
        self._read_at = now
        return True

    def _refusal(self, tenant: Tenant) -> WeftError | None:
        """One of the refusals, if new jobs of all models that the tenant may use are refused."""
        error = None
        for model in self._catalog.generating(tenant):
            error = self._scheduler.refusal(model, tenant.hash)
            if error is None:
                return None
        return error
