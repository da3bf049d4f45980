"""The metrics that Prometheus reads from every service of a real mesh."""

import asyncio
import uuid
from pathlib import Path

import pytest
from grpc import aio

from tests.mesh.harness import Mesh, Process, ask, generate
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.telemetry.conftest import LONG_TIMEOUTS, SLOW_PREFILL
from tests.telemetry.scraping import Scraped, scrape

SECRET = "Rumpelstiltskin"


VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}
FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
PER_TOKEN = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5]
INFINITY = [float("inf")]


async def all_credits_back(scheduler: Process) -> None:
    """Waits until no job is at a worker: a job that the result cache answered runs to the end of its step."""
    async with asyncio.timeout(20):
        while True:
            scraped = await scrape(scheduler)
            if scraped.value("weft_scheduler_free_credits") == scraped.value("weft_scheduler_credits"):
                return
            await asyncio.sleep(0.1)


async def all_blocks_back(worker: Process) -> None:
    """Waits until no job holds a block: a worker reports the end of a job before the end of its step."""
    async with asyncio.timeout(20):
        while (await scrape(worker)).value("weft_worker_kv_blocks", state="active"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


async def test_every_service_counts_what_it_did(tmp_path: Path, model: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        mesh = Mesh(tmp_path, model, redis_url=redis.url, worker_env=SLOW_PREFILL)
        for process in mesh.processes:
            process.env.update(LONG_TIMEOUTS, WEFT_METRICS_PORT=str(free_port()))
        async with mesh:
            stub = mesh.stub()
            greedy = ask(f"{SECRET} was", max_tokens=20, ignore_eos=True)
            first = await generate(stub, greedy)
            await generate(
                stub, ask(f"{SECRET} ran far away and then", max_tokens=10, temperature=1.0, ignore_eos=True)
            )
            assert (await generate(stub, greedy)).receipt.result_hit
            with pytest.raises(aio.AioRpcError):
                await generate(stub, ask("A tale", model=uuid.uuid4().hex))
            name = first.receipt.model
            assert mesh.cache is not None
            await all_credits_back(mesh.scheduler)
            await all_blocks_back(mesh.workers[0])
            gateway, worker, scheduler, cache = [
                await scrape(process) for process in (mesh.gateways[0], mesh.workers[0], mesh.scheduler, mesh.cache)
            ]

    _gateway_counted(gateway, name)
    _worker_counted(worker, name)
    _scheduler_counted(scheduler, name)
    assert cache.value("weft_cache_hits_total") == 1
    assert cache.value("weft_cache_misses_total", reason="absent") == 1
    assert cache.value("weft_cache_stores_total") == 1
    assert cache.value("weft_rpc_seconds_count", method="weft.v1.Cache/GetResult", code="OK") == 2
    for scraped in (gateway, worker, scheduler, cache):
        assert SECRET not in scraped.text
        assert first.receipt.request_id not in scraped.text
        assert scraped.series() < 1000


def _gateway_counted(gateway: Scraped, name: str) -> None:
    own = {"model": name}
    assert gateway.value("weft_gateway_requests_total", code="OK", finish_reason="length", **own) == 3
    assert gateway.value("weft_gateway_requests_total", code="NOT_FOUND", model="") == 1
    assert gateway.value("weft_gateway_results_total", outcome="hit", **own) == 1
    assert gateway.value("weft_gateway_results_total", outcome="miss", **own) == 1
    assert gateway.value("weft_gateway_completion_tokens_total", **own) == 50
    assert gateway.value("weft_gateway_requests_in_flight") == 0
    assert gateway.value("gen_ai_server_request_duration_seconds_count", gen_ai_request_model=name) == 3
    assert gateway.value("gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model=name) == 3
    assert gateway.value("gen_ai_server_time_per_output_token_seconds_count") == 2
    assert gateway.value("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 50
    assert gateway.bounds("gen_ai_server_time_to_first_token_seconds") == FIRST_TOKEN + INFINITY
    assert gateway.bounds("gen_ai_server_time_per_output_token_seconds") == PER_TOKEN + INFINITY


def _worker_counted(worker: Scraped, name: str) -> None:
    assert {alias: worker.type(alias) for alias in VLLM} == VLLM
    labels = {"model_name": name}
    finished = worker.value("vllm:request_success_total", finished_reason="length", **labels)
    aborted = worker.value("vllm:request_success_total", **labels) - finished
    assert finished == 2
    assert aborted <= 1, "the job that a result hit withdrew may have reached the worker"
    assert 30 <= worker.value("vllm:generation_tokens_total", **labels) <= 30 + 19 * aborted
    assert worker.value("vllm:time_to_first_token_seconds_count", **labels) >= 2
    assert worker.value("vllm:inter_token_latency_seconds_count", **labels) >= 28
    assert worker.value("vllm:kv_cache_usage_perc") == 0
    assert worker.value("weft_worker_kv_blocks", state="active") == 0
    assert worker.value("weft_worker_step_seconds_count") == worker.value("weft_worker_steps_total")
    assert worker.value("process_resident_memory_bytes") > 1e6


def _scheduler_counted(scheduler: Scraped, name: str) -> None:
    placed = scheduler.value("weft_scheduler_assigned_total")
    assert 2 <= placed <= 3
    assert scheduler.value("weft_scheduler_queue_seconds_count") == placed
    assert scheduler.value("weft_scheduler_workers", model=name) == 1
    assert scheduler.value("weft_scheduler_waiting_jobs", model=name) == 0


async def test_a_port_that_is_taken_is_reported_in_one_line(tmp_path: Path, model: Path) -> None:
    async with Mesh(tmp_path, model, workers=0, gateways=0) as mesh:
        taken = mesh.scheduler
        for_metrics = Mesh(tmp_path / "metrics", model, workers=0, gateways=0).scheduler
        for_metrics.env["WEFT_METRICS_PORT"] = str(taken.port)
        assert "WEFT_METRICS_PORT" in await _refusal(for_metrics, 78)
        for_calls = Mesh(tmp_path / "calls", model, workers=0, gateways=0).scheduler
        for_calls.port = taken.port
        assert f"weft: cannot listen at {taken.address}" in await _refusal(for_calls, 1)


async def _refusal(process: Process, code: int) -> str:
    """The output of a process that ends with this exit code right after its start."""
    process.start()
    assert process.popen is not None
    assert await asyncio.to_thread(process.popen.wait, 30) == code
    output = process.tail()
    assert "Traceback" not in output
    return output
