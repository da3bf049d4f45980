"""Which requests kill workers: deaths by fingerprint of the request, whatever its id, attempt, gateway or client.

A dead worker had many jobs, and one of them may have killed it. So a death makes suspects, and a worker has at most one
job on probation, until that job has produced tokens. If the worker dies meanwhile, that job is to blame and no other.
Where a dead worker had many jobs that were past their prompts, these are no suspects yet: a request that kills does so
at its prompt, mostly, and a crowd on probation would wait too long. They become suspects at their second death. Pure;
sends nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from services.scheduler.core.messages import Submit

Value = TypeVar("Value")

REMEMBER_S = 600.0
"""How long a death is held against a fingerprint after the last one."""
_ALIVE_S = 1.0
"""A worker that reports so long after its death was reported lives. A dead one's link to the scheduler ends at once."""
_MOST_RECORDS = 4096
_MOST_COMPANY = 8
"""Most jobs of a worker that all are suspects at its death."""


@dataclass(slots=True)
class _Record:
    """What is held against one fingerprint."""

    changed_at: float
    workers: set[str]
    """Workers that died under it and are not blamed on another request."""
    suspect: bool = False
    poisoned: bool = False


class PoisonWatch:
    """Deaths by fingerprint. An empty fingerprint is never suspect: its gateway is of an older version."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()
        self._blamed: OrderedDict[str, bytes] = OrderedDict()
        """By dead worker: the fingerprint that was on probation there."""
        self._company: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By dead worker: how many jobs it had, and when its death was reported first."""
        self.changed: set[bytes] = set()
        """Fingerprints that have become suspect, poisoned, or neither; whoever handles them clears the set."""

    def died(self, submit: Submit, jobs: int, probation: bytes, now: float) -> None:
        """A worker, `submit.lost_on`, died under an attempt of this job. It had `jobs` jobs and this fingerprint on
        probation, empty for none."""
        worker_id, mark = submit.lost_on, submit.fingerprint
        culprit = _keep(self._blamed, worker_id, probation)
        company, _ = _keep(self._company, worker_id, (jobs, now))
        if self.suspect(culprit):
            self._poison(culprit, worker_id, now)
        elif mark:
            record = self._record(mark, now)
            again = bool(record.workers - {worker_id})
            record.workers.add(worker_id)
            if not record.suspect and (not submit.lost_after or company <= _MOST_COMPANY or again):
                record.suspect = True
                self.changed.add(mark)

    def abandoned(self, worker_id: str, probation: bytes, now: float) -> None:
        """A worker is lost for good, and the gateway of its job on probation reported nothing: the client left."""
        if probation and worker_id not in self._blamed:
            _keep(self._blamed, worker_id, probation)
            self._poison(probation, worker_id, now)

    def reported(self, worker_id: str, now: float) -> None:
        """A worker has reported. Where it was taken for dead, only a gateway's link to it was cut."""
        if worker_id in self._company and now - self._company[worker_id][1] > _ALIVE_S:
            self.alive(worker_id)

    def alive(self, worker_id: str) -> None:
        """A worker that was taken for dead has come back: only its links were cut."""
        culprit = self._blamed.pop(worker_id, b"")
        self._company.pop(worker_id, None)
        for mark, record in list(self._records.items()):
            if worker_id in record.workers:
                record.workers.discard(worker_id)
                record.poisoned = record.poisoned and mark != culprit
                if not record.workers:
                    self._forget(mark)

    def survived(self, mark: bytes) -> None:
        """A job with this fingerprint has produced tokens on probation, or has ended as it should."""
        record = self._records.get(mark)
        if record is not None and not record.poisoned:
            self._forget(mark)

    def suspect(self, mark: bytes) -> bool:
        """Whether a job must run as the only suspect of its worker."""
        record = self._records.get(mark)
        return record is not None and record.suspect

    def poisoned(self, mark: bytes, now: float) -> bool:
        """Whether a job is refused."""
        record = self._records.get(mark)
        if record is not None and now - record.changed_at > REMEMBER_S:
            self._forget(mark)
            return False
        return record is not None and record.poisoned

    def suspects(self) -> tuple[bytes, ...]:
        """All suspects, the poisoned ones included: gateways send none of them to a worker by themselves."""
        return tuple(mark for mark, record in self._records.items() if record.suspect)

    def _poison(self, mark: bytes, worker_id: str, now: float) -> None:
        record = self._record(mark, now)
        record.workers.add(worker_id)
        record.suspect = record.poisoned = True
        self.changed.add(mark)

    def _record(self, mark: bytes, now: float) -> _Record:
        record = self._records.get(mark)
        if record is None or now - record.changed_at > REMEMBER_S:
            record = self._records[mark] = _Record(now, set())
        record.changed_at = now
        self._records.move_to_end(mark)
        if len(self._records) > _MOST_RECORDS:
            self._records.popitem(last=False)
        return record

    def _forget(self, mark: bytes) -> None:
        if self._records.pop(mark).suspect:
            self.changed.add(mark)


def _keep(book: OrderedDict[str, Value], worker_id: str, value: Value) -> Value:
    """The first value that was stored for a worker; of the workers, the latest are kept."""
    first = book.setdefault(worker_id, value)
    if len(book) > _MOST_RECORDS:
        book.popitem(last=False)
    return first
