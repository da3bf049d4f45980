"""Where a process hangs is in its log, without a client's text: a blocked event loop, an engine that is stuck."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services import hang_watch
from services.hang_watch import LoopCheck, StepCheck, stacks, watching
from tests.faults.cluster import PROGRESS_S, Cluster
from tests.faults.history import History
from tests.mesh.harness import Process

pytestmark = pytest.mark.asyncio(loop_scope="function")

_HOLDS_THE_LOCK = """
import ctypes, time
from services import hang_watch
hang_watch.GIL_S, hang_watch._ARMED_S = 0.4, 0.2
def stay():
    with hang_watch.watching(interval_s=0.1):
        time.sleep(0.5)
        ctypes.PyDLL(None).usleep(5_000_000)
stay()
"""
STUCK = 5999
"""The token id at which the failpoint stops the engine."""


def block_until(logged: list[Any], count: int) -> None:
    """Keeps the event loop's thread until so much is logged, and for a few checks more."""
    end = time.monotonic() + PROGRESS_S
    while len(logged) < count and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)


async def test_the_stacks_are_on_stderr_once_if_c_code_keeps_pythons_lock() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _HOLDS_THE_LOCK, stderr=asyncio.subprocess.PIPE)
    _, written = await child.communicate()
    assert child.returncode == 0
    assert written.count(b"Timeout (") == 1
    assert b" in stay" in written


async def test_a_blocked_event_loop_is_logged_once_with_all_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "LOOP_S", 0.1)
    secret = "the text of a client"
    loop_check, quiet = LoopCheck(asyncio.get_running_loop()), 0

    def check(now: float) -> str | None:
        nonlocal quiet
        why = loop_check(now)
        quiet = 0 if why else quiet + 1
        return why

    with capture_logs() as logs, watching(check, interval_s=0.02):
        block_until(logs, 1)
        [entry] = logs
        async with asyncio.timeout(PROGRESS_S):
            while quiet < 3:  # noqa: ASYNC110 (a thread counts)
                await asyncio.sleep(0.01)
        block_until(logs, 2)  # The next hang is another one.
    assert len(logs) == 2
    assert "the event loop has run nothing for" in entry["why"]
    [main] = [lines for name, lines in entry["threads"].items() if name.startswith("MainThread")]
    assert any(line.startswith("faults/test_hangs.py:") and line.endswith(" block_until") for line in main)
    assert secret not in json.dumps(logs)


async def test_a_loop_that_runs_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    check = LoopCheck(asyncio.get_running_loop())
    for second in range(5):
        assert check(float(10 * second)) is None
        await asyncio.sleep(0)


async def test_steps_that_stop_are_found_only_while_something_is_busy() -> None:
    state = [True, 0, 2.0]
    check = StepCheck("engine", lambda: (bool(state[0]), int(state[1]), state[2]))
    assert [check(now) for now in (0.0, 1.0, 2.0)] == [None] * 3
    assert check(2.1) == "the engine has made no step for 2.1 s"
    state[1] = 1
    assert check(3.0) is None
    state[2] = 30.0  # A long step that was announced.
    assert check(20.0) is None
    state[:] = [False, 1, 2.0]
    assert check(100.0) is None
    state[0] = True
    assert check(101.0) is None


async def test_stacks_name_code_and_no_values() -> None:
    text = "the text of a client"
    [own] = [lines for lines in _stacks_from_a_thread().values() if any("test_stacks_name" in line for line in lines)]
    assert text not in "".join(own)


def _stacks_from_a_thread() -> dict[str, list[str]]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(stacks).result()


async def test_a_stuck_engine_is_logged_by_its_worker(tmp_path: Path) -> None:
    stuck = {"WEFT_FAILPOINTS": f"engine.step=hang:{STUCK}"}
    async with Cluster(tmp_path, workers=1, worker_env=stuck) as cluster:
        prompt = [*range(1000, 1020), STUCK]
        asking = cluster.send(History(), cluster.plain(), 1, 8, prompt=prompt, deadline_s=PROGRESS_S)
        [hang] = await hangs(cluster.workers[0])
        asking.cancel()
        assert "the engine has made no step for" in hang["why"]
        [engine] = [lines for name, lines in hang["threads"].items() if name.startswith("engine ")]
        assert engine[-1].endswith(" hit")
        assert "services/failpoints.py" in engine[-1]
        assert "1010, 1011" not in json.dumps(hang)
        assert cluster.workers[0].kill(signal.SIGKILL) == -9


async def hangs(process: Process) -> list[dict[str, Any]]:
    """The hangs that a process has logged, once there is one."""
    async with asyncio.timeout(PROGRESS_S):
        while True:
            lines = process.log.read_text().splitlines()
            found = [json.loads(line) for line in lines if '"event": "hang"' in line]
            if found:
                return found
            await asyncio.sleep(0.1)
