"""Quantized models in a mesh: a quantized checkpoint, and a plain one that is quantized while it is loaded."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.mesh.harness import Mesh, Process, ask, generate
from tests.mesh.test_models import listing, until_served
from tests.quantized import write
from tests.worker.drive import job, open_engine, run

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 99, 1204, 33, 7, 410]
TOKENS = 24
EXACT = {"WEFT_DETERMINISTIC": "true"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The demo model in INT4, written by compressed-tensors."""
    return write("int4-asymmetric", model, tmp_path_factory.mktemp("packed")).folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path, packed: Path) -> AsyncIterator[Mesh]:
    """One worker each: the plain demo model, the same quantized to INT8 at load, and the INT4 checkpoint."""
    mesh = Mesh(tmp_path_factory.mktemp("quantized"), model, workers=0, worker_env=EXACT)
    mesh.workers += [
        mesh.new_worker(0, SERVED_MODEL_NAME="plain"),
        mesh.new_worker(1, SERVED_MODEL_NAME="rounded", QUANTIZE="int8"),
        mesh.new_worker(2, SERVED_MODEL_NAME="packed", MODEL_NAME=str(packed)),
    ]
    async with mesh:
        await until_served(mesh.stub(), {"plain": 1, "rounded": 1, "packed": 1})
        yield mesh


def bare(folder: Path, quantize: str | None = None) -> list[int]:
    """The tokens that an engine in this process generates."""
    engine = open_engine(folder, kv_blocks=64, deterministic=True, quantize=quantize)
    return run(engine, job(0, PROMPT, max_tokens=TOKENS, ignore_eos=True))[0].tokens


async def test_quantized_models_answer_as_their_engines_do(mesh: Mesh, model: Path, packed: Path) -> None:
    expected = {
        "plain": await asyncio.to_thread(bare, model),
        "rounded": await asyncio.to_thread(bare, model, "int8"),
        "packed": await asyncio.to_thread(bare, packed),
    }
    for name, tokens in expected.items():
        answer = await generate(mesh.stub(), ask(PROMPT, max_tokens=TOKENS, model=name, ignore_eos=True))
        assert answer.ids == tokens, name
    listed = await listing(mesh.stub())
    assert len({listed[name].parameters for name in expected}) == 1, "quantization changes no parameter count"


async def test_a_worker_that_cannot_quantize_exits_with_the_reason(mesh: Mesh, packed: Path) -> None:
    worker: Process = mesh.new_worker(3, SERVED_MODEL_NAME="twice", MODEL_NAME=str(packed), QUANTIZE="int4")
    worker.start()
    assert worker.popen is not None
    assert await asyncio.to_thread(worker.popen.wait, 60) != 0
    assert "quantized already (quant_method compressed-tensors): leave out --quantize" in worker.tail()
