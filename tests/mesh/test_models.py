"""Several models in one mesh: found by name and alias, with separate workers, and listed while they are loaded."""

import asyncio
import io
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from rich.console import Console

import weft.cli.top
from protos import inference_pb2 as api
from tests.mesh.harness import Mesh, Stub, ask, generate

pytestmark = pytest.mark.asyncio(loop_scope="session")
CODES = grpc.StatusCode

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5"}
FOX = {"SERVED_MODEL_NAME": "fox", "WEFT_ALIASES": '["reynard", "owl"]'}  # A model's name wins over an alias.
OWL = {"SERVED_MODEL_NAME": "owl", "WEFT_ALIASES": '["hoot", "reynard"]', "MAX_SEQ_LENGTH": "256"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """Two models with a worker each."""
    mesh = Mesh(tmp_path_factory.mktemp("models"), model, workers=0, worker_env=PACED)
    mesh.workers += [mesh.new_worker(0, **FOX), mesh.new_worker(1, **OWL)]
    async with mesh:
        await until_served(mesh.stub(), {"fox": 1, "owl": 1})
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stub(mesh: Mesh) -> Stub:
    """A client of the mesh."""
    return mesh.stub()


async def listing(stub: Stub) -> dict[str, api.Model]:
    """The models by name."""
    return {model.name: model for model in (await stub.ListModels(api.ListModelsRequest())).models}


async def until_served(stub: Stub, workers: dict[str, int]) -> None:
    """Waits until each model has the given number of workers."""
    async with asyncio.timeout(30):
        while True:
            models = await listing(stub)
            if {name: model.workers for name, model in models.items() if model.workers} == workers:
                return
            await asyncio.sleep(0.02)


async def fails(stub: Stub, name: str) -> aio.AioRpcError:
    """The error that a request for a model ends with."""
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(stub, ask("A tale", model=name))
    return caught.value


async def test_models_are_found_by_name_and_alias(stub: Stub) -> None:
    models = await listing(stub)
    assert list(models) == ["fox", "owl"]
    assert list(models["fox"].aliases) == ["reynard", "owl"]
    assert (models["fox"].context_length > 256, models["owl"].context_length) == (True, 256)
    for asked, served in (("fox", "fox"), ("owl", "owl"), ("hoot", "owl"), ("reynard", "fox")):
        receipt = (await generate(stub, ask(f"A tale of {asked}", max_tokens=3, model=asked))).receipt
        assert receipt.model == served
        assert receipt.workers[0].startswith(f"{served}-")
    # A gateway without a tenants file accepts any key.
    metadata = (("authorization", "Bearer whatever"),)
    assert (await generate(stub, ask("A tale", max_tokens=3, model="owl"), metadata=metadata)).ids
    unknown = await fails(stub, "badger")
    assert (unknown.code(), unknown.details()) == (CODES.NOT_FOUND, "no model 'badger': there are fox, owl")


async def test_no_name_is_refused_where_there_is_a_choice(stub: Stub) -> None:
    error = await fails(stub, "")
    assert error.code() is CODES.INVALID_ARGUMENT
    assert (error.details() or "").startswith("model: ")
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text="A tale")))
    assert caught.value.code() is CODES.INVALID_ARGUMENT


async def test_the_loss_of_one_model_does_not_affect_the_other(mesh: Mesh, stub: Stub) -> None:
    await mesh.revive()
    started = asyncio.Event()
    long = ask("A tale", max_tokens=200, model="owl", ignore_eos=True)
    running = asyncio.create_task(generate(stub, long, on_delta=lambda _: started.set()))
    await started.wait()
    assert mesh.workers[0].kill() == -9
    await until_served(stub, {"owl": 1})  # An answer that it interrupts waits 30 s for another worker.
    error = await fails(stub, "fox")
    assert error.code() is CODES.UNAVAILABLE
    assert (await generate(stub, ask("A tale", max_tokens=3, model="hoot"))).receipt.attempts == 1
    assert (await fails(stub, "")).code() is CODES.INVALID_ARGUMENT  # "fox" still counts as a model.
    answer = await running
    assert (len(answer.ids), answer.receipt.attempts) == (200, 1)
    mesh.workers[0].start()
    await mesh.workers[0].ready()
    await until_served(stub, {"fox": 1, "owl": 1})
    assert (await generate(stub, ask("A tale", max_tokens=3, model="reynard"))).receipt.model == "fox"


