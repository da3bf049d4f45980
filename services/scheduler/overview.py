"""The scheduler's state as the OverviewResponse of protos/mesh.proto. Changes nothing."""

from collections.abc import Iterable

from protos import mesh_pb2 as mesh
from services.scheduler.codec import ROLES, loading_messages, report_message
from services.scheduler.core.state import State


def overview_of(state: State, gateways: Iterable[mesh.GatewayReport], now: float) -> mesh.OverviewResponse:
    """Workers, models and queues at `now`; `gateways` are the last reports of the attached gateways."""
    reports = sorted(gateways, key=lambda report: report.gateway_id)
    overview = mesh.OverviewResponse(
        gateways=len(reports), gateway_reports=reports, loading=loading_messages(state.catalog.loading)
    )
    for _, model in sorted(state.models.items()):
        card = model.card.detail if model.card is not None else None
        described = card if isinstance(card, mesh.ModelCard) else mesh.ModelCard()
        overview.models.add(
            name=model.name,
            waiting=len(model.queue),
            following=model.followers,
            waiting_tokens=model.queue.prompt_tokens,
            aliases=described.aliases,
            context_length=described.context_length,
            block_size=described.block_size,
        )
        healthy = {worker.id for worker in model.healthy(now)}
        for _, worker in sorted(model.workers.items()):
            overview.workers.add(
                worker_id=worker.id,
                address=worker.hello.address,
                model=model.name,
                credits=worker.hello.credits,
                jobs=len(worker.jobs) + len(worker.coming),
                ready=worker.id in healthy,
                report=report_message(worker.last_report),
                detached=worker.detached_at is not None,
                role=ROLES[worker.hello.role],
            )
    return overview
