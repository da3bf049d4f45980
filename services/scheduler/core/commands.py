"""Collects the commands that follow from an event. Pure; sends nothing itself."""

from services.scheduler.core.messages import (
    Assigned,
    Command,
    Failure,
    GatewayMessage,
    Handoff,
    Joined,
    Rejected,
    ToGateway,
)
from services.scheduler.core.records import JobRecord


class CommandBuffer:
    """The commands of one event, in order."""

    def __init__(self) -> None:
        self.gateways: dict[str, float] = {}
        """When each attached gateway sent its hello, by id. Messages to others are discarded."""
        self._commands: list[Command] = []

    def __len__(self) -> int:
        return len(self._commands)

    def add(self, command: Command) -> None:
        """Appends a command."""
        self._commands.append(command)

    def take_all(self) -> list[Command]:
        """Returns the commands and empties the buffer."""
        commands, self._commands = self._commands, []
        return commands

    def send(self, gateway_id: str | None, message: GatewayMessage) -> None:
        """Sends a message to one gateway if it is attached."""
        if gateway_id is not None and gateway_id in self.gateways:
            self.add(ToGateway(gateway_id, message))

    def broadcast(self, message: GatewayMessage) -> None:
        """Sends a message to all attached gateways."""
        for gateway_id in self.gateways:
            self.send(gateway_id, message)

    def send_assigned(self, job: JobRecord, retry_after_s: float) -> None:
        """Reports to a job's gateway on which worker the job runs."""
        worker = job.worker
        assert worker is not None, job
        queue_s = max(0.0, job.assigned_at - job.queued_at)
        self.send(
            job.gateway_id,
            Assigned(
                job.id,
                job.attempt,
                worker.id,
                worker.hello.address,
                queue_s,
                job.matched_blocks,
                job.placement,
                worker.probation is job,
                _handoff(job),
                job.source,
                retry_after_s,
            ),
        )

    def send_joined(self, job: JobRecord, leader: JobRecord) -> None:
        """Reports to a job's gateway which running job produces its tokens, and where."""
        assert leader.worker is not None, leader
        worker = leader.worker.hello
        joined = Joined(job.id, job.attempt, worker.worker_id, worker.address, leader.id, _handoff(leader))
        self.send(job.gateway_id, joined)

    def send_rejected(self, job: JobRecord, failure: Failure) -> None:
        """Reports to a job's gateway why the job does not run."""
        self.send(job.gateway_id, Rejected(job.id, job.attempt, failure))


def _handoff(job: JobRecord) -> Handoff | None:
    """Where a job continues after its first token, if not where it is."""
    to = job.handoff_to
    return Handoff(to.id, to.hello.address, job.handoff_placement) if to is not None else None
