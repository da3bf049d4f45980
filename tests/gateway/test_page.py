"""The page's files and the mesh over HTTP on a gateway among fakes: headers, caching, authorization, streams."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.gateway.doors.page import FOLDER
from tests.gateway.fakes import FakeMesh
from tests.gateway.http_client import client
from tests.gateway.test_http_door import TENANTS
from tests.ports import free_port


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh(http_port=free_port()) as running:
        running.scheduler.overview.workers.add(worker_id="fox-1", model="fake", ready=True, credits=8)
        yield running


async def test_every_file_is_served_under_a_strict_policy(mesh: FakeMesh) -> None:
    async with client(mesh) as http:
        for path in FOLDER.iterdir():
            response = await http.get("/" if path.name == "index.html" else f"/page/{path.name}")
            assert response.status_code == 200, path
            assert response.content == path.read_bytes()
            assert response.headers["x-content-type-options"] == "nosniff"
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            again = await http.get(str(response.url), headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert not {"content-length", "transfer-encoding"}.intersection(again.headers)
        assert (await http.get("/page/index.html")).status_code == 404
        assert (await http.get("/page/../settings.py")).status_code == 404
        assert (await http.post("/")).status_code == 405


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script() -> None:
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|style=|<style", html) == []
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
        named = re.findall(r"""(?:from|import) "\./([\w.]+)"|(?:href|src)="page/([\w.]+)""", text)
        assert all((FOLDER / (module or file)).exists() for module, file in named), path


def test_the_files_open_with_what_they_do() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in (".js", ".css"):
            assert re.match(r"// \S|/\* \S", path.read_text()), path
            assert len(path.read_text().splitlines()) <= 400, path


async def test_the_page_can_be_switched_off() -> None:
    async with FakeMesh(http_port=free_port(), gateway_page=False) as mesh, client(mesh) as http:
        assert (await http.get("/")).status_code == 404
        assert (await http.get("/mesh")).status_code == 200


async def test_the_mesh_as_json_and_as_events(mesh: FakeMesh) -> None:
    async with client(mesh) as http:
        snapshot = (await http.get("/mesh")).json()
        assert snapshot["scheduler_connected"] is True
        (worker,) = snapshot["workers"]
        assert (worker["worker_id"], worker["phase"], worker["credits"]) == ("fox-1", "PHASE_READY", 8)
        assert worker["running"] == 0  # Values of 0 are there, too.
        async with http.stream("GET", "/mesh/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            data = [json.loads(line.removeprefix("data: ")) async for line in _first(lines, 3) if line]
        for path, kind in (("/mesh", "application/json"), ("/mesh/events", "text/event-stream")):
            head = await http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"].startswith(kind)
    assert [each["workers"] for each in data] == [[worker]] * 2
    assert data[0]["at_s"] < data[1]["at_s"]


async def _first(lines: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield await anext(lines)


async def test_a_stopping_gateway_ends_the_events(tmp_path: Path) -> None:
    async with asyncio.timeout(20):  # Less than the gateway gives to requests that are running.
        async with FakeMesh(http_port=free_port(), drain_s=60) as mesh:
            http = client(mesh)
            request = http.build_request("GET", "/mesh/events")
            response = await http.send(request, stream=True)
            reading = asyncio.create_task(_read(response))
        assert "data: " in await reading
        await http.aclose()


async def _read(response: httpx.Response) -> str:
    return (await response.aread()).decode()


@pytest.mark.parametrize("path", ["/mesh", "/mesh/events"])
async def test_only_operators_see_the_mesh(tmp_path: Path, path: str) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS.replace('models = ["fake"]', "operator = true"))
    async with FakeMesh(http_port=free_port(), tenants_file=str(file)) as mesh:
        statuses = []
        for key in ("", "wk-unknown", "wk-other"):
            async with client(mesh, key) as http:
                statuses.append((await http.get(path)).status_code)
                assert (await http.head(path)).status_code == statuses[-1]
                assert (await http.get("/")).status_code == 200
        assert statuses == [401, 401, 403]
        async with client(mesh, "wk-secret") as http, http.stream("GET", path) as response:
            assert response.status_code == 200
