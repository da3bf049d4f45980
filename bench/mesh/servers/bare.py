"""A gRPC server that answers at once, or after a call of another one: the floor of `bench.mesh.embed hits`.

    python -m bench.mesh.servers.bare [NEXT]

It answers `Embed` of weft.v1 with one constant vector of MiniLM's width. NEXT: host:port of a server that it calls, and
whose answer it returns. The first line of the output is its port.
"""

import asyncio
import sys
from typing import Any

from grpc import aio

from bench.mesh.servers.serve import serve
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs

_WIDTH = 384
_RESPONSE = api.EmbedResponse(embeddings=[api.Embedding(values=[0.05] * _WIDTH)])


async def answer(request: api.EmbedRequest, _: Any) -> api.EmbedResponse:
    """The constant vector."""
    return _RESPONSE


async def call_next(address: str) -> None:
    """Serves the answers of the server at this host:port."""
    async with aio.insecure_channel(address) as channel:
        following: Any = stubs.InferenceStub(channel)

        async def embed(request: api.EmbedRequest, _: Any) -> api.EmbedResponse:
            response: api.EmbedResponse = await following.Embed(request)
            return response

        await serve(embed)


if __name__ == "__main__":
    asyncio.run(call_next(sys.argv[1]) if len(sys.argv) > 1 else serve(answer))
