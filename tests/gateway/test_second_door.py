"""A second door beside gRPC: it makes Calls, streams answers, receives receipts and errors, and cancels."""

import ast
import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protos import inference_pb2 as api
from services.errors import WeftError
from services.gateway.access.authorizer import Authorizer
from services.gateway.answers import call as seam
from services.gateway.answers import serve
from services.gateway.answers.call import Call
from services.gateway.answers.serve import AnswerService
from services.gateway.backend import Backend
from services.gateway.links.cache_link import CacheLink
from services.gateway.links.catalog import Catalog
from services.gateway.links.mesh_view import MeshView
from services.gateway.links.result_cache import ResultCache
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.vectors.cache import VectorCache
from services.gateway.links.worker_links import WorkerLinks
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings
from services.gateway.text.encoder import Encoder
from tests.gateway import line_door
from tests.gateway.fakes import FakeMesh, ask, until
from tests.gateway.line_door import LineDoor
from tests.gateway.model import ANSWER, LOREM

KEY = "wk-secret"
TENANTS = f"""
[[tenant]]
name = "one"
keys = ["sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"]
methods = ["Generate"]
concurrent = 1
"""


@contextlib.asynccontextmanager
async def backend(mesh: FakeMesh) -> AsyncIterator[Backend]:
    """The back of a gateway without a gRPC server."""
    settings = GatewaySettings(scheduler_address=mesh.address("scheduler"), cache_address="")
    encoder = Encoder(1)
    with ThreadPoolExecutor(1) as threads, contextlib.closing(encoder):
        catalog, workers = Catalog(threads), WorkerLinks("a gateway")
        scheduler = SchedulerLink(settings.scheduler_address, "a gateway", 2.0, catalog.update, workers.lose_worker)
        running = asyncio.create_task(scheduler.run())
        try:
            cache, metrics = CacheLink("", 1.0), GatewayMetrics()
            view = MeshView(settings.scheduler_address, "a gateway", "", lambda: cache.state)
            caches = ResultCache(cache), VectorCache(cache)
            yield Backend(settings, catalog, scheduler, workers, *caches, metrics, view, encoder)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await catalog.close()
            await workers.close()


class Doors:
    """A line door at a loopback port, and its client."""

    def __init__(self, mesh: FakeMesh, answers: AnswerService, door: LineDoor, port: int) -> None:
        self.mesh = mesh
        self.answers = answers
        self.door = door
        self._port = port

    async def send(self, line: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection and sends a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"{line}\n".encode())
        return reader, writer

    async def lines(self, line: str) -> list[str]:
        """The whole reply to a request."""
        reader, writer = await self.send(line)
        reply = (await reader.read()).decode().splitlines()
        writer.close()
        return reply


@pytest_asyncio.fixture
async def doors(tmp_path: Path) -> AsyncIterator[Doors]:
    """A fake mesh with tenants behind a line door."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    async with FakeMesh() as mesh, backend(mesh) as back:
        answers = AnswerService(back, Authorizer(str(tenants)))
        door = LineDoor(answers)
        server = await asyncio.start_server(door.serve, "127.0.0.1", 0)
        yield Doors(mesh, answers, door, server.sockets[0].getsockname()[1])
        server.close()


def text_of(reply: list[str]) -> str:
    """The text of all deltas."""
    return "".join(json.loads(line.removeprefix("text ")) for line in reply if line.startswith("text "))


def test_neither_the_door_nor_the_seam_imports_a_protocol() -> None:
    for module in (line_door, seam):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in names if name and name.startswith("grpc")]
    for path in Path(serve.__file__ or "").parent.glob("*.py"):
        assert not {"grpc.aio", "aio", "starlette", "uvicorn"} & imported(path), path.name


def imported(path: Path) -> set[str]:
    """Names that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update({node.module or ""} | {alias.name for alias in node.names})
    return names


async def test_an_answer_streams_through_the_second_door(doors: Doors) -> None:
    reply = await doors.lines(f"{KEY} 100 hello")
    assert text_of(reply) == LOREM
    assert reply[-2:] == [f"receipt {len(ANSWER)}", "end"]
    assert sum(line.startswith("text ") for line in reply) > 1
    [receipt] = doors.door.receipts
    assert (receipt.completion_tokens, receipt.finish_reason) == (len(ANSWER), api.FINISH_REASON_STOP)
    assert list(receipt.workers) == ["worker-0"]
    assert receipt.timings.wall_s > 0


async def test_a_call_is_accepted_before_its_first_token(doors: Doors) -> None:
    doors.mesh.workers[0].hold_at = 0
    reader, writer = await doors.send(f"{KEY} 100 hello")
    assert await asyncio.wait_for(reader.readline(), 5) == b"accepted\n"
    doors.mesh.workers[0].hold_at = None
    assert text_of((await reader.read()).decode().splitlines()) == LOREM
    writer.close()


async def test_a_client_that_disconnects_cancels_its_job(doors: Doors) -> None:
    worker = doors.mesh.workers[0]
    worker.hold_at = 5
    reader, writer = await doors.send(f"{KEY} 100 hello")
    while not (await asyncio.wait_for(reader.readline(), 5)).startswith(b"text"):
        pass
    await until(lambda: worker.sent == 5)
    writer.close()
    await until(lambda: not worker.running)
    await until(lambda: len(doors.door.receipts) == 1)
    assert doors.door.receipts[0].finish_reason == api.FINISH_REASON_CANCELLED
    worker.hold_at = None
    assert (await doors.lines(f"{KEY} 100 hello"))[-1] == "end"  # Its slot is free again.


@pytest.mark.parametrize(
    ("line", "reason"),
    [("- 100 hello", "KEY_REQUIRED"), ("wk-other 100 hello", "KEY_UNKNOWN"), (f"{KEY} 0 hello", "INVALID_FIELD")],
)
async def test_a_refused_call_ends_with_its_reason_and_a_receipt(doors: Doors, line: str, reason: str) -> None:
    assert await doors.lines(line) == [f"error {reason}"]
    [receipt] = doors.door.receipts
    assert (receipt.finish_reason, receipt.completion_tokens) == (api.FINISH_REASON_ERROR, 0)


async def test_a_method_that_the_key_does_not_permit_is_refused_at_any_door(doors: Doors) -> None:
    receipts: list[api.Receipt] = []

    async def deliver(response: Any) -> None:
        raise AssertionError("nothing may be delivered")

    call = Call("Complete", "function", ask(), [f"Bearer {KEY}"], deliver, receipts.append)
    with pytest.raises(WeftError) as caught:
        await doors.answers.serve(call)
    assert caught.value.reason == "METHOD_DENIED"
    assert len(receipts) == 1


async def test_a_deadline_of_the_call_ends_it(doors: Doors) -> None:
    receipts: list[api.Receipt] = []
    doors.mesh.workers[0].hold_at = 3

    async def deliver(response: Any) -> None:
        """Takes the message."""

    call = Call("Generate", "function", ask(), [f"Bearer {KEY}"], deliver, receipts.append, remaining_s=0.3)
    with pytest.raises(WeftError) as caught:
        await doors.answers.serve(call)
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    assert [receipt.finish_reason for receipt in receipts] == [api.FINISH_REASON_CANCELLED]
    await until(lambda: not doors.mesh.workers[0].running)
