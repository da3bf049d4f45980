"""Serves `Embed` of weft.v1 alone, in a child process of `bench.mesh.embed`. Knows no model."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from protos import inference_pb2 as api

Embed = Callable[[api.EmbedRequest, Any], Awaitable[api.EmbedResponse]]


async def serve(embed: Embed) -> None:
    """Answers calls with `embed` until the input ends. The first line of the output is the port."""
    method = grpc.unary_unary_rpc_method_handler(
        embed, api.EmbedRequest.FromString, api.EmbedResponse.SerializeToString
    )
    server = aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("weft.v1.Inference", {"Embed": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
