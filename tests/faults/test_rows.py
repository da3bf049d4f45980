"""A short set of the rows of `make chaos`, one seed each: links are cut, and every answer is whole."""

from pathlib import Path

import pytest

from tests.faults.footprint import Baseline
from tests.faults.rows import BY_NAME, Row, Run, check_row, run_row

pytestmark = pytest.mark.asyncio(loop_scope="function")

SHORT = (
    "cut worker|scheduler, both ways, 1 worker",
    "cut gateway|worker, both ways",
    "cut gateway|worker, requests",
    "gateway|worker 3 s late, 1 worker",
    "worker SIGSTOP",
)


async def held(row: Row, folder: Path, seeds: range, streams: int = 12) -> list[Run]:
    """Runs a row with each seed on one mesh, and asserts its promise but for the length of pauses."""
    async with row.mesh(folder) as mesh:
        await mesh.restored()
        baseline, runs = Baseline(), []
        await baseline.leaks(mesh.measured)
        for seed in seeds:
            run = row.run(mesh, baseline, seed, streams)
            await run_row(row, run)
            run.history.keep_wrong(folder / "kept", {"row": "row", "seed": seed})
            assert check_row(row, run) == []
            runs.append(run)
        return runs


@pytest.mark.parametrize("name", SHORT)
async def test_the_promise_holds(name: str, tmp_path: Path) -> None:
    [run] = await held(BY_NAME[name], tmp_path, range(1, 2))
    assert run.in_flight == 12


async def test_a_mesh_carries_one_fault_after_the_other(tmp_path: Path) -> None:
    runs = await held(BY_NAME["worker SIGKILL"], tmp_path, range(1, 3))
    assert [run.proof for run in runs] == ["exit -9", "exit -9"]
