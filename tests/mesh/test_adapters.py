"""Adapters on a real mesh: models of their own at every door, loaded and dropped while it serves, recovered."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from protos import inference_pb2 as api
from protos import mesh_pb2, mesh_pb2_grpc
from tests.adapters import Recipe, make_adapters, peft_answers
from tests.checkpoints import make_checkpoint
from tests.mesh.harness import Mesh, Process, Stub, ask, cached, generate
from tests.redis_server import RedisServer
from tests.worker.drive import prompt_of
from weft.launch.adapters import AdaptersError, drop, load

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = prompt_of(40)
TOKENS = 24
NAMES = ("poems", "code")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base model and two adapters."""
    into = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(into / "base")
    return {"base": base, **make_adapters(base, into, {name: Recipe(seed=len(name)) for name in NAMES})}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    """The greedy tokens of transformers and PEFT, by model."""
    base = folders["base"]
    named = {"base": None, **{f"base:{name}": folders[name] for name in NAMES}}
    return {name: peft_answers(base, folder, [PROMPT], TOKENS)[0][0] for name, folder in named.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> AsyncIterator[Mesh]:
    """Two workers that serve the poems from the start."""
    folder = tmp_path_factory.mktemp("mesh")
    settings = {"WEFT_ADAPTERS": f'["poems={folders["poems"]}"]', "WEFT_DETERMINISTIC": "true"}
    with RedisServer(folder / "redis") as redis:
        async with Mesh(folder, folders["base"], workers=2, redis_url=redis.url, worker_env=settings) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(mesh: Mesh) -> Stub:
    return mesh.stub()


def request(model: str, **sampling: int) -> api.GenerateRequest:
    return ask(PROMPT, max_tokens=TOKENS, model=model, ignore_eos=True, **sampling)


async def weft(mesh: Mesh, *arguments: str) -> tuple[int, str]:
    """Exit code and output of `weft adapters`."""
    command = [sys.executable, "-c", "from weft.cli.app import app; app()", "adapters", *arguments]
    environment = {**os.environ, "WEFT_HOME": str(mesh.scheduler.log.parent), "COLUMNS": "120"}
    environment["WEFT_SCHEDULER_ADDRESS"] = mesh.scheduler.address
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


async def test_an_adapter_is_a_model_of_its_own_at_every_door(
    mesh: Mesh, stub: Stub, expected: dict[str, list[int]]
) -> None:
    listed = (await stub.ListModels(api.ListModelsRequest())).models
    found = {model.name: model for model in listed}
    assert (found["base"].base, found["base:poems"].base) == ("", "base")
    assert found["base"].workers == found["base:poems"].workers > 0
    answer = await generate(stub, request("base:poems"))
    assert (answer.ids, answer.receipt.model) == (expected["base:poems"], "base:poems")
    assert (await generate(stub, request("base"))).ids == expected["base"]
    assert (await generate(stub, request(""))).ids == expected["base"], "an adapter is no choice of nobody's"
    two = request("base:poems")
    two.n = 2
    assert (await generate(stub, two)).tokens == {0: expected["base:poems"], 1: expected["base:poems"]}
    async with httpx.AsyncClient(base_url=mesh.url(), timeout=60) as http:
        models = {each["id"]: each["parent"] for each in (await http.get("/v1/models")).json()["data"]}
        assert (models["base"], models["base:poems"]) == (None, "base")
        fields = {
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        made = (await http.post("/v1/completions", json={"model": "base:poems", **fields})).json()
        assert made["choices"][0]["token_ids"] == expected["base:poems"]
        text = made["choices"][0]["text"]
        ids = {"name": "input_ids", "datatype": "INT32", "shape": [1, len(PROMPT)], "data": PROMPT}
        body = {"inputs": [ids], "parameters": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}
        reply = (await http.post("/v2/models/base:poems/infer", json=body)).json()
        assert [each["data"] for each in reply["outputs"] if each["name"] == "text_output"] == [[text]]


async def test_nothing_cached_is_shared_with_the_model(stub: Stub) -> None:
    for model in ("base", "base:poems"):
        prompt = ask(prompt_of(33, seed=5), max_tokens=8, model=model, ignore_eos=True)
        first = await generate(stub, prompt)
        assert (first.receipt.result_hit, first.receipt.cached_tokens) == (False, 0)
        assert (await cached(stub, prompt)).ids == first.ids


async def test_adapters_are_loaded_and_dropped_while_the_mesh_serves(
    mesh: Mesh, stub: Stub, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    code = request("base:code")
    code.cache = api.CACHE_POLICY_BYPASS
    with pytest.raises(aio.AioRpcError, match="no model 'base:code': there are base, base:poems"):
        await generate(stub, code)
    with pytest.raises(AdaptersError, match="another adapter has the name poems: drop it first"):
        await load(mesh.scheduler.address, "", "poems", folders["code"])
    exit_code, output = await weft(mesh, "load", "code", str(folders["code"]))
    assert (exit_code, output.startswith("loaded code at base-")) == (0, True)
    await served(stub, "base:code", there=True)
    assert (await generate(stub, code)).ids == expected["base:code"]
    both = [request("base:code"), request("base:poems"), request("base")] * 3
    for each in both:
        each.cache = api.CACHE_POLICY_BYPASS
    answers = await asyncio.gather(*(generate(stub, each) for each in both))
    assert [answer.ids for answer in answers] == [expected[each.model] for each in both]
    exit_code, output = await weft(mesh, "list")
    assert exit_code == 0
    assert output.count("base:code") == output.count("base:poems") > 0
    assert await drop(mesh.scheduler.address, "", "code")
    await served(stub, "base:code", there=False)
    with pytest.raises(aio.AioRpcError) as refused:
        await generate(stub, code)
    assert refused.value.code() is StatusCode.NOT_FOUND
    assert await weft(mesh, "drop", "code") == (1, "weft: no worker serves an adapter code\n")


async def served(stub: Stub, name: str, *, there: bool) -> None:
    """Waits until the gateway lists a model, or does not any more."""
    models: set[str] = set() if there else {name}
    while (name in models) is not there:
        models = {model.name for model in (await stub.ListModels(api.ListModelsRequest())).models}


async def busy_worker(mesh: Mesh) -> Process:
    """The worker that runs a job."""
    async with aio.insecure_channel(mesh.scheduler.address) as channel:
        overview = await mesh_pb2_grpc.SchedulerStub(channel).Overview(mesh_pb2.OverviewRequest())
    (busy,) = [worker.address for worker in overview.workers if worker.jobs]
    return next(worker for worker in mesh.workers if worker.address == busy)


async def test_a_killed_worker_costs_an_adapters_clients_nothing(mesh: Mesh, stub: Stub) -> None:
    await mesh.revive()
    begun = asyncio.Event()

    def on_delta(delta: api.Delta) -> None:
        if not begun.is_set():
            begun.set()
            for worker in mesh.workers:  # The answer goes on when it is known who computes it.
                os.kill(worker.pid, signal.SIGSTOP)

    long = ask(prompt_of(20), max_tokens=200, model="base:poems", ignore_eos=True)
    long.cache = api.CACHE_POLICY_BYPASS
    calm = await generate(stub, long)
    stream = asyncio.create_task(generate(stub, long, on_delta=on_delta))
    await begun.wait()
    lost = await busy_worker(mesh)
    lost.kill(signal.SIGKILL)
    for worker in mesh.workers:
        if worker is not lost:
            os.kill(worker.pid, signal.SIGCONT)
    answer = await stream
    assert answer.ids == calm.ids
    assert answer.receipt.attempts >= 2
