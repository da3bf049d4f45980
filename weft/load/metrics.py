"""Computes figures from counts, under the names that other benchmarks use. Knows no process and no page."""

from typing import Any

from report import machine
from weft.load.distribution import Distribution
from weft.load.run import Run
from weft.load.tally import HOPS, LATENCIES, Tally

PERCENTILES = (25, 50, 75, 90, 95, 99)


def result(run: Run) -> dict[str, Any]:
    """All figures of a report, as values for JSON."""
    plan, model = run.plan, run.model
    settings = {name: value for name, value in plan.to_json().items() if name not in ("vocab_size", "context_length")}
    return {
        "settings": settings,
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "architecture": model.architecture,
            "context_length": model.context_length,
            "workers": model.workers,
        },
        "machine": machine.describe(),
        "clipped_requests": run.clipped,
        **figures(run.tally, bool(plan.goodput)),
        "errors": dict(run.tally.errors),
        "receipts": receipts(run.tally),
        "timeline": timeline(run.tally),
        "curves": {name: run.tally.latencies[name].steps() for name in LATENCIES},
    }


def figures(tally: Tally, goodput: bool = False) -> dict[str, float]:
    """Rates over the time from the start to the last end of a request, and latencies in ms, by name."""
    seconds = tally.last_ended or 1.0
    values: dict[str, float] = {
        "completed": tally.completed,
        "failed": tally.failed,
        "duration": tally.last_ended,
        "total_input_tokens": tally.input_tokens,
        "total_output_tokens": tally.output_tokens,
        "request_throughput": tally.completed / seconds,
        "output_throughput": tally.output_tokens / seconds,
        "total_token_throughput": (tally.input_tokens + tally.output_tokens) / seconds,
        "message_throughput": tally.messages / seconds,
    }
    if goodput:
        values["request_goodput"] = tally.good / seconds
    for name in LATENCIES:
        values.update(latency(f"{name}_ms", tally.latencies[name]))
    if tally.refusals.count:
        values.update(latency("refusal_ms", tally.refusals))
    if tally.lag.count:
        values["p99_send_lag_ms"] = tally.lag.percentile(99)
    return values


def latency(name: str, distribution: Distribution) -> dict[str, float]:
    """The figures of one latency: mean_..., median_..., p25_... to p99_... and max_..."""
    values = {f"mean_{name}": distribution.mean, f"median_{name}": distribution.percentile(50)}
    values.update({f"p{percent}_{name}": distribution.percentile(percent) for percent in PERCENTILES})
    return {**values, f"max_{name}": distribution.greatest}


def receipts(tally: Tally) -> dict[str, Any]:
    """Sums over receipts: tokens computed and cached, attempts, and the time of each stage."""
    prompt = tally.receipts["prompt_tokens"]
    return {
        **{name: int(count) for name, count in tally.receipts.items()},
        "cached_share": tally.receipts["cached_tokens"] / prompt if prompt else 0.0,
        "attempts": dict(tally.attempts),
        "hops": {hop: latency("ms", tally.hops[hop]) for hop in HOPS},
    }


def timeline(tally: Tally) -> list[dict[str, int]]:
    """For each second: requests started and ended, tokens received, requests running at its end."""
    lines, running = [], 0
    for second in range(max(tally.seconds, default=-1) + 1):
        started, ended, tokens, _ = tally.seconds.get(second, (0, 0, 0, 0))
        running += started - ended
        lines.append({"second": second, "started": started, "ended": ended, "tokens": tokens, "running": running})
    return lines
