"""A short set of the rows of `make chaos`, one seed each: links are cut, and every answer is whole."""

import random
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.rows import BY_NAME, STEP_MS, Row, Run, check_row, run_row

pytestmark = pytest.mark.asyncio(loop_scope="function")

SHORT = (
    "cut worker|scheduler, both ways, 1 worker",
    "cut gateway|worker, both ways",
    "cut gateway|worker, requests",
    "gateway|worker 3 s late, 1 worker",
    "worker SIGSTOP",
)


async def held(row: Row, folder: Path, seed: int = 1, streams: int = 12, cut_s: float = 3.5) -> Run:
    """Runs a row once, and asserts its promise but for the length of pauses."""
    async with Cluster(folder, workers=row.workers, gateways=row.gateways, step_ms=STEP_MS, worker_env=row.env) as mesh:
        run = Run(mesh, random.Random(seed), streams, cut_s)
        await run_row(row, run)
        run.history.keep_wrong(folder / "kept", {"row": "row", "seed": seed})
        assert check_row(row, run) == []
        return run


@pytest.mark.parametrize("name", SHORT)
async def test_the_promise_holds(name: str, tmp_path: Path) -> None:
    run = await held(BY_NAME[name], tmp_path)
    assert run.in_flight == 12
