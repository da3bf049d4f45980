"""The first snapshot of a mesh. Knows the client, not what is shown."""

from contextlib import aclosing

import grpc

from protos import inference_pb2 as api
from weft.client.api import Client
from weft.client.errors import WeftError


async def first_snapshot(client: Client, deadline_s: float) -> api.MeshSnapshot:
    """The mesh as it is now. Raises WeftError, also if the gateway stops before it sends a snapshot."""
    async with aclosing(client.watch_mesh(deadline_s=deadline_s)) as snapshots:
        async for snapshot in snapshots:
            return snapshot
    raise WeftError(grpc.StatusCode.UNAVAILABLE, "the gateway stopped before its first snapshot")
