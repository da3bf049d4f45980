"""The Python client of Weft, and the `weft` command. Needs grpcio and protobuf; knows nothing of how the mesh works.

async with Client("127.0.0.1:50051") as weft:
    answer = weft.generate("Once upon a time", max_tokens=64, temperature=0)
    async for delta in answer:
        print(delta.text, end="")
    print(answer.receipt.timings.wall_s)
"""

from client.api import Answer, Client
from client.blocking import SyncClient
from client.errors import WeftError

__all__ = ["Answer", "Client", "SyncClient", "WeftError"]
