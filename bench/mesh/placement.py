"""Replays a request trace through the real scheduler core and compares placement rules by prefix hits and balance.

    python -m bench.mesh.placement TRACE.jsonl[.gz] --workers 4

The trace has one JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one id
per 512-token prompt block; equal ids are equal prefixes), as published with Mooncake (FAST '25). Workers are simulated:
each has a prefill rate, a decode time per token and an LRU prefix cache of a fixed number of blocks. `cost rule` is the
scheduler's own core, fed with their reports; `pooled cache` is one worker with the caches and speed of all.
"""

import argparse
import gzip
import heapq
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.hashing import KEY_BYTES
from services.scheduler.core.limits import Limits
from services.scheduler.core.messages import (
    Assigned,
    Card,
    Command,
    EndedJob,
    Submit,
    ToGateway,
    WorkerHello,
    WorkerReport,
)
from services.scheduler.core.scheduler import SchedulerCore

BLOCK_TOKENS = 512
REPORT_S = 1.0


class Request(NamedTuple):
    """One request of a trace, with its prompt as block keys."""

    at_s: float
    input_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class Mesh:
    """Number and rates of the simulated workers."""

    workers: int
    cache_blocks: int
    prefill_rate: float
    decode_s: float


@dataclass(slots=True)
class SimulatedWorker:
    """A worker with an LRU prefix cache that computes prompts one after another."""

    mesh: Mesh
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    busy_until: float = 0.0
    computed_blocks: int = 0
    first_token_s: list[float] = field(default_factory=list)

    def matched(self, keys: Sequence[bytes]) -> int:
        """Number of leading blocks of a prompt that are cached."""
        for depth, key in enumerate(keys):
            if key not in self.cache:
                return depth
        return len(keys)

    def run(self, request: Request) -> tuple[int, float, list[bytes], list[bytes]]:
        """Compute a request -> blocks hit, end time, keys stored and evicted."""
        hits = self.matched(request.keys)
        uncached = len(request.keys) - hits
        self.computed_blocks += uncached
        self.busy_until = max(self.busy_until, request.at_s) + uncached * BLOCK_TOKENS / self.mesh.prefill_rate
        self.first_token_s.append(self.busy_until - request.at_s)
        stored, evicted = self._store(request.keys)
        return hits, self.busy_until + request.output_tokens * self.mesh.decode_s, stored, evicted

    def _store(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        stored = [key for key in keys if key not in self.cache]
        for key in reversed(keys):  # The end of a prefix is evicted before its beginning.
            self.cache[key] = None
            self.cache.move_to_end(key)
        evicted = []
        while len(self.cache) > self.mesh.cache_blocks:
            evicted.append(self.cache.popitem(last=False)[0])
        return stored, evicted


class Outcome(NamedTuple):
    """Figures of one placement rule."""

    rule: str
    hit_rate: float
    imbalance: float
    mean_first_token_s: float


def read_trace(path: str, limit: int | None = None) -> Iterator[Request]:
    """The requests of a trace file, gzipped or not."""
    opened = gzip.open(path, "rt") if path.endswith(".gz") else open(path)  # noqa: SIM115
    with opened as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                return
            record = json.loads(line)
            keys = tuple(int(i).to_bytes(KEY_BYTES, "big") for i in record["hash_ids"])
            yield Request(record["timestamp"] / 1000, record["input_length"], record["output_length"], keys)


def outcome(rule: str, hits: int, trace: Sequence[Request], workers: Sequence[SimulatedWorker]) -> Outcome:
    """Hits per prompt block, most loaded worker over the mean (in blocks computed), mean time to first token."""
    loads = [worker.computed_blocks for worker in workers]
    waits = [wait for worker in workers for wait in worker.first_token_s]
    blocks = sum(len(request.keys) for request in trace)
    return Outcome(rule, hits / blocks, max(loads) * len(loads) / sum(loads), sum(waits) / len(waits))


# ---- rules to compare with ----


def round_robin(trace: Sequence[Request], mesh: Mesh) -> Outcome:
    """Round robin: each request goes to the next worker."""
    workers = [SimulatedWorker(mesh) for _ in range(mesh.workers)]
    hits = sum(workers[number % len(workers)].run(request)[0] for number, request in enumerate(trace))
    return outcome("round robin", hits, trace, workers)


def longest_prefix(trace: Sequence[Request], mesh: Mesh) -> Outcome:
    """Each request goes to the worker with the longest cached prefix."""
    workers = [SimulatedWorker(mesh) for _ in range(mesh.workers)]
    hits = 0
    for request in trace:
        hits += max(workers, key=lambda worker: worker.matched(request.keys)).run(request)[0]
    return outcome("longest prefix", hits, trace, workers)


def pooled(trace: Sequence[Request], mesh: Mesh) -> Outcome:
    """One worker with the caches and the rate of all."""
    whole = Mesh(1, mesh.cache_blocks * mesh.workers, mesh.prefill_rate * mesh.workers, mesh.decode_s)
    worker = SimulatedWorker(whole)
    hits = sum(worker.run(request)[0] for request in trace)
    return outcome("pooled cache", hits, trace, [worker])


# ---- the scheduler itself ----


class CoreRun:
    """The real scheduler core with simulated workers and an event-driven clock."""

    def __init__(self, mesh: Mesh, start_s: float) -> None:
        self.mesh = mesh
        self.core = SchedulerCore(epoch=1, now=start_s, limits=Limits(queue_limit=1 << 30, stall_s=1e9))
        self.workers = {f"w{n}": SimulatedWorker(mesh) for n in range(mesh.workers)}
        self.hits = 0
        self._events: list[tuple[float, int, str, WorkerReport]] = []
        self._serial = 0
        self._waiting: dict[str, Request] = {}
        self.core.on_gateway_attached("gateway", start_s)
        card = Card("model", block_size=BLOCK_TOKENS)
        for worker_id in self.workers:
            self.core.on_worker_attached(WorkerHello(worker_id, f"{worker_id}:0", card, credits=1 << 20), start_s)

    def replay(self, trace: Sequence[Request]) -> None:
        """Submit all requests at their times, with the workers' reports in between."""
        report_at = trace[0].at_s
        for number, request in enumerate(trace):
            while report_at <= request.at_s:
                self._catch_up(report_at)
                self._heartbeat(report_at)
                report_at += REPORT_S
            self._catch_up(request.at_s)
            self._submit(f"job-{number}", request)

    def _submit(self, job_id: str, request: Request) -> None:
        self._waiting[job_id] = request
        submit = Submit(
            job_id,
            model="model",
            prompt_tokens=request.input_tokens,
            max_tokens=request.output_tokens,
            block_keys=b"".join(request.keys),
        )
        self._perform(self.core.on_submit("gateway", submit, request.at_s), request.at_s)

    def _perform(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, ToGateway) and isinstance(command.message, Assigned):
                self._run(command.message, now)

    def _run(self, assigned: Assigned, now: float) -> None:
        request = self._waiting.pop(assigned.job_id)
        worker = self.workers[assigned.worker_id]
        hits, end_s, stored, evicted = worker.run(request._replace(at_s=now))
        self.hits += hits
        cached = WorkerReport(stored_keys=b"".join(stored), evicted_keys=b"".join(evicted))
        self._later(worker.busy_until, assigned.worker_id, cached)
        ended = WorkerReport(ended=(EndedJob(assigned.job_id, 1, request.output_tokens),))
        self._later(end_s, assigned.worker_id, ended)

    def _later(self, at_s: float, worker_id: str, report: WorkerReport) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at_s, self._serial, worker_id, report))

    def _catch_up(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            at_s, _, worker_id, report = heapq.heappop(self._events)
            self._report(worker_id, report, at_s)

    def _heartbeat(self, now: float) -> None:
        for worker_id in self.workers:
            self._report(worker_id, WorkerReport(), now)

    def _report(self, worker_id: str, report: WorkerReport, now: float) -> None:
        worker = self.workers[worker_id]
        backlog = int(max(0.0, worker.busy_until - now) * self.mesh.prefill_rate)
        full = WorkerReport(
            running=len(self.core.state.workers[worker_id].jobs),
            prefill_backlog=backlog,
            prefill_rate=self.mesh.prefill_rate,
            decode_s=self.mesh.decode_s,
            ended=report.ended,
            stored_keys=report.stored_keys,
            evicted_keys=report.evicted_keys,
        )
        self._perform(self.core.on_report(worker_id, full, now), now)


def cost_rule(trace: Sequence[Request], mesh: Mesh) -> Outcome:
    """Placement by the scheduler's own cost rule."""
    run = CoreRun(mesh, trace[0].at_s)
    run.replay(trace)
    return outcome("cost rule", run.hits, trace, list(run.workers.values()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares placement rules on a request trace.")
    parser.add_argument("trace", help="JSON lines, gzipped if the name ends in .gz")
    parser.add_argument("--workers", type=int, default=4, help="number of workers (default 4)")
    parser.add_argument("--cache-blocks", type=int, default=1700, help="blocks that each worker caches (default 1700)")
    parser.add_argument(
        "--prefill-rate", type=float, default=15_000, help="prompt tokens/s of a worker (default 15000)"
    )
    parser.add_argument("--decode-s", type=float, default=0.03, help="seconds per answer token (default 0.03)")
    parser.add_argument("--limit", type=int, default=None, help="only the first requests of the trace")
    arguments = parser.parse_args()
    mesh = Mesh(arguments.workers, arguments.cache_blocks, arguments.prefill_rate, arguments.decode_s)
    trace = list(read_trace(arguments.trace, arguments.limit))
    print(
        f"{len(trace)} requests, {mesh.workers} workers with {mesh.cache_blocks} blocks of {BLOCK_TOKENS} tokens each"
    )
    print(f"{'rule':<16}{'hits':>8}{'load max/mean':>16}{'mean TTFT s':>14}")
    for rule in (round_robin, longest_prefix, cost_rule, pooled):
        result = rule(trace, mesh)
        print(f"{result.rule:<16}{result.hit_rate:>8.1%}{result.imbalance:>16.2f}{result.mean_first_token_s:>14.2f}")


if __name__ == "__main__":
    main()
