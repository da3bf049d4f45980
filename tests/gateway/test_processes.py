"""The supervisor of a gateway's processes: stops and deaths in the middle of a replacement. The processes are fakes."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from services.gateway import processes
from services.gateway.member import Link
from services.gateway.processes import Supervisor
from services.gateway.settings import GatewaySettings
from tests.gateway.fakes import until

SOON_S = 5.0


class FakeProcess:
    """A member's process, as far as its supervisor sees it, with the member's end of the link."""

    def __init__(self, link: Link) -> None:
        self.returncode: int | None = None
        self._link = link
        self._ended = asyncio.Event()

    def listens(self) -> None:
        """Reports that it listens."""
        self._link.report_listening()

    def end(self, code: int = 0) -> None:
        """Ends with an exit code."""
        self.returncode = code
        self._ended.set()
        self._link.close()

    def terminate(self) -> None:
        """SIGTERM: it ends at once. Raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        self.end()

    async def wait(self) -> int | None:
        """-> the exit code, once it has ended."""
        await self._ended.wait()
        return self.returncode


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The processes that were started, in the order of their start."""
    every: list[FakeProcess] = []

    async def start(*_: Any, pass_fds: Sequence[int], **__: Any) -> FakeProcess:
        every.append(FakeProcess(await Link.open(socket.socket(fileno=os.dup(pass_fds[0])))))
        return every[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    return every


@contextlib.asynccontextmanager
async def supervised(started: list[FakeProcess]) -> AsyncIterator[Supervisor]:
    """A gateway of two processes that listen. At the end SIGTERM stops all processes and their supervisor."""
    supervisor = Supervisor(GatewaySettings(metrics_port=0, drain_s=0), 2, {"WEFT_LISTEN": "127.0.0.1:0"})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(started) == 1)
    started[0].listens()
    await until(lambda: len(started) == 2)
    started[1].listens()
    yield supervisor
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, SOON_S)
    assert all(process.returncode is not None for process in started)


async def replace(started: list[FakeProcess]) -> None:
    """SIGHUP: begins a replacement, and waits until its first successor starts."""
    before = len(started)
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: len(started) == before + 1)


async def test_a_stop_in_the_middle_of_a_replacement_ends_the_successor_too(started: list[FakeProcess]) -> None:
    async with supervised(started):
        await replace(started)
        assert started[2].returncode is None
    assert started[2].returncode == 0


async def test_a_member_that_dies_while_its_successor_starts_has_no_other_one(
    started: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_BACKOFF_S", 0.0)
    async with supervised(started):
        await replace(started)
        started[0].end(1)
        await asyncio.sleep(0.1)
        assert len(started) == 3
        started[2].listens()
        await until(lambda: len(started) == 4)  # The successor of the other one.
        started[3].listens()
        await until(lambda: started[1].returncode is not None)
        assert [process.returncode for process in started] == [1, 0, None, None]
        started[2].end(1)
        await until(lambda: len(started) == 5)  # The successor is kept.


async def test_a_successor_that_dies_ends_the_replacement_and_the_others_stay(
    started: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_BACKOFF_S", 0.0)
    async with supervised(started):
        await replace(started)
        started[2].end(1)
        await asyncio.sleep(0.1)
        assert [process.returncode for process in started] == [None, None, 1]
        started[0].end(1)
        await until(lambda: len(started) == 4)
        await replace(started)


async def test_a_member_that_is_refused_later_ends_no_other_one(
    started: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while the tenants file is invalid: the others serve on with the tenants that they have read."""
    monkeypatch.setattr(processes, "_FIRST_BACKOFF_S", 0.0)
    async with supervised(started):
        started[1].end(-signal.SIGKILL)
        await until(lambda: len(started) == 3)
        started[2].end(os.EX_CONFIG)
        await until(lambda: len(started) == 4)
        assert started[0].returncode is None
        started[3].listens()


async def test_a_gateway_of_which_no_member_is_left_ends_when_its_settings_are_refused(
    started: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_BACKOFF_S", 0.0)
    supervisor = Supervisor(GatewaySettings(metrics_port=0, drain_s=0), 2, {"WEFT_LISTEN": "127.0.0.1:0"})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(started) == 1)
    started[0].end(os.EX_CONFIG)
    assert await asyncio.wait_for(running, SOON_S) == os.EX_CONFIG
    assert len(started) == 1


async def test_a_member_that_cannot_be_started_now_is_started_later(
    started: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(processes, "_NO_PROCESS_S", 0.0)
    starts = asyncio.create_subprocess_exec
    failures = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")] * 3

    async def start(*arguments: Any, **options: Any) -> Any:
        if len(started) == 2 and failures:
            raise failures.pop()
        return await starts(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    async with supervised(started) as supervisor:
        os.kill(os.getpid(), signal.SIGHUP)  # A replacement fails, and the others stay.
        await until(lambda: len(failures) == 2)
        started[0].end(-signal.SIGKILL)
        await until(lambda: len(started) == 3)
        assert started[1].returncode is None
        assert supervisor._numbers == {0, 1}
