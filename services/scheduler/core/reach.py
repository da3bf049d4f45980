"""Which workers each gateway cannot reach, as the gateways report it. Pure; decides nothing."""

from services.scheduler.core.records import JobRecord, WorkerRecord


class Reach:
    """The unreachable workers by gateway. Without a report a gateway reaches every worker."""

    def __init__(self) -> None:
        self._unreachable: dict[str, frozenset[str]] = {}
        self._since: dict[str, float] = {}

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
        return worker.hello.address not in self._unreachable.get(job.gateway_id or "", ())

    def changed_at(self, job: JobRecord) -> float:
        """When the report of a job's gateway changed last; 0 without a report."""
        return self._since.get(job.gateway_id or "", 0.0)
