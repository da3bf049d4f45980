"""One trace per request across all processes of a real mesh, collected over OTLP."""

import asyncio
import signal
import time
import uuid
from pathlib import Path

import pytest
from grpc import aio

from protos import inference_pb2 as api
from tests.mesh.harness import Mesh, Stub, ask, generate
from tests.mesh.test_joins import until_listed
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.telemetry.collector import Collector, ReceivedSpan, tree
from tests.telemetry.conftest import LONG_TIMEOUTS, PACED, SLOW_PREFILL
from tests.telemetry.scraping import scrape

CALLER = "00f067aa0ba902b7"
SECRET = "Rumpelstiltskin"


def traced(trace_id: str, sampled: bool = True) -> tuple[tuple[str, str], ...]:
    """Metadata of a caller that has a span in the trace."""
    return (("traceparent", f"00-{trace_id}-{CALLER}-0{int(sampled)}"),)


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def send_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Sets the environment so that every process started later exports to the collector."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)


def names(spans: list[ReceivedSpan]) -> list[str]:
    """The spans as service/name, sorted."""
    return sorted(f"{seen.service.removeprefix('weft-')}/{seen.name.split(' ')[0]}" for seen in spans)


def one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    """The only span of this service and name."""
    (found,) = [seen for seen in spans if f"{seen.service.removeprefix('weft-')}/{seen.name.split(' ')[0]}" == name]
    return found


async def cancel_midway(stub: Stub, request: api.GenerateRequest, trace_id: str) -> None:
    """Reads two deltas and cancels the call."""
    call = stub.Generate(request, metadata=traced(trace_id))
    for _ in range(2):
        await call.read()
    call.cancel()


COMPUTED = [
    "gateway/attempt",
    "gateway/text_completion",
    "gateway/tokenize",
    "scheduler/queue",
    "worker/decode",
    "worker/job",
    "worker/prefill",
    "worker/queue",
]


