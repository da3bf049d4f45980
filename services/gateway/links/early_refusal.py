"""Requests that are refused before they are read: all while the scheduler is behind, and those of a tenant whose models
all have a full queue, or a crowded one and enough requests that are read.

Knows credentials and names of models, no requests. To read, validate and record a request costs several times what it
costs to refuse it. While a queue is full, only the result cache may still have the answer to a request that was read:
as long as some answers are found there, every request is read. Else requests are read about as fast as places become
free: many at once would delay the refusals of those that arrive meanwhile. A place in the queue is kept for each
request that is read, if its tenant has one model.
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
_AVERAGED_S = 1.0
_FASTER, _MORE_PER_S, _AT_ONCE = 1.5, 32.0, 4.0
"""By how much faster than places become free requests may be read, to fill a queue, and how many of them at once."""


class ReadingPace:
    """How fast requests are read while a queue is full. Pure: the clock is an argument, in seconds."""

    def __init__(self) -> None:
        self._at = 0.0
        self._settled, self._per_s = 0, 0.0
        """Submissions that were settled until then, and in a second of the last ones."""
        self._may = _AT_ONCE
        """Requests that may be read now."""

    def takes(self, settled: int, now: float) -> bool:
        """Whether a request is read that arrives now, when the scheduler's link has settled this many submissions."""
        passed_s, gone = now - self._at, settled - self._settled
        self._at, self._settled = now, settled
        if passed_s > _AVERAGED_S:
            self._per_s = gone / passed_s
        else:
            self._per_s += (gone - self._per_s * passed_s) / _AVERAGED_S
        self._may = min(_AT_ONCE, self._may + passed_s * (_FASTER * self._per_s + _MORE_PER_S))
        if self._may < 1:
            return False
        self._may -= 1
        return True


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
        self._pace = ReadingPace()

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
        """One of the refusals, if new jobs of all models that the tenant may use are refused, or if the bounded queues
        of all of these are mostly taken and enough requests are read for the places that are free there."""
        models = list(self._catalog.generating(tenant))
        errors = [self._scheduler.refusal_unread(model, tenant.hash) for model in models]
        if not errors or all(errors):
            return errors[-1] if errors else None
        errors = [self._scheduler.crowding(model) for model in models]
        if all(errors) and not self._pace.takes(self._scheduler.settled, time.monotonic()):
            return errors[-1]
        if len(models) == 1:  # The name of the model is in the request, which is not read yet.
            self._scheduler.promise(models[0])
        return None
