"""A live view of a mesh in the terminal: its models, workers and gateways. Shows what a gateway reports, no more."""

import asyncio
from contextlib import aclosing

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from protos import inference_pb2 as api
from report.console import counted
from weft.cli.snapshot import first_snapshot
from weft.cli.terminal import Row, fitted
from weft.client.api import Client
from weft.client.errors import WeftError

RETRY_S = 1.0
_BAR = 12
# The columns of each table, and their levels.
_MODELS = {
    "model": 0,
    "workers": 1,
    "queued": 0,
    "queued tokens": 3,
    "following": 3,
    "req/s": 0,
    "failed/s": 2,
    "tokens/s": 0,
    "cached": 2,
    "TTFT p50/p99 ms": 0,
    "ITL p50/p99 ms": 0,
}
_WORKERS = {
    "worker": 0,
    "role": 1,
    "state": 0,
    "KV in use": 0,
    "jobs": 0,
    "running": 2,
    "waiting": 2,
    "to prefill": 3,
    "step ms": 0,
    "steps/s": 1,
    "prefill tok/s": 3,
    "preempted": 3,
}
_GATEWAYS = {"gateway": 0, "running": 0, "req/s": 0, "tokens/s": 0}
_NUMBERS = {*_MODELS, *_WORKERS, *_GATEWAYS} - {"model", "worker", "gateway", "role", "state", "KV in use"}
_PHASES = {
    api.WorkerState.PHASE_READY: "ready",
    api.WorkerState.PHASE_DRAINING: "draining",
    api.WorkerState.PHASE_SILENT: "silent",
    api.WorkerState.PHASE_DETACHED: "detached",
}
_ROLES = {api.WORKER_ROLE_PREFILL: "prefill", api.WORKER_ROLE_DECODE: "decode"}
_CACHES = {api.CACHE_STATE_NONE: "no cache", api.CACHE_STATE_DISCONNECTED: "cache not connected"}


async def show(address: str, api_key: str, out: Console, *, once: bool) -> None:
    """Follows the mesh until it is cancelled, or prints one snapshot: if asked to, and to what is no terminal.

    Raises WeftError if there is no mesh, and HeaderError if the key cannot be sent.
    """
    async with Client(address, api_key=api_key) as client:
        if once or not out.is_terminal:
            out.print(render(await first_snapshot(client, deadline_s=10), out.width))
            return
        await _follow(client, out)


async def _follow(client: Client, out: Console) -> None:
    last: api.MeshSnapshot | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            problem = "the gateway is stopping"
            try:
                async with aclosing(client.watch_mesh()) as snapshots:
                    async for now in snapshots:
                        live.update(render(now, out.width, last), refresh=True)
                        last = now
            except WeftError as error:
                if last is None:
                    raise
                problem = str(error)
            if last is not None:
                live.update(Group(render(last, out.width), "", f"{problem}; trying again"), refresh=True)
            await asyncio.sleep(RETRY_S)


def render(now: api.MeshSnapshot, width: int, before: api.MeshSnapshot | None = None) -> Group:
    """The snapshot as tables for a terminal of this width, with the steps per second since an earlier snapshot."""
    loading = sum(worker.phase == api.WorkerState.PHASE_LOADING for worker in now.workers)
    facts = [counted(len(now.workers) - loading, "worker"), counted(len(now.gateways), "gateway")]
    facts += [f"{counted(loading, 'worker')} loading"] if loading else []
    facts += [f"{counted(sum(model.waiting for model in now.models), 'job')} queued"]
    facts += [_CACHES[now.cache]] if now.cache in _CACHES else []
    facts += [] if now.scheduler_connected else ["the scheduler does not answer: what follows may be old"]
    tables = (_models(now, width), _workers(now, before, width), _gateways(now, width))
    return Group(", ".join(facts), "", *tables)


def _models(now: api.MeshSnapshot, width: int) -> Table:
    rows = []
    for model in now.models:
        serving = sum(each.model == model.name and each.phase != each.PHASE_LOADING for each in now.workers)
        cells = [
            model.name,
            *map(str, (serving, model.waiting, model.waiting_tokens, model.following)),
            f"{model.requests_per_s:.1f}",
            f"{model.failed_per_s:.1f}",
            f"{model.tokens_per_s:.0f}",
            f"{model.cached_share:.0%}",
            _milliseconds(model.first_token),
            _milliseconds(model.inter_token),
        ]
        rows.append(Row(cells))
    return fitted(_MODELS, rows, width, _NUMBERS)


def _milliseconds(latency: api.Percentiles) -> str:
    """Median and 99th percentile; empty without durations."""
    return " / ".join(_short(value * 1e3) for value in (latency.p50_s, latency.p99_s)) if latency.count else ""


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _workers(now: api.MeshSnapshot, before: api.MeshSnapshot | None, width: int) -> Table:
    earlier = {worker.worker_id: worker.steps for worker in before.workers} if before is not None else {}
    rows = []
    for worker in now.workers:
        if worker.phase == api.WorkerState.PHASE_LOADING:
            rest = [""] * (len(_WORKERS) - 3)
            rows.append(Row([worker.worker_id, "", f"{worker.step} {worker.percent}%", *rest], "dim"))
            continue
        rate = ""
        if before is not None and worker.worker_id in earlier and now.at_s > before.at_s:
            rate = f"{(worker.steps - earlier[worker.worker_id]) / (now.at_s - before.at_s):.0f}"
        cells = [
            worker.worker_id,
            _ROLES.get(worker.role, "both"),
            _PHASES.get(worker.phase, "unknown"),
            _kv(worker),
            f"{worker.jobs}/{worker.credits}",
            *map(str, (worker.running, worker.waiting, worker.prefill_backlog)),
            f"{worker.decode_s * 1e3:.2f}" if worker.decode_s else "",
            rate,
            f"{worker.prefill_rate:.0f}" if worker.prefill_rate else "",
            str(worker.preemptions),
        ]
        rows.append(Row(cells, "" if worker.phase == api.WorkerState.PHASE_READY else "yellow"))
    return fitted(_WORKERS, rows, width, _NUMBERS)


def _gateways(now: api.MeshSnapshot, width: int) -> Table:
    rows = [
        Row([each.gateway_id, str(each.running), f"{each.requests_per_s:.1f}", f"{each.tokens_per_s:.0f}"])
        for each in now.gateways
    ]
    return fitted(_GATEWAYS, rows, width, _NUMBERS)


def _kv(worker: api.WorkerState) -> str:
    """A bar of the KV blocks in use and, lighter, of those that hold a cached prefix; then the share in use."""
    total = worker.free_blocks + worker.cached_blocks + worker.active_blocks
    if not total:
        return ""
    active = -(-worker.active_blocks * _BAR // total)
    cached = min(-(-worker.cached_blocks * _BAR // total), _BAR - active)
    bar = "█" * active + "▒" * cached + "░" * (_BAR - active - cached)
    return f"{bar} {worker.active_blocks / total:4.0%}"
