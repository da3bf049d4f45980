"""The scheduler's state as the Overview message of protos/mesh.proto."""

from protos import mesh_pb2 as mesh
from services.scheduler.codec import _starting
from services.scheduler.core.pool import Pool


def overview_of(pool: Pool, gateways: int, now: float) -> mesh.OverviewResponse:
    """What people and their tools may see of the pool."""
    overview = mesh.OverviewResponse(gateways=gateways, loading=_starting(pool.catalog.loading))
    for _, model in sorted(pool.models.items()):
        overview.models.add(
            name=model.name,
            waiting=len(model.line),
            following=model.following,
            waiting_tokens=model.line.prompt_tokens,
        )
        ready = {worker.id for worker in model.healthy(now)}
        for _, worker in sorted(model.workers.items()):
            overview.workers.add(
                worker_id=worker.id,
                address=worker.hello.address,
                model=model.name,
                credits=worker.hello.credits,
                jobs=len(worker.jobs),
                ready=worker.id in ready,
            )
    return overview
