"""The state of the mesh over HTTP: one snapshot, or a stream of them. Knows snapshots, not where they come from.

A snapshot is the MeshSnapshot of weft.v1 in the JSON form of protobuf, with all fields and their names as in the proto.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import orjson
from google.protobuf.json_format import MessageToDict

from protos import inference_pb2 as api
from services.errors import unavailable
from services.gateway.answers.serve import AnswerService
from services.gateway.doors.http import Exchange
from services.gateway.doors.http_routes import HttpRoutes


class WatchDoor:
    """Serves /mesh and /mesh/events to operators."""

    def __init__(self, answers: AnswerService) -> None:
        self._answers = answers

    def add_to(self, routes: HttpRoutes) -> None:
        """Adds the two routes."""
        routes.add("GET", "/mesh", self.snapshot)
        routes.add("GET", "/mesh/events", self.events)

    async def snapshot(self, exchange: Exchange) -> None:
        """The mesh now."""
        async with aclosing(self._watch(exchange)) as snapshots:
            snapshot = await exchange.run(anext(snapshots, None))
        if snapshot is None:
            raise unavailable("SHUTTING_DOWN", "the gateway is stopping")
        await exchange.reply(_json(snapshot))

    async def events(self, exchange: Exchange) -> None:
        """An event for each snapshot, until the client disconnects or the gateway stops."""
        async with aclosing(self._watch(exchange)) as snapshots:
            await exchange.run(_send_all(exchange, snapshots))
        await exchange.end()

    def _watch(self, exchange: Exchange) -> AsyncGenerator[api.MeshSnapshot, None]:
        return self._answers.watch_mesh(api.WatchMeshRequest(), exchange.credentials)


async def _send_all(exchange: Exchange, snapshots: AsyncGenerator[api.MeshSnapshot, None]) -> None:
    async for snapshot in snapshots:
        if exchange.is_head:
            break
        await exchange.write(b"data: " + orjson.dumps(_json(snapshot)) + b"\n\n")


def _json(snapshot: api.MeshSnapshot) -> dict[str, object]:
    """The snapshot as values for JSON. 64-bit integers are strings, as in protobuf's JSON."""
    return MessageToDict(snapshot, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