async def top(mesh: Mesh) -> list[str]:
    """The lines that `weft top --once` prints."""
    out = Console(file=io.StringIO(), width=160)
    await weft.cli.top.show(mesh.gateways[0].address, "", out, once=True)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


async def test_a_loading_worker_is_seen_by_clients(mesh: Mesh, stub: Stub) -> None:
    """A worker that loads weights is listed with its phase and percent until it serves."""
    settings = {"ENGINE": "torch", "SERVED_MODEL_NAME": "badger", "MAX_BATCH_SIZE": "4", "WEFT_KV_BLOCKS": "64"}
    # A variable that no service reads: the worker is not forked, so its start takes as long as a user's.
    worker = mesh.new_worker(2, **settings, PYTHONUNBUFFERED="1")
    del worker.env["WEFT_PACED_STEP_MS"]  # An engine that has no pace refuses it.
    mesh.workers.append(worker)
    seen: list[tuple[str, int]] = []
    refused = None
    lines: list[str] = []
    worker.start()
    async with asyncio.timeout(60):
        while True:
            model = (await listing(stub)).get("badger", api.Model())
            assert not (model.workers and model.loading)
            if model.workers:
                break
            for loading in model.loading:
                assert 0 <= loading.percent <= 100
                if (loading.phase, loading.percent) not in seen:
                    seen.append((loading.phase, loading.percent))
                if refused is None:
                    refused = await fails(stub, "badger")
                    lines = await top(mesh)
            await asyncio.sleep(0.01)
    print("seen:", seen)
    assert seen[0][0] == "starting"
    assert len(seen) >= 2
    assert refused is not None
    assert refused.code() is CODES.UNAVAILABLE
    assert "being loaded" in (refused.details() or "")
    assert any("1 worker loading" in line for line in lines)
    assert any(line.strip().startswith("badger-") for line in lines)
    assert (await generate(stub, ask("A tale", max_tokens=3, model="badger"))).receipt.model == "badger"


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": 7}}', "tokenizer.json cannot be used: "),
        ("chat_template.jinja", "{% for %}", "the chat template does not compile: "),
    ],
)
async def test_a_worker_with_an_unusable_tokenizer_or_template_never_serves(
    mesh: Mesh, stub: Stub, model: Path, tmp_path: Path, file: str, content: str, reason: str
) -> None:
    """The process ends with one line, as for other defects of a checkpoint, instead of refusing each request."""
    folder = Path(shutil.copytree(model, tmp_path / "unreadable"))
    (folder / file).write_text(content)
    worker = mesh.new_worker(3, MODEL_NAME=str(folder), SERVED_MODEL_NAME="unreadable")
    worker.start()
    assert worker.popen is not None
    assert await asyncio.to_thread(worker.popen.wait, 60) == 78
    assert f"weft: {reason}" in worker.tail()
    assert not (await listing(stub)).get("unreadable", api.Model()).workers


async def test_random_weights_leave_no_folder_behind(mesh: Mesh, tmp_path: Path) -> None:
    """A worker that is killed while it serves leaves no folder either."""
    worker = mesh.new_worker(3, MODEL_NAME="random:tiny", SERVED_MODEL_NAME="tiny", TMPDIR=str(tmp_path))
    worker.start()
    await worker.ready()
    worker.kill()
    assert [name for name in os.listdir(tmp_path) if name.startswith("weft-random-")] == []


async def test_a_worker_that_fails_to_load_is_no_longer_listed(mesh: Mesh, stub: Stub, tmp_path: Path) -> None:
    worker = mesh.new_worker(3, MODEL_NAME=str(tmp_path), SERVED_MODEL_NAME="ghost")
    worker.start()
    assert worker.popen is not None
    assert await asyncio.to_thread(worker.popen.wait, 30) == 78
    async with asyncio.timeout(5):
        while "ghost" in await listing(stub):  # noqa: ASYNC110 (the event is in another process)
            await asyncio.sleep(0.02)
