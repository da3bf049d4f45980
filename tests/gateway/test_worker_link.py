"""The link to a worker, over a real socket: nothing of it is left when it has ended."""

import asyncio

from protos.mesh_pb2_grpc import add_WorkerServicer_to_server
from services import rpc
from services.gateway.links.worker_link import WorkerLink
from tests.gateway.fakes import FakeWorker, until


async def test_a_link_that_breaks_leaves_no_task_behind() -> None:
    worker = FakeWorker("a worker", lambda job: [])  # type: ignore[abstract]
    server = await rpc.serve("127.0.0.1:0", [rpc.Service("weft.v1.Worker", add_WorkerServicer_to_server, worker)])
    link = WorkerLink(f"127.0.0.1:{server.port}", "a gateway")
    await until(lambda: len(worker.links) == 1)
    assert readers() == 1
    await server.stop(0)
    await until(lambda: not link.alive)
    await until(lambda: readers() == 0)


def readers() -> int:
    """gRPC's tasks that read what a client sends."""
    return sum("_consume_request_iterator" in repr(task.get_coro()) for task in asyncio.all_tasks())
