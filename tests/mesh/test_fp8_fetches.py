"""Processes of workers with WEFT_FETCH_DTYPE=fp8: they hand prompts off in fp8, and a refused worker reports why."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.harness import Mesh, Process, ask, generate
from tests.mesh.test_prefixes import tale

pytestmark = pytest.mark.asyncio(loop_scope="function")

ROUNDS = {"WEFT_FETCH_DTYPE": "fp8"}


async def test_prompts_are_handed_off_in_fp8(tmp_path: Path, model: Path) -> None:
    made = Mesh(tmp_path, model, workers=0, worker_env={**ROUNDS, "WEFT_STEP_TOKENS": "64"})
    made.workers = [made.new_worker(number, WEFT_ROLE=role) for number, role in enumerate(("prefill", "decode"))]
    fetched = number = 0
    async with made:
        stub = made.stub()
        async with asyncio.timeout(60):
            while not fetched:  # A busy machine may compute some prompts sooner.
                number += 1
                answer = await generate(stub, ask(tale(number, 400), max_tokens=12, ignore_eos=True))
                assert len(answer.ids) == 12
                fetched = answer.receipt.fetched_tokens
    ended = [line for line in _lines(made.workers[1]) if line["event"] == "fetching from other workers has ended"]
    assert ended[0]["blocks"].keys() == {"grpc_fp8"}
    assert ended[0]["blocks"]["grpc_fp8"] >= fetched // 16


async def test_deterministic_mode_refuses_rounded_blocks(tmp_path: Path, model: Path) -> None:
    worker = Mesh(tmp_path, model, worker_env={**ROUNDS, "WEFT_DETERMINISTIC": "true"}).workers[0]
    assert "fetch_dtype: WEFT_DETERMINISTIC" in await _refusal(worker)


async def test_a_worker_that_takes_exact_blocks_is_of_another_model(tmp_path: Path, model: Path) -> None:
    """Its results and blocks would be taken for those of the others."""
    async with Mesh(tmp_path, model, worker_env=ROUNDS) as mesh:
        refused = await _refusal(mesh.new_worker(1, WEFT_FETCH_DTYPE="auto"))
        assert "another fingerprint" in refused


def _lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]


async def _refusal(worker: Process) -> str:
    """The reason with which a worker exits at the start."""
    worker.start()
    assert worker.popen is not None
    assert await asyncio.to_thread(worker.popen.wait, 30) == os.EX_CONFIG
    last = worker.log.read_text().strip().splitlines()[-1]
    assert last.startswith("weft: ")
    return last
