"""Metrics, the export of spans, and spans that are not recorded, each without a mesh."""

import asyncio
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import structlog

from services import metrics, telemetry
from services.settings import CommonSettings
from services.span_export import SpanBudget, SpanExporter
from services.worker.build.choose import build_engine
from services.worker.job import Cost, Ended, EndReason, Job, SamplingParams
from services.worker.options import EngineOptions
from services.worker.service.metrics import WorkerMetrics


def rendered(all_: metrics.Metrics) -> list[str]:
    """The lines of the rendered metrics."""
    return all_.render().decode().splitlines()


def test_a_histogram_counts_equal_values_at_once() -> None:
    all_ = metrics.Metrics()
    seconds = all_.histogram("vllm:x_seconds", "Time.", (0.1, 1.0), "model")
    seconds.observe(0.1, "m", times=3)
    seconds.observe(5.0, "m")
    lines = rendered(all_)
    assert "# TYPE vllm:x_seconds histogram" in lines
    assert 'vllm:x_seconds_bucket{le="0.1",model="m"} 3.0' in lines
    assert 'vllm:x_seconds_bucket{le="1.0",model="m"} 3.0' in lines
    assert 'vllm:x_seconds_bucket{le="+Inf",model="m"} 4.0' in lines
    assert 'vllm:x_seconds_count{model="m"} 4.0' in lines
    assert any(line.startswith('vllm:x_seconds_sum{model="m"} 5.3') for line in lines)


def test_labels_are_bounded() -> None:
    all_ = metrics.Metrics()
    counter, seconds = all_.counter("a", "A.", "model"), all_.histogram("b", "B.", (1.0,), "model")
    for number in range(2 * metrics.MOST_SERIES):
        counter.add(1, f"model-{number}")
        seconds.observe(1, f"model-{number}")
    lines = rendered(all_)
    assert sum(line.startswith("a_total{") for line in lines) == metrics.MOST_SERIES + 1
    assert f'a_total{{model="other"}} {float(metrics.MOST_SERIES)}' in lines
    assert f'b_count{{model="other"}} {float(metrics.MOST_SERIES)}' in lines


def test_callback_metrics_are_read_at_each_scrape() -> None:
    all_, kept = metrics.Metrics(), {"x": 1}
    all_.gauge("a", "A.", lambda: metrics.by_label(kept.items()), "name")
    all_.total("b", "B.", lambda: len(kept))
    kept["y"] = 2
    assert {'a{name="x"} 1.0', 'a{name="y"} 2.0', "b_total 2.0"} <= {*rendered(all_)}


