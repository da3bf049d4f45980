"""Runs a mesh of the checkout in the current folder until standard input ends. `bench.mesh.turns` starts this file.

    python bench/mesh/hold.py MODEL GATEWAYS '{"WEFT_...": "..."}'

Imports the checkout's own packages, so that this file also serves checkouts that lack it. Prints one line of JSON, a
list of the gateways' host:port, once the mesh serves.
"""

import asyncio
import importlib
import json
import os
import sys
from types import ModuleType


def meshes() -> ModuleType:
    """The checkout's module that starts meshes; older checkouts have it in another place."""
    sys.path[0] = os.getcwd()
    try:
        return importlib.import_module("bench.mesh.processes")
    except ModuleNotFoundError as error:
        if error.name != "bench.mesh.processes":
            raise
        return importlib.import_module("bench.mesh")


async def main(model: str, gateways: str, settings: str) -> None:
    """Starts the mesh, prints its gateways and waits."""
    async with meshes().up(json.loads(settings), gateways=int(gateways), model=model) as up:
        print(json.dumps(up.gateways), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
