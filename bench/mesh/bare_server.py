"""A gRPC server that answers at once, or after a call of another one: the floor of `bench.mesh.embed hits`.

    python -m bench.mesh.bare_server [NEXT]

It answers `Embed` of weft.v1 with one constant vector of MiniLM's width. NEXT: host:port of a server whose answer it
waits for and passes on. The first line of the output is its port.
"""

import asyncio
import sys
from typing import Any

import grpc
from grpc import aio

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs

_WIDTH = 384


class Servicer:
    """Serves `Embed` alone."""

    def __init__(self, following: Any) -> None:
        """following: the stub of the next server; None: there is none."""
        self._next = following
        self._response = api.EmbedResponse(embeddings=[api.Embedding(values=[0.05] * _WIDTH)])

    def handler(self) -> grpc.GenericRpcHandler:
        """The methods of the server."""
        method = grpc.unary_unary_rpc_method_handler(
            self._embed, api.EmbedRequest.FromString, api.EmbedResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler("weft.v1.Inference", {"Embed": method})

    async def _embed(self, request: api.EmbedRequest, _: Any) -> api.EmbedResponse:
        if self._next is None:
            return self._response
        response: api.EmbedResponse = await self._next.Embed(request)
        return response


async def main(following: str) -> None:
    """Serves until the input ends. following: the next server; empty: there is none."""
    channel = aio.insecure_channel(following) if following else None
    server = aio.server()
    server.add_generic_rpc_handlers((Servicer(stubs.InferenceStub(channel) if channel else None).handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    if channel:
        await channel.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ""))