@pytest.mark.usefixtures("_fast")
async def test_requests_decoded_together_have_a_whole_trace_each(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Collector() as collector:
        send_to(monkeypatch, collector.endpoint)
        with RedisServer(tmp_path / "redis") as redis:
            mesh = Mesh(tmp_path, model, redis_url=redis.url, worker_env=SLOW_PREFILL)
            for process in mesh.processes:
                process.env.update(LONG_TIMEOUTS)
            async with mesh:
                stub = mesh.stub()
                ids = [uuid.uuid4().hex, uuid.uuid4().hex]
                requests = [
                    ask(f"{SECRET} was", max_tokens=100),
                    ask(f"{SECRET} ran", max_tokens=100, temperature=0.7),
                ]
                # Other jobs of the gateway prevent an early attempt, which may add a span.
                company = stub.Generate(ask("Once", max_tokens=500, temperature=1.0, ignore_eos=True))
                await company.read()
                answers = await asyncio.gather(
                    *(generate(stub, request, metadata=traced(i)) for request, i in zip(requests, ids, strict=True))
                )
                greedy = await collector.until(ids[0], lambda spans: len(spans) >= 10)
                sampled = await collector.until(ids[1], lambda spans: len(spans) >= 8)
                assert names(greedy) == sorted([*COMPUTED, "gateway/cache", "cache/weft.v1.Cache/GetResult"])
                assert names(sampled) == COMPUTED
                assert [answer.receipt.trace_id for answer in answers] == ids

                for spans in (greedy, sampled):
                    children = tree(spans, CALLER)
                    (request,) = children[CALLER]
                    assert request.name == f"text_completion {answers[0].receipt.model}"
                    assert "scheduler/queue" in names(children[request.id])
                    assert names(children[one(spans, "gateway/attempt").id]) == ["worker/job"]
                    assert names(children[one(spans, "worker/job").id]) == COMPUTED[4:5] + COMPUTED[6:]
                    assert not any(seen.failed for seen in spans)
                company.cancel()
                decodes = [one(spans, "worker/decode").span for spans in (greedy, sampled)]
                overlap_ns = min(span.end_time_unix_nano for span in decodes) - max(
                    span.start_time_unix_nano for span in decodes
                )
                assert overlap_ns > 0.1e9, "the requests were not decoded together"

                request = one(sampled, "gateway/text_completion")
                assert request.attributes["gen_ai.usage.output_tokens"] == 100
                assert request.attributes["gen_ai.request.max_tokens"] == 100
                assert request.attributes["gen_ai.request.temperature"] == pytest.approx(0.7)
                assert [event.name for event in request.span.events] == ["first token"]
                assert SECRET not in str(collector.spans)

                # The same request again is answered by the cache: nothing was computed for it.
                third = uuid.uuid4().hex
                again = await generate(stub, requests[0], metadata=traced(third))
                assert again.receipt.result_hit
                hit = await collector.until(third, lambda spans: "gateway/text_completion" in names(spans))
                tree(hit, CALLER)
                assert one(hit, "gateway/cache").attributes["weft.hit"] is True
                assert not any(seen.failed for seen in hit)


@pytest.mark.usefixtures("_fast")
async def test_a_second_attempt_is_a_second_span(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Collector() as collector:
        send_to(monkeypatch, collector.endpoint)
        async with Mesh(tmp_path, model, workers=2, worker_env=PACED) as mesh:
            await until_listed(mesh, gateway=0, workers=2)  # With one worker there are early attempts.
            ids = [uuid.uuid4().hex for _ in range(6)]
            stub, reading = mesh.stub(), [asyncio.Event() for _ in ids]
            tasks = [
                asyncio.create_task(
                    generate(
                        stub,
                        ask(f"Tale {number}", max_tokens=600, temperature=1.0, ignore_eos=True),
                        metadata=traced(trace_id),
                        on_delta=lambda _, event=reading[number]: event.set(),  # type: ignore[misc]
                    )
                )
                for number, trace_id in enumerate(ids)
            ]
            await asyncio.gather(*(event.wait() for event in reading))
            assert mesh.workers[0].kill(signal.SIGKILL) == -signal.SIGKILL
            answers = await asyncio.gather(*tasks)
            moved = [answer for answer in answers if answer.receipt.attempts == 2]
            assert 0 < len(moved) < len(answers)
            for answer in answers:
                spans = await collector.until(
                    answer.receipt.trace_id, lambda spans: {"gateway/text_completion", "worker/job"} <= {*names(spans)}
                )
                children = tree(spans, CALLER)
                attempts = [seen for seen in spans if seen.name == "attempt"]
                assert [seen.attributes["weft.attempt"] for seen in attempts] == ([1, 2] if answer in moved else [1])
                assert [seen.attributes["weft.worker"] for seen in attempts] == list(answer.receipt.workers)
                assert [seen.failed for seen in attempts] == ["WORKER_LOST"] * (len(attempts) - 1) + [""]
                # The killed worker exports nothing; the worker that took over exports its spans.
                assert names(children[attempts[-1].id]) == ["worker/job"]
                assert names(spans).count("scheduler/queue") == len(attempts)
                assert one(spans, "gateway/text_completion").attributes["weft.attempts"] == len(attempts)
                assert not one(spans, "gateway/text_completion").failed


@pytest.mark.usefixtures("_fast")
async def test_a_joined_request_has_a_link_to_the_trace_of_the_job(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Collector() as collector:
        send_to(monkeypatch, collector.endpoint)
        async with Mesh(tmp_path, model, worker_env=PACED) as mesh:
            stub, request = mesh.stub(), ask("The same tale", max_tokens=100, ignore_eos=True)
            ids = [uuid.uuid4().hex, uuid.uuid4().hex]
            answers = await asyncio.gather(*(generate(stub, request, metadata=traced(trace_id)) for trace_id in ids))
            (leader,) = [answer.receipt for answer in answers if not answer.receipt.joined]
            (joined,) = [answer.receipt for answer in answers if answer.receipt.joined]
            ends = {"gateway/text_completion", "worker/attach"}
            spans = await collector.until(joined.trace_id, lambda spans: ends <= {*names(spans)})
            children = tree(spans, CALLER)
            attempts = [seen for seen in spans if seen.name == "attempt"]
            (own,) = [seen for seen in attempts if seen.attributes.get("weft.joined")]
            assert names(children[own.id]) == ["worker/attach"]
            (link,) = one(spans, "worker/attach").span.links
            assert link.trace_id.hex() == leader.trace_id
            # An early attempt may precede it: aborted, because the other job led.
            assert all(seen.attributes["weft.cancelled"] for seen in attempts if seen is not own)


@pytest.mark.usefixtures("_fast")
async def test_the_spans_of_a_cancelled_request_are_marked_cancelled(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Collector() as collector:
        send_to(monkeypatch, collector.endpoint)
        async with Mesh(tmp_path, model, worker_env=PACED) as mesh:
            stub, cancelled, refused, silent = mesh.stub(), uuid.uuid4().hex, uuid.uuid4().hex, uuid.uuid4().hex
            await cancel_midway(stub, ask("A long tale", max_tokens=500, ignore_eos=True), cancelled)
            with pytest.raises(aio.AioRpcError):
                await generate(stub, ask("A tale", max_tokens=10**6), metadata=traced(refused))
            await generate(stub, ask("A tale", max_tokens=4), metadata=traced(silent, sampled=False))
            spans = await collector.until(cancelled, lambda spans: len(spans) >= len(COMPUTED))
            tree(spans, CALLER)
            request = one(spans, "gateway/text_completion")
            assert request.failed == "CANCELLED"
            assert request.attributes["rpc.response.status_code"] == "CANCELLED"
            assert one(spans, "gateway/attempt").attributes["weft.cancelled"] is True
            assert one(spans, "worker/job").attributes["weft.end"] == "cancelled"
            spans = await collector.until(refused, lambda spans: "gateway/text_completion" in names(spans))
            assert names(spans) == ["gateway/text_completion", "gateway/tokenize"]
            request = one(spans, "gateway/text_completion")
            assert request.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
            assert request.failed
            assert collector.trace(silent) == [], "the caller's context is not sampled"


@pytest.mark.parametrize("collector", ["stopped", "deaf"])
async def test_requests_are_answered_without_a_collector(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, collector: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    async with Collector(silent=True) as deaf:
        send_to(monkeypatch, deaf.endpoint if collector == "deaf" else f"http://127.0.0.1:{free_port()}")
        mesh = Mesh(tmp_path, model, worker_env=PACED)
        mesh.gateways[0].env["WEFT_METRICS_PORT"] = str(free_port())
        async with mesh:
            stub = mesh.stub()
            for _ in range(4):
                answers = await asyncio.gather(
                    *(generate(stub, ask("A tale", max_tokens=20, temperature=1.0)) for _ in range(16))
                )
                assert [len(answer.ids) for answer in answers] == [20] * 16
            assert (deaf.calls > 0) == (collector == "deaf")
            scraped = await scrape(mesh.gateways[0])
            assert scraped.value("weft_trace_spans_total", outcome="dropped") > 64 * 3 - 16 - 16
            assert scraped.value("weft_trace_spans_total", outcome="exported") == 0
            for process in (mesh.gateways[0], mesh.scheduler):
                began = time.monotonic()
                assert process.kill(signal.SIGTERM) == 0
                assert time.monotonic() - began < 2.5, f"{process.name} waited for the collector"
                lines = [
                    line for line in process.log.read_text().splitlines() if "collector" in line or "opentele" in line
                ]
                assert len(lines) <= 1, lines
