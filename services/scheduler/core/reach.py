"""Which workers a job may go to, by what it needs and by what gateways report to be out of their reach. Pure; decides
nothing."""

from services.scheduler.core.records import JobRecord, Need, WorkerRecord


class Reach:
    """The unreachable workers by gateway. Without a report a gateway reaches every worker."""

    def __init__(self) -> None:
        self._unreachable: dict[str | None, frozenset[str]] = {}
        self._since: dict[str | None, float] = {}

    def update(self, gateway_id: str, addresses: frozenset[str], now: float) -> None:
        """Replaces a gateway's report by host:port of the workers that it cannot reach now."""
        if addresses:
            self._unreachable[gateway_id] = addresses
            self._since[gateway_id] = now
        else:
            self.forget(gateway_id)

    def forget(self, gateway_id: str) -> None:
        """Drops the report of a gateway, which may have detached."""
        self._unreachable.pop(gateway_id, None)
        self._since.pop(gateway_id, None)

    def allows(self, job: JobRecord, worker: WorkerRecord) -> bool:
        """Whether the gateway of a job reaches a worker."""
        return worker.hello.address not in self._unreachable.get(job.gateway_id, ())

    def changed_at(self, job: JobRecord) -> float:
        """When the report of a job's gateway changed last; 0 without a report."""
        return self._since.get(job.gateway_id, 0.0)

    def able(self, need: Need, workers: list[WorkerRecord]) -> list[WorkerRecord]:
        """The workers that a job may wait for: those that have its adapter, and that its gateway reaches."""
        if need.adapter:
            workers = [worker for worker in workers if need.adapter in worker.adapters]
        if unreachable := self._unreachable.get(need.gateway_id):
            workers = [worker for worker in workers if worker.hello.address not in unreachable]
        return workers

    def open_to(self, need: Need, workers: list[WorkerRecord]) -> list[WorkerRecord]:
        """The workers that a job may go to now, if they have free credits."""
        workers = self.able(need, workers)
        if need.avoid:
            workers = [worker for worker in workers if worker.id not in need.avoid] or workers
        if need.suspect:  # It waits for the others' probation rather than to go back to where it failed.
            workers = [worker for worker in workers if worker.probation is None]
        return workers
