"""`weft bench`, `weft top` and `weft doctor` against a real mesh whose worker runs the paced engine."""

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from tests.mesh.harness import Mesh
from tests.ports import free_port
from weft.cli.app import app
from weft.launch.demo_model import model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """One gateway and one worker with steps of 2 ms."""
    folder = tmp_path_factory.mktemp("paced")
    paced = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "2", "MAX_SEQ_LENGTH": "8192"}
    async with Mesh(folder, model_folder(), worker_env=paced) as running:
        yield running


async def weft(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"COLUMNS": "160"})


class Page(HTMLParser):
    """The parts of a report that the tests check."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.lines: list[str] = []
        self.figures: dict[str, str] = {}
        self.outside: list[str] = []
        self._figure = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self._figure = values.get("data-figure") or ""
        if tag in ("polyline", "circle"):  # A line of one point is a dot.
            self.lines.append(values.get("points") or values.get("cx") or "")
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._figure:
            self.figures[self._figure] = data
            self._figure = ""


async def test_a_closed_loop_is_measured_and_reported(mesh: Mesh, tmp_path: Path) -> None:
    out, html = tmp_path / "result.json", tmp_path / "report.html"
    ran = await weft(
        *("bench", "--address", mesh.gateways[0].address, "--requests", "24", "--concurrency", "6"),
        *("--input-len", "96", "--prefix-len", "64", "--output-len", "12", "--processes", "2"),
        *("--goodput", "ttft:60000 tpot:60000", "--json", str(out), "--html", str(html)),
    )
    assert ran.exit_code == 0, ran.output
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (24, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24 * 96, 24 * 12)
    assert result["request_goodput"] == result["request_throughput"]
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] <= result["max_e2el_ms"]
    # Steps of the paced engine end at multiples of 2 ms of the machine's clock.
    assert result["mean_tpot_ms"] >= 1.9
    receipts = result["receipts"]
    assert receipts["cached_tokens"] >= 64 * 12, "most requests hit the shared prefix"
    assert receipts["cached_tokens"] + receipts["prefill_tokens"] == 24 * 96
    assert receipts["attempts"] == {"1": 24}
    assert sum(line["tokens"] for line in result["timeline"]) == 24 * 12
    assert result["timeline"][-1]["running"] == 0
    assert f"{result['output_throughput']:,.1f}" in ran.output
    assert re.search(r"^requests: \d+ of 24$", ran.stderr, re.MULTILINE), "progress is printed in a pipe"


async def test_the_report_is_self_contained_and_agrees_with_the_json(mesh: Mesh, tmp_path: Path) -> None:
    out, html = tmp_path / "result.json", tmp_path / "report.html"
    ran = await weft(
        *("bench", "--address", mesh.gateways[0].address, "--requests", "8", "--input-len", "16"),
        *("--output-len", "8", "--warmup", "0", "--json", str(out), "--html", str(html)),
    )
    assert ran.exit_code == 0, ran.output
    text, result = html.read_text(), json.loads(out.read_text())
    page = Page(text)
    assert page.tags.count("svg") >= 6
    assert len([line for line in page.lines if line]) >= 6
    assert page.outside == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert page.figures["request_throughput"] == f"{result['request_throughput']:,.2f}"
    assert page.figures["p99_itl_ms"] == f"{result['p99_itl_ms']:,.2f}"
    embedded = re.search(r'id="result">(.*)</script>', text)
    assert embedded is not None
    assert json.loads(embedded[1]) == result


async def test_a_trace_is_replayed_with_its_prefixes(mesh: Mesh, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "result.json"
    lines = [
        {"timestamp": 300 * number, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2 + number]}
        for number in range(5)
    ]
    too_long = {"timestamp": 1500, "input_length": 60_000, "output_length": 5}
    trace.write_text("".join(json.dumps(line) + "\n" for line in [*lines, too_long]))
    ran = await weft(
        *("bench", "--address", mesh.gateways[0].address, "--trace", str(trace), "--time-scale", "2"),
        *("--limit", "50", "--warmup", "0", "--json", str(out)),
    )
    assert ran.exit_code == 0, ran.output
    result = json.loads(out.read_text())
    assert (result["completed"], result["clipped_requests"]) == (6, 1)
    assert "shortened" in ran.output
    assert result["total_input_tokens"] == 5 * 1000 + 8192 - 5
    assert result["receipts"]["cached_tokens"] == 4 * 512
    assert 0.7 <= result["duration"] <= 20


async def test_an_open_loop_counts_errors_by_their_code(mesh: Mesh, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    ran = await weft(
        *("bench", "--address", mesh.gateways[0].address, "--requests", "5", "--rate", "50", "--constant"),
        *("--input-len", "8", "--output-len", "2000", "--deadline", "0.4", "--warmup", "0", "--json", str(out)),
    )
    assert ran.exit_code == 1, "no request was answered"
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"]) == (0, 5)
    assert sum(count for code, count in result["errors"].items() if "DEADLINE" in code) == 5


async def test_a_worker_is_profiled_under_load(mesh: Mesh, tmp_path: Path) -> None:
    out, html, trace = tmp_path / "result.json", tmp_path / "report.html", tmp_path / "trace.json.gz"
    ran = await weft(
        *("bench", "--address", mesh.gateways[0].address, "--scheduler", mesh.scheduler.address),
        *("--requests", "16", "--output-len", "250", "--json", str(out), "--html", str(html)),
        *("--profile", str(trace), "--profile-steps", "50"),
    )
    assert ran.exit_code == 0, ran.output
    profile = json.loads(out.read_text())["profile"]
    assert profile["steps"] == 50
    assert sum(profile["host"].values()) == pytest.approx(profile["seconds"])
    assert profile["host"]["waiting"] > profile["host"]["planning"] > 0, "the paced engine sleeps for most of a step"
    assert re.search(r"50 steps of weft-story-11m-\w{8}", ran.output)
    assert re.search(r"planning +\d", ran.output)
    assert "planning" in html.read_text()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "planning" for event in events) == 50


async def test_a_failed_profile_is_reported_in_one_line(mesh: Mesh, tmp_path: Path) -> None:
    common = ("bench", "--address", mesh.gateways[0].address, "--profile", str(tmp_path / "trace.json.gz"))
    out = tmp_path / "result.json"
    load = ("--requests", "8", "--output-len", "50", "--json", str(out))
    away = await weft(*common, *load, "--scheduler", f"127.0.0.1:{free_port()}")
    assert away.exit_code == 1
    assert "no scheduler answers at" in away.output
    assert "Traceback" not in away.output
    assert json.loads(out.read_text())["completed"] == 8, "the load is measured all the same"
    assert "output tokens/s" in away.output


async def test_a_load_that_cannot_be_run_is_refused_in_one_line(mesh: Mesh) -> None:
    address = mesh.gateways[0].address
    too_long = await weft("bench", "--address", address, "--input-len", "9000")
    assert too_long.exit_code == 2
    assert "exceed the model's context" in too_long.output
    nowhere = await weft("bench", "--address", address, "--requests", "1", "--json", "/nowhere/result.json")
    assert (nowhere.exit_code, nowhere.output) == (2, "weft: /nowhere/result.json: there is no such folder\n")
    absent = await weft("bench", "--address", f"127.0.0.1:{free_port()}", "--requests", "1")
    assert absent.exit_code == 1
    assert "Traceback" not in absent.output


async def test_top_shows_the_worker_once(mesh: Mesh) -> None:
    ran = await weft("top", "--once", "--address", mesh.gateways[0].address)
    assert ran.exit_code == 0, ran.output
    assert "1 worker, 1 gateway, 0 jobs queued" in ran.output
    assert re.search(r"weft-story-11m-\w{8} +both +ready .* 0/64 +0 +0 +0", ran.output)
    away = await weft("top", "--once", "--address", f"127.0.0.1:{free_port()}")
    assert away.exit_code == 1
    assert "no mesh at" in away.output


async def test_the_doctor_reports_a_healthy_mesh(mesh: Mesh) -> None:
    ran = await weft("doctor", "--address", mesh.gateways[0].address, "--scheduler", mesh.scheduler.address)
    assert ran.exit_code == 0, ran.output
    lines = {line.split()[1]: line for line in ran.output.splitlines()}
    assert lines["mesh"].startswith("ok")
    assert "weft-story-11m (1 worker, context 8192)" in lines["models"]
    assert "1 ready" in lines["workers"]


async def test_the_doctor_reports_faults(mesh: Mesh) -> None:
    absent = f"127.0.0.1:{free_port()}"
    ran = await weft("doctor", "--address", absent, "--scheduler", absent, "--redis-url", f"redis://{absent}")
    assert ran.exit_code == 1
    bad = [line.split()[1] for line in ran.output.splitlines() if line.startswith("bad")]
    assert bad == ["redis"]
    assert "start one with `weft serve`" in ran.output
    stranger = await weft("doctor", "--address", mesh.scheduler.address, "--scheduler", mesh.scheduler.address)
    assert stranger.exit_code == 1
