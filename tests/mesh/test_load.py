"""The load generator against a real mesh: whole answers over several connections, over HTTP, and refusals."""

from dataclasses import replace

import pytest

from tests.mesh.harness import Mesh
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import run

pytestmark = pytest.mark.asyncio(loop_scope="session")


def plan(mesh: Mesh) -> Plan:
    """Twelve requests at a constant rate from two client processes."""
    return Plan(
        mesh.gateways[0].address, requests=12, rate=50.0, constant=True, concurrency=None, input_tokens=8,
        output_tokens=4, processes=2, connections=2, cache="bypass", warmup=2, stream=False,
    )  # fmt: skip


async def test_answers_that_are_not_streamed(mesh: Mesh) -> None:
    done = await run(plan(mesh))
    assert (done.tally.completed, done.tally.output_tokens, done.tally.messages) == (12, 48, 0)
    assert "median_e2el_ms" in metrics.figures(done.tally)


async def test_completions_over_http(mesh: Mesh) -> None:
    done = await run(replace(plan(mesh), http=mesh.url().removeprefix("http://")))
    assert (done.tally.completed, done.tally.input_tokens, done.tally.output_tokens) == (12, 96, 48)


async def test_refusals_are_counted_with_their_time(mesh: Mesh) -> None:
    done = await run(replace(plan(mesh), deadline_s=0.02, warmup=0, output_tokens=400))
    assert done.tally.completed == 0
    assert done.tally.failed == 12
    http = await run(
        replace(plan(mesh), http=mesh.url().removeprefix("http://"), deadline_s=0.02, warmup=0, output_tokens=400)
    )
    assert set(http.tally.errors) <= {"HTTP 504/deadline_exceeded", "HTTP 504/deadline_unmeetable"}
