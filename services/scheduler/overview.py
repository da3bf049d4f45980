"""The scheduler's state as the OverviewResponse of protos/mesh.proto. Changes nothing."""

from protos import mesh_pb2 as mesh
from services.scheduler.codec import loading_messages
from services.scheduler.core.state import State


def overview_of(state: State, gateways: int, now: float) -> mesh.OverviewResponse:
    """Workers, models and queues at `now`; `gateways` is the number of attached gateways."""
    overview = mesh.OverviewResponse(gateways=gateways, loading=loading_messages(state.catalog.loading))
    for _, model in sorted(state.models.items()):
        overview.models.add(
            name=model.name,
            waiting=len(model.queue),
            following=model.followers,
            waiting_tokens=model.queue.prompt_tokens,
        )
        healthy = {worker.id for worker in model.healthy(now)}
        for _, worker in sorted(model.workers.items()):
            overview.workers.add(
                worker_id=worker.id,
                address=worker.hello.address,
                model=model.name,
                credits=worker.hello.credits,
                jobs=len(worker.jobs),
                ready=worker.id in healthy,
            )
    return overview
