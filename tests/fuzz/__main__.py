"""`python -m tests.fuzz` fuzzes a mesh of its own: see `run.py`."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.decoders import fuzz_decoders
from tests.fuzz.routes import routes_of_a_gateway
from tests.fuzz.run import Fuzzer, Report
from tests.mesh.harness import Mesh
from tests.redis_server import RedisServer

MODEL = Path(__file__).parents[2] / "models" / "weft-story-2m"


async def fuzz(cases: int, seed: int, folder: Path) -> Report:
    """Runs `cases` cases against a mesh with Redis."""
    routes = await routes_of_a_gateway()
    with RedisServer(folder / "redis") as redis:
        async with Mesh(folder / "mesh", MODEL, redis_url=redis.url) as mesh:
            return await Fuzzer(mesh, routes, seed).run(cases)


def main() -> int:
    """Prints what was found; returns 1 for bugs."""
    parser = argparse.ArgumentParser(description="Fuzzes every port of a mesh.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    corrupted = fuzz_decoders(10 * given.cases, given.seed)
    print(f"decoders: {corrupted} damaged frames, 0 accepted")
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(fuzz(given.cases, given.seed, Path(folder)))
    print(f"{report.cases} cases, {report.golden} golden requests unchanged, no process ended")
    print("ended with:", ", ".join(f"{name} {count}" for name, count in report.codes.most_common()))
    print("abused:", ", ".join(f"{name} {count}" for name, count in sorted(report.abused.items())))
    for bug in report.bugs[:50]:
        print("BUG", bug)
    print(f"{len(report.bugs)} bugs")
    return 1 if report.bugs else 0


if __name__ == "__main__":
    sys.exit(main())
