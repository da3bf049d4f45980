"""The supervisor starts, watches, restarts and stops real processes."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.launch import plan
from weft.launch.supervisor import GaveUp, Policy, ProcessSpec, State, Supervisor

DUMMY = Path(__file__).with_name("dummy.py")
QUICK = Policy(first_backoff_s=0.02, longest_backoff_s=0.1, poll_s=0.02, grace_s=0.5)


class Notices:
    """Records the notices of the supervisor."""

    def __init__(self) -> None:
        self.all: list[tuple[str, State, str]] = []

    def notice(self, name: str, state: State, detail: str) -> None:
        self.all.append((name, state, detail))

    def of(self, state: State) -> list[str]:
        return [name for name, changed, _ in self.all if changed is state]


@pytest.fixture
def notices() -> Notices:
    return Notices()


def spec(how: str, folder: Path, name: str = "") -> ProcessSpec:
    """The dummy process with behaviour `how`; ready when it has written its pid and runs."""
    path = folder / (name or how)

    async def ready() -> bool:
        return path.exists() and alive(int(path.read_text() or 0))

    return ProcessSpec(name=name or how, command=[sys.executable, "-S", str(DUMMY), how, str(path)], ready=ready)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 (other processes set no events)
            await asyncio.sleep(0.01)


async def test_all_start_and_stop_in_reverse_order(tmp_path: Path, notices: Notices) -> None:
    specs = [spec("polite", tmp_path, name) for name in ("first", "second", "third")]
    supervisor = Supervisor(specs, tmp_path / "logs", notices.notice, QUICK)
    async with supervisor.running():
        pids = [process.pid for process in supervisor.processes.values()]
        assert all(pid and alive(pid) for pid in pids)
        # Each has its own process group, so a Ctrl-C at the terminal does not reach it.
        assert [os.getpgid(pid) for pid in pids if pid] == pids
    assert notices.of(State.STOPPED) == ["third", "second", "first"]
    assert not any(alive(pid) for pid in pids if pid)


async def test_a_crashed_process_is_restarted(tmp_path: Path, notices: Notices) -> None:
    supervisor = Supervisor([spec("polite", tmp_path)], tmp_path, notices.notice, QUICK)
    process = supervisor.processes["polite"]
    async with supervisor.running():
        for crashes in range(1, 5):
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
            await supervisor.during(until(lambda n=crashes: process.restarts == n and process.state is State.READY))  # type: ignore[misc]
    assert notices.of(State.CRASHED) == ["polite"] * 4
    details = [detail for _, state, detail in notices.all if state is State.CRASHED]
    assert details[0] == "was killed by SIGKILL; restart in 0.0 s"


@pytest.mark.parametrize(("how", "starts", "code"), [("broken", 3, 1), ("hopeless", 1, 78)])
async def test_a_process_that_never_starts_is_given_up_with_its_reason(
    tmp_path: Path, notices: Notices, how: str, starts: int, code: int
) -> None:
    supervisor = Supervisor([spec("polite", tmp_path), spec(how, tmp_path)], tmp_path, notices.notice, QUICK)
    with pytest.raises(GaveUp) as caught:
        async with supervisor.running():
            pytest.fail("the process cannot run")
    log = tmp_path / f"{how}.log"
    assert str(caught.value) == f"{how} ended with exit code {code}: the checkpoint is broken shard=2 (log: {log})"
    assert notices.of(State.STARTING).count(how) == starts
    assert notices.of(State.STOPPED) == ["polite"]


async def test_a_repaired_process_is_started_again(tmp_path: Path, notices: Notices) -> None:
    good, bad = spec("polite", tmp_path), spec("broken", tmp_path)
    switch = tmp_path / "switch.sh"
    switch.write_text(f"[ -e {tmp_path}/repaired ] && exec {' '.join(good.command)} || exec {' '.join(bad.command)}")

    def repair() -> str:
        (tmp_path / "repaired").touch()
        return "its data is set aside"

    spec_ = ProcessSpec(name="redis", command=["sh", str(switch)], ready=good.ready, repair=repair)
    async with Supervisor([spec_], tmp_path, notices.notice, QUICK).running():
        assert ("redis", State.CRASHED, "its data is set aside") in notices.all


async def test_a_missing_command_is_reported(tmp_path: Path) -> None:
    missing = ProcessSpec(
        name="redis", command=[str(tmp_path / "no-such-server")], ready=spec("polite", tmp_path).ready
    )
    with pytest.raises(GaveUp, match="no-such-server: No such file or directory"):
        async with Supervisor([missing], tmp_path, policy=QUICK).running():
            pytest.fail("the process cannot run")


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    supervisor = Supervisor([spec("stubborn", tmp_path)], tmp_path, policy=QUICK)
    async with supervisor.running():
        pid = supervisor.processes["stubborn"].pid
        began = time.monotonic()
    assert pid
    assert not alive(pid)
    assert 0.5 <= time.monotonic() - began < 5


async def test_killing_does_not_wait(tmp_path: Path) -> None:
    supervisor = Supervisor([spec("stubborn", tmp_path)], tmp_path, policy=Policy(grace_s=60, poll_s=0.02))
    async with supervisor.running():
        began = time.monotonic()
        asyncio.get_running_loop().call_later(0.1, supervisor.kill)
    assert time.monotonic() - began < 5


async def test_children_of_a_process_end_with_it(tmp_path: Path) -> None:
    child = tmp_path / "parent.child"
    async with Supervisor([spec("parent", tmp_path)], tmp_path, policy=QUICK).running():
        await until(child.exists)
        await until(lambda: bool(child.read_text()))
        assert alive(int(child.read_text()))
    await until(lambda: not alive(int(child.read_text())))


async def test_stopping_before_anything_is_ready(tmp_path: Path) -> None:
    silent = ProcessSpec(
        name="silent", command=spec("polite", tmp_path).command, ready=lambda: asyncio.sleep(0, result=False)
    )
    supervisor = Supervisor([silent], tmp_path, policy=QUICK)

    async def run() -> None:
        async with supervisor.running():
            pytest.fail("the process is never ready")

    starting = asyncio.create_task(run())
    await until(lambda: supervisor.processes["silent"].pid is not None)
    pid = supervisor.processes["silent"].pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert pid
    assert not alive(pid)


async def test_a_killed_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from weft.launch.supervisor import Supervisor
from tests.weft.test_supervisor import spec

async def main():
    folder = Path({str(tmp_path)!r})
    async with Supervisor([spec("polite", folder), spec("stubborn", folder)], folder).running():
        (folder / "up").touch()
        await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=DUMMY.parents[2])
    try:
        await until((tmp_path / "up").exists, within_s=20)
        pids = [int((tmp_path / how).read_text()) for how in ("polite", "stubborn")]
        assert all(alive(pid) for pid in pids)
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_ready_means_that_the_health_service_reports_serving(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
    gate = tmp_path / "gate"
    command = [sys.executable, str(DUMMY), "grpc", str(gate)]
    ready = plan.serving(address, "weft.v1.Cache")
    cache = ProcessSpec(name="cache", command=command, ready=ready, environment={"WEFT_LISTEN": address})
    supervisor = Supervisor([cache], tmp_path, policy=QUICK)
    asyncio.get_running_loop().call_later(0.6, gate.touch)
    began = time.monotonic()
    async with supervisor.running():
        assert time.monotonic() - began >= 0.6
        assert await ready()
        assert not await plan.serving(address, "weft.v1.Scheduler")()
    assert not await ready()


def test_a_long_log_is_rotated_and_only_this_run_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "polite.log"
    log.write_bytes(b"an older run\n" * (2 << 20))
    process = Supervisor([spec("polite", tmp_path)], tmp_path).processes["polite"]
    process._open_log().close()
    assert process.last_line() == ""
    assert (tmp_path / "polite.log.old").exists()
