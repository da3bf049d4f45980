"""Workers as operators use them: environment variables, broken checkpoints, priorities, draining."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc import aio

from protos import inference_pb2 as api
from services.worker.loader.config import load_config
from tests.mesh.harness import Mesh, ask, generate

pytestmark = pytest.mark.asyncio(loop_scope="function")


async def test_common_variables_configure_a_worker(tmp_path: Path, model: Path) -> None:
    env = {"MAX_BATCH_SIZE": "3", "MAX_SEQ_LENGTH": "128", "ENGINE": "torch", "SERVED_MODEL_NAME": "tales"}
    async with Mesh(tmp_path, model, worker_env=env) as mesh:
        stub = mesh.stub()
        (served,) = (await stub.ListModels(api.ListModelsRequest())).models
        assert (served.name, served.context_length, served.workers) == ("tales", 128, 1)
        assert served.architecture == "LlamaForCausalLM"
        assert served.chat
        with pytest.raises(aio.AioRpcError) as caught:
            await generate(stub, ask([5] * 120, max_tokens=16))
        assert caught.value.code().name == "INVALID_ARGUMENT"
        assert len((await generate(stub, ask("A tale", max_tokens=4, model="tales"))).ids) == 4


@pytest.mark.parametrize("scales", ["checkpoint", "dynamic"])
async def test_keys_and_values_in_fp8_take_a_quarter_of_float32(tmp_path: Path, model: Path, scales: str) -> None:
    env = {"ENGINE": "torch", "KV_DTYPE": "fp8", "KV_SCALES": scales, "WEFT_KV_BYTES": str(8 << 20)}
    async with Mesh(tmp_path, model, worker_env=env) as mesh:
        answer = await generate(mesh.stub(), ask("A tale", max_tokens=8, ignore_eos=True))
        assert len(answer.ids) == 8
        block_bytes = 16 * load_config(model).kv_bytes_per_token(1)
        tokens = 16 * ((8 << 20) // block_bytes - 1)
        assert str(tokens) in mesh.workers[0].log.read_text()


async def test_higher_priority_goes_first(tmp_path: Path, model: Path) -> None:
    """With a batch of one, the waiting job with the highest priority runs next."""
    async with Mesh(tmp_path, model, worker_env={"MAX_BATCH_SIZE": "1"}) as mesh:
        stub = mesh.stub()
        order: list[int] = []

        async def client(priority: int, tokens: int = 24) -> None:
            request = ask(f"Priority {priority}", max_tokens=tokens, ignore_eos=True)
            request.priority = priority
            await generate(stub, request, on_delta=lambda _: begun.set())
            order.append(priority)

        begun = asyncio.Event()
        running = asyncio.create_task(client(0, 600))  # So long that all others wait before it ends.
        await begun.wait()
        waiting = []
        for priority in (-5, 1, 7, 3):
            waiting.append(asyncio.create_task(client(priority)))
            await asyncio.sleep(0.01)
        await asyncio.gather(running, *waiting)
        assert order == [0, 7, 3, 1, -5]


BROKEN: dict[str, Callable[[Path], object]] = {
    "a shard is missing": lambda folder: next(folder.glob("*-of-*.safetensors")).unlink(),
    "a shard is cut short": lambda folder: truncate(next(folder.glob("*.safetensors"))),
    "an unknown architecture": lambda folder: change_config(folder, architectures=["MysteryForCausalLM"]),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "another width": lambda folder: change_config(folder, hidden_size=512),
}


def truncate(path: Path) -> None:
    """Cuts the last third of a file off."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)


def change_config(folder: Path, **values: object) -> None:
    """Changes config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("damage", BROKEN)
async def test_a_broken_checkpoint_is_never_ready(tmp_path: Path, model: Path, damage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    BROKEN[damage](folder)
    mesh = Mesh(tmp_path / "mesh", folder)
    worker = mesh.workers[0]
    worker.start()
    started = time.monotonic()
    assert worker.popen is not None
    code = await asyncio.to_thread(worker.popen.wait, 20)
    assert code == os.EX_CONFIG
    assert time.monotonic() - started < 10
    last = worker.log.read_text().strip().splitlines()[-1]
    assert last.startswith("weft: ")
    assert "Traceback" not in worker.log.read_text()


async def test_a_wrong_setting_is_named_and_its_value_is_not(tmp_path: Path, model: Path) -> None:
    worker = Mesh(tmp_path, model, worker_env={"MAX_BATCH_SIZE": "-7351"}).workers[0]
    worker.start()
    assert worker.popen is not None
    assert await asyncio.to_thread(worker.popen.wait, 20) == os.EX_CONFIG
    last = worker.log.read_text().strip().splitlines()[-1]
    assert last.startswith("weft: settings: MAX_BATCH_SIZE")
    assert "7351" not in worker.log.read_text()


async def test_a_draining_worker_finishes_its_jobs(tmp_path: Path, model: Path) -> None:
    async with Mesh(tmp_path, model) as mesh:
        stub = mesh.stub()
        started = asyncio.Event()
        request = ask("A long farewell", max_tokens=200, ignore_eos=True)
        running = asyncio.create_task(generate(stub, request, on_delta=lambda _: started.set()))
        await started.wait()
        worker = mesh.workers[0].popen
        assert worker is not None
        worker.send_signal(signal.SIGTERM)
        answer = await running
        assert len(answer.ids) == 200
        assert answer.receipt.attempts == 1
        assert await asyncio.to_thread(worker.wait, 15) == 0