async def test_only_metrics_are_served() -> None:
    server = metrics.MetricsServer(metrics.Metrics().rendered, "127.0.0.1", 0)

    def get(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert await asyncio.to_thread(get, "/metrics") == 200
    assert await asyncio.to_thread(get, "/etc/passwd") == 404
    await server.close()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(get, "/metrics")


def test_first_tokens_that_are_delivered_early_are_counted_with_their_step() -> None:
    worker = WorkerMetrics()
    worker.stepped(0.01, tokens=3, first_tokens=3)
    worker.stepped(None, tokens=2, first_tokens=2)
    worker.stepped(0.01, tokens=3, first_tokens=0)
    lines = rendered(worker.all)
    for line in (
        'weft_worker_step_seconds_count{model=""} 2.0',
        'weft_worker_step_tokens_sum{model=""} 8.0',
        'vllm:inter_token_latency_seconds_count{model_name=""} 3.0',
        'vllm:generation_tokens_total{model_name=""} 8.0',
    ):
        assert line in lines, lines


def test_a_worker_counts_its_jobs() -> None:
    worker = WorkerMetrics()
    cost = Cost(queue_s=0.5, prefill_s=1.0, decode_s=2.0, prefill_tokens=6, cached_tokens=4, steps=3, prefill_steps=1)
    worker.stepped(0.01, tokens=2, first_tokens=1)
    worker.ended(Ended(1, EndReason.STOP, 3, cost), prompt_tokens=10, cacheable=True)
    worker.ended(Ended(2, EndReason.DEADLINE, 0, Cost(queue_s=1.0)), prompt_tokens=5, cacheable=False)
    lines = rendered(worker.all)
    for line in (
        'vllm:request_success_total{finished_reason="stop",model_name=""} 1.0',
        'vllm:request_success_total{finished_reason="abort",model_name=""} 1.0',
        'vllm:prefix_cache_queries_total{model_name=""} 10.0',
        'vllm:prefix_cache_hits_total{model_name=""} 4.0',
        'vllm:prompt_tokens_total{model_name=""} 15.0',
        'vllm:inter_token_latency_seconds_count{model_name=""} 1.0',
        'vllm:time_to_first_token_seconds_sum{model_name=""} 1.5',
        'vllm:request_queue_time_seconds_count{model_name=""} 2.0',
    ):
        assert line in lines


def test_a_preempted_job_reports_the_times_of_its_preemptions(model: Path) -> None:
    options = EngineOptions(engine="paced", kv_blocks=8, max_batch_size=4, step_tokens=64, paced_step_ms=0)
    engine = build_engine(model, options, lambda *_: None).engine
    began = time.monotonic()
    for key in range(3):
        engine.submit(Job(key, [5] * 16, 16, SamplingParams(max_tokens=60, ignore_eos=True)))
    costs: list[Cost] = []
    while engine.has_work():
        costs += [ended.cost for ended in engine.step().ended]
    assert sum(cost.preemptions for cost in costs) > 0
    for cost in costs:
        assert len(cost.preempted_s) == cost.preemptions
        assert list(cost.preempted_s) == sorted(cost.preempted_s)
        assert all(0 < paused_s < time.monotonic() - began for paused_s in cost.preempted_s)
        assert cost.first_token


@pytest.mark.parametrize("caller", ["", "nonsense", f"00-{'0' * 32}-{'1' * 16}-01", f"01-{'1' * 32}-{'1' * 16}-01"])
def test_without_tracing_a_request_has_a_trace_id(caller: str) -> None:
    span = telemetry.start("chat", caller)
    version, trace_id, span_id, flags = span.traceparent.split("-")
    assert (version, flags, span.recorded) == ("00", "00", False)
    assert int(trace_id, 16)
    assert int(span_id, 16)
    with span:
        span.set({"a": 1})
        span.event("b", 0.0)
        span.fail("C")
        span.rename("d")
    telemetry.record("e", span, 0.0, 1.0)


def test_without_tracing_the_callers_context_is_passed_on() -> None:
    caller = f"00-{'a' * 32}-{'b' * 16}-01"
    assert telemetry.start("chat", caller).traceparent == caller


@pytest.mark.parametrize("queue", ["many", "7"], ids=["no number", "less than a batch"])
def test_an_invalid_otel_variable_only_turns_tracing_off(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", queue)
    logging = structlog.get_config()
    try:
        telemetry.setup("test", CommonSettings())
        assert not telemetry.start("chat", "").recorded
    finally:
        structlog.configure(**logging)


def test_spans_beyond_the_budget_are_dropped_and_counted() -> None:
    budget = SpanBudget(2)
    assert [budget.admit() for _ in range(3)] == [True, True, False]
    budget.release(2, exported=True)
    assert budget.admit()
    assert budget.outcomes() == {"exported": 2, "dropped": 1}


def test_the_exporter_pauses_after_failures() -> None:
    budget = SpanBudget(10)
    tried = []

    def export(batch: list[int]) -> bool:
        tried.append(time.monotonic())
        if len(tried) == 1:
            raise OSError("broken")
        return len(tried) > 2

    exporter = SpanExporter(export, budget)
    worker = threading.Thread(target=lambda: [exporter.export([1]) for _ in range(3)])
    worker.start()
    worker.join(1.5)
    assert len(tried) == 2, "a pause of one second, then of two"
    exporter.end_pauses()
    worker.join(1)
    assert not worker.is_alive(), "no pause at the end of the process"
    assert budget.outcomes() == {"exported": 1, "dropped": 2}
    exporter.stop()
    assert not exporter.export([1])
    assert len(tried) == 3
