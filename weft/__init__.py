"""Weft's Python package: `from weft import Client`. Importing it imports no gRPC until a name is used.

async with Client("127.0.0.1:50051") as weft:
    answer = weft.generate("Once upon a time", max_tokens=64, temperature=0)
    async for delta in answer:
        print(delta.text, end="")
    print(answer.receipt.timings.wall_s)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.client.api import Answer, Client
    from weft.client.blocking import SyncClient
    from weft.client.embed_stream import EmbedStream
    from weft.client.errors import WeftError

__all__ = ["Answer", "Client", "EmbedStream", "SyncClient", "WeftError"]

_HOMES = {
    "Answer": "api",
    "Client": "api",
    "EmbedStream": "embed_stream",
    "SyncClient": "blocking",
    "WeftError": "errors",
}


def __getattr__(name: str) -> object:
    """Import a public name at its first use (PEP 562), so that the `weft` command can choose gRPC's polling before."""
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.client.{_HOMES[name]}"), name)
