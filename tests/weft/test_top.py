"""What `weft top` prints: the whole mesh in terminals of every usual width, without a cell cut off."""

import io

import pytest
from rich.console import Console

from protos import inference_pb2 as api
from weft.cli.top import render

State = api.WorkerState
NAME = "weft-story-11m-ec27a7c4"


BUSY = {"jobs": 16, "credits": 64, "running": 15, "waiting": 1, "decode_s": 0.0156, "steps": 300, "preemptions": 7}
BLOCKS = {"free_blocks": 8000, "cached_blocks": 100, "active_blocks": 92, "prefill_rate": 11690.0}


def worker(**fields: object) -> State:
    """A busy worker."""
    named = {"worker_id": NAME, "model": "weft-story-11m", "phase": State.PHASE_READY}
    return State(**(named | BUSY | BLOCKS | fields))  # type: ignore[arg-type]


def snapshot(*workers: State, at_s: float = 10.0, **fields: object) -> api.MeshSnapshot:
    """A mesh with one model."""
    model = api.ModelState(
        name="weft-story-11m",
        waiting=1234,
        waiting_tokens=123456,
        requests_per_s=1234.5,
        tokens_per_s=23456,
        cached_share=0.63,
        first_token=api.Percentiles(count=9, p50_s=0.286, p99_s=1.68),
        inter_token=api.Percentiles(count=99, p50_s=0.06, p99_s=0.34),
    )
    gateway = api.GatewayState(gateway_id="gateway-3d775501ed8282a7", running=16, tokens_per_s=23456)
    values: dict[str, object] = {"scheduler_connected": True, "models": [model], "gateways": [gateway]}
    return api.MeshSnapshot(at_s=at_s, workers=workers, **(values | fields))  # type: ignore[arg-type]


def printed(now: api.MeshSnapshot, width: int = 160, before: api.MeshSnapshot | None = None) -> str:
    """The text in a terminal of this width."""
    out = Console(file=io.StringIO(), width=width)
    out.print(render(now, width, before))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [80, 90, 100, 110, 120, 130, 160, 220])
def test_nothing_is_cut_off(width: int) -> None:
    text = printed(snapshot(worker()), width)
    assert "…" not in text
    for cell in (NAME, "286 / 1680", "60 / 340", "1234", "23456", "16/64", "15.60", "gateway-3d775501ed8282a7"):
        assert cell in text, cell


def test_wide_terminals_show_all() -> None:
    text = printed(snapshot(worker()))
    assert all(cell in text for cell in ("123456", "preempted", "11690", "failed/s"))


def test_steps_per_second_are_those_since_the_snapshot_before() -> None:
    before = snapshot(worker(steps=280), at_s=8.0)
    assert "steps/s" in printed(snapshot(worker()), before=before)
    (line,) = [line for line in printed(snapshot(worker()), before=before).splitlines() if NAME in line]
    assert " 10 " in line


def test_roles_of_workers_are_named() -> None:
    roles = (api.WORKER_ROLE_PREFILL, api.WORKER_ROLE_DECODE, api.WORKER_ROLE_UNSPECIFIED)
    text = printed(snapshot(*(worker(worker_id=f"fox-{role}", role=role) for role in roles)))
    for role, word in zip(roles, ("prefill", "decode", "both"), strict=True):
        (line,) = [line for line in text.splitlines() if f"fox-{role}" in line]
        assert word in line


def test_states_of_workers_and_services_are_named() -> None:
    loading = State(worker_id="owl-1", model="owl", phase=State.PHASE_LOADING, step="weights", percent=40)
    phases = (State.PHASE_SILENT, State.PHASE_DETACHED, State.PHASE_DRAINING)
    workers = [worker(worker_id=f"fox-{phase}", phase=phase) for phase in phases]
    text = printed(snapshot(*workers, loading, scheduler_connected=False, cache=api.CACHE_STATE_DISCONNECTED))
    for words in ("silent", "detached", "draining", "weights 40%", "1 worker loading", "cache not connected"):
        assert words in text
    assert "the scheduler does not answer" in text
