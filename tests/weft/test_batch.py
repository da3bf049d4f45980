"""`weft batch` on a real mesh: OpenAI's format, errors by line, low priority, kills without a lost or double line."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from tests.mesh.conftest import demo_model
from tests.mesh.harness import Mesh, ask, generate
from weft.batch import lines
from weft.batch.output import Output, OutputError
from weft.cli.app import app

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEFT = [sys.executable, "-c", "from weft.cli.app import app; app()"]
PROMPT = "Once upon a time there was a fox"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """One worker that runs four requests at a time."""
    folder = tmp_path_factory.mktemp("batch")
    async with Mesh(folder, demo_model(), worker_env={"MAX_BATCH_SIZE": "4"}) as running:
        yield running


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    """A line of the input."""
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def written(folder: Path, *rows: str) -> tuple[Path, Path]:
    """An input file with these lines, and the path of its output."""
    (folder / "in.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return folder / "in.jsonl", folder / "out.jsonl"


def start(mesh: Mesh, *paths: Path, **flags: object) -> subprocess.Popen[str]:
    """Starts the command."""
    options = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command = [*WEFT, "batch", *map(str, paths), "--url", mesh.url(), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def run(mesh: Mesh, *paths: Path, **flags: object) -> tuple[int, str]:
    """Runs the command. -> its exit code and what it wrote to stderr."""
    process = start(mesh, *paths, **flags)
    _, errors = await asyncio.to_thread(process.communicate)
    return process.returncode, errors


def answers(path: Path) -> dict[str, Any]:
    """The lines of an output by custom id; none twice."""
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows), "a line twice"
    return found


async def test_answers_are_those_of_the_mesh_and_errors_have_their_line(mesh: Mesh, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    paths = written(
        tmp_path,
        line("text"),
        "",
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        line("wrong", temperature=-1),
        line("streamed", stream=True),
        line("embed", url="/v1/embeddings"),
        line("null", priority=None, request_id=None),
    )
    code, errors = await run(mesh, *paths)
    assert code == 1, "some lines have an error"
    assert "3 of 6 lines have an error" in errors
    found = answers(paths[1])
    assert found.keys() == {"text", "chat", "wrong", "streamed", "embed", "null"}
    expected = await generate(mesh.stub(), ask(PROMPT, max_tokens=8))
    response = found["text"]["response"]
    assert (response["status_code"], response["body"]["choices"][0]["text"]) == (200, expected.text)
    assert found["text"]["error"] is None
    assert found["text"]["id"].startswith("batch_req_")
    assert response["request_id"] == response["body"]["id"].removeprefix("cmpl-")
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    null = found["null"]["response"]
    assert null["body"]["id"] == f"cmpl-{null['request_id']}", "null is as good as absent"
    wrong = found["wrong"]["response"]
    assert (wrong["status_code"], wrong["body"]["error"]["param"]) == (400, "temperature")
    assert found["streamed"]["response"] is None
    assert found["streamed"]["error"]["message"].startswith("stream: ")
    assert found["embed"]["response"]["status_code"] == 400
    code, errors = await run(mesh, *paths)
    assert (code, "0 requests in" in errors) == (1, True), "nothing is sent again"
    assert len(answers(paths[1])) == 6


async def test_a_killed_batch_goes_on_without_a_lost_or_double_line(mesh: Mesh, tmp_path: Path) -> None:
    count = 40
    rows = [line(f"r{place}", temperature=1.0, max_tokens=12, prompt=f"{PROMPT} {place}") for place in range(count)]
    paths = written(tmp_path, *rows)
    kills = 0
    while kills < 3:
        process = start(mesh, *paths, concurrency=6)
        had = len(paths[1].read_text().splitlines()) if paths[1].exists() else 0
        while process.poll() is None:
            if paths[1].exists() and len(paths[1].read_text().splitlines()) >= had + 5:
                break
            await asyncio.sleep(0.005)
        if process.poll() is not None:
            process.communicate()
            break
        process.kill()
        process.communicate()
        kills += 1
        if kills == 2:
            with paths[1].open("a") as file:
                file.write('{"id": "batch_req_torn", "custom_id": "r5')  # As if killed within a write.
    assert kills >= 2
    code, errors = await run(mesh, *paths)
    assert code == 0, errors
    found = answers(paths[1])
    assert found.keys() == {f"r{place}" for place in range(count)}
    # A line that is computed again has the same draws: its seed comes from its request id.
    again = written(tmp_path, *rows)[0], tmp_path / "again.jsonl"
    assert (await run(mesh, *again, concurrency=6))[0] == 0
    texts = [
        {name: row["response"]["body"]["choices"][0]["text"] for name, row in answers(path).items()}
        for path in (paths[1], again[1])
    ]
    assert texts[0] == texts[1]


async def test_interactive_requests_overtake_a_batch(mesh: Mesh, tmp_path: Path) -> None:
    rows = [line(f"r{place}", max_tokens=24, ignore_eos=True, cache="bypass") for place in range(120)]
    paths = written(tmp_path, *rows)
    process = start(mesh, *paths, concurrency=32)
    try:
        while not (paths[1].exists() and len(paths[1].read_text().splitlines()) >= 8):
            assert process.poll() is None, process.communicate()
            await asyncio.sleep(0.005)
        before = len(paths[1].read_text().splitlines())
        async with httpx.AsyncClient(base_url=mesh.url(), timeout=60) as client:
            body = {"prompt": "hello", "max_tokens": 4, "cache": "bypass"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        passed = len(paths[1].read_text().splitlines()) - before
        # 28 requests of the batch wait; in turn the request would have waited for 28 lines.
        assert passed < 20, passed
    finally:
        process.kill()
        process.communicate()


async def test_a_batch_waits_for_a_gateway_that_restarts(mesh: Mesh, tmp_path: Path) -> None:
    await mesh.revive()
    paths = written(
        tmp_path, *(line(f"r{place}", cache="bypass", max_tokens=24, ignore_eos=True) for place in range(40))
    )
    process = start(mesh, *paths, concurrency=4)
    while not (paths[1].exists() and len(paths[1].read_text().splitlines()) >= 4):
        assert process.poll() is None
        await asyncio.sleep(0.005)
    mesh.gateways[0].kill()
    await asyncio.sleep(0.3)
    mesh.gateways[0].start()
    await mesh.gateways[0].ready()
    _, errors = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, errors
    assert len(answers(paths[1])) == 40
    assert all(row["response"]["status_code"] == 200 for row in answers(paths[1]).values())


async def test_an_unreachable_mesh_ends_the_batch_with_one_line(mesh: Mesh, tmp_path: Path) -> None:
    paths = written(tmp_path, line("one"))
    command = [*WEFT, "batch", *map(str, paths), "--url", "http://127.0.0.1:9", "--patience", "0.2"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    at = "http://127.0.0.1:9"
    printed = [line for line in done.stderr.splitlines() if at in line]
    assert printed == [f"{at} cannot be reached: waiting for up to 0.2 s", f"weft: no answer from {at} for 0.2 s"]
    assert answers(paths[1]) == {}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://127.0.0.1:99999"])
async def test_what_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    paths = written(tmp_path, line("one"))
    result = CliRunner().invoke(app, ["batch", *map(str, paths), "--url", url])
    assert (result.exit_code, result.stderr) == (2, f"weft: --url: {url!r} is no http:// or https:// URL\n")


async def test_a_device_is_no_output(tmp_path: Path) -> None:
    paths = written(tmp_path, line("one"))
    result = CliRunner().invoke(app, ["batch", str(paths[0]), "/dev/full"])
    assert (result.exit_code, result.stderr) == (1, "weft: /dev/full is no file that a batch can be continued in\n")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "line 2 is not JSON"),
        (line("a", temperature=float("nan")), "line 2 is not JSON of valid Unicode and finite numbers"),
        (
            line("a").replace('"temperature": 0', '"temperature": 9e999'),
            "line 2 is not JSON of valid Unicode and finite",
        ),
        (line("a", prompt="\ud800"), "line 2 is not JSON of valid Unicode"),
        (line("\ud800"), "line 2 is not JSON of valid Unicode"),
        ("[]", "line 2 is not a JSON object"),
        ('{"url": "/v1/completions", "body": {}}', "line 2 has no custom_id"),
        ('{"custom_id": "a", "url": "/v1/files", "body": {}}', "line 2: the url must be one of"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "line 2 has no body"),
        (
            '{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}',
            "line 2: the method must be POST",
        ),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}, "x": 1}', "line 2: there is no field 'x'"),
        (line("first"), "the custom_id 'first' occurs twice"),
    ],
)
async def test_a_malformed_input_is_refused_before_anything_is_sent(tmp_path: Path, row: str, reason: str) -> None:
    path, _ = written(tmp_path, line("first"), row)
    with pytest.raises(lines.InputError) as caught:
        lines.check(path)
    assert str(caught.value).startswith(reason)


async def test_the_output_of_another_batch_is_not_continued(tmp_path: Path) -> None:
    request = lines.Request("a", "/v1/completions", {"prompt": "x"})
    path = tmp_path / "out.jsonl"
    with Output(path, {"a": request.request_id}) as output:
        with pytest.raises(OutputError, match="another process"):
            Output(path, {})
        output.append(lines.answered(request, 200, {}))
    with pytest.raises(OutputError, match="line 1"):
        Output(path, {"b": "batch-1"})
    changed = lines.Request("a", "/v1/completions", {"prompt": "y"})
    with pytest.raises(OutputError, match="line 1"):
        Output(path, {"a": changed.request_id})
    with Output(path, {"a": request.request_id}) as output:
        assert (output.done, output.failed) == ({"a"}, 0)


async def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    request = lines.Request("a", "/v1/completions", {"prompt": "x"})
    path, expected = tmp_path / "out.jsonl", {"a": request.request_id}
    whole = json.dumps(lines.answered(request, 400, {})) + "\n"
    for torn in ("", whole[:-1], whole[:10], "\x00\x00"):
        path.write_text(torn)
        with Output(path, expected) as output:
            assert output.done == set()
        assert path.read_text() == ""
        path.write_text(whole + torn)
        with Output(path, expected) as output:
            assert (output.done, output.failed) == ({"a"}, 1)
        assert path.read_text() == whole
