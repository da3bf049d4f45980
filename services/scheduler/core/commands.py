"""What is to be said when an event is over, and to which gateways anything can be said. Pure; sends nothing itself."""

from services.scheduler.messages import (
    Assigned,
    Command,
    Failure,
    GatewayMessage,
    Joined,
    Rejected,
    ToGateway,
)
from services.scheduler.workers import Job


class Commands:
    """What follows from an event, in order."""

    def __init__(self) -> None:
        self.gateways: dict[str, None] = {}
        """Those that are attached; what is for others is not said."""
        self._commands: list[Command] = []

    def __len__(self) -> int:
        return len(self._commands)

    def add(self, command: Command) -> None:
        """Something to be done."""
        self._commands.append(command)

    def take(self) -> list[Command]:
        """All there is, once."""
        commands, self._commands = self._commands, []
        return commands

    def tell(self, gateway_id: str | None, message: GatewayMessage) -> None:
        """To one gateway, if it is there."""
        if gateway_id is not None and gateway_id in self.gateways:
            self.add(ToGateway(gateway_id, message))

    def broadcast(self, message: GatewayMessage) -> None:
        """To all gateways."""
        for gateway_id in self.gateways:
            self.tell(gateway_id, message)

    def assigned(self, job: Job) -> None:
        """A job's gateway hears where it runs."""
        worker = job.worker
        assert worker is not None, job
        queue_s = max(0.0, job.assigned_at - job.queued_at)
        self.tell(
            job.gateway_id,
            Assigned(job.id, job.attempt, worker.id, worker.hello.address, queue_s, job.matched_blocks, job.placement),
        )

    def joined(self, job: Job, leader: Job) -> None:
        """A job's gateway hears whose tokens it shares, and where."""
        assert leader.worker is not None, leader
        worker = leader.worker.hello
        self.tell(job.gateway_id, Joined(job.id, job.attempt, worker.worker_id, worker.address, leader.id))

    def rejected(self, job: Job, failure: Failure) -> None:
        """A job's gateway hears why it does not run."""
        self.tell(job.gateway_id, Rejected(job.id, job.attempt, failure))
