"""How what an engine says reaches the event loop, with an engine that only speaks."""

import asyncio
import threading
from typing import Any

import pytest

from services.worker.engine.base import EngineEvents
from services.worker.job import StepOutput, TokenOut
from services.worker.service import engine_thread


class Speaking:
    """An engine of one step, which notes what had been told when it could go on."""

    def __init__(self, output: StepOutput, told: list[str]) -> None:
        self.output, self.told = output, told
        self.told_before: list[str] = []
        self.done = threading.Event()

    def run(self, events: EngineEvents, stop: threading.Event) -> None:
        events.stepped(self.output)
        self.told_before = list(self.told)
        self.done.set()

    def wake(self) -> None:
        pass


class Listening:
    """Jobs and their links: a link writes when the event loop has come to it."""

    def __init__(self, told: list[str], loop: Any) -> None:
        self.told, self.loop = told, loop

    def deliver(self, output: StepOutput, step_s: float | None) -> None:
        self.told.append("delivered")
        self.loop.call_soon(self.told.append, "written")

    def changed(self, urgent: bool = True) -> None:
        self.told.append("reported")


@pytest.mark.parametrize(("position", "waits"), [(0, True), (3, False)])
async def test_first_tokens_are_written_before_the_engine_goes_on(
    position: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_FIRST_WAIT_S", 10.0)
    loop: Any = asyncio.get_running_loop()
    told: list[str] = []
    engine = Speaking(StepOutput([TokenOut(1, position, 5)], []), told)
    listening: Any = Listening(told, loop)
    thread: Any = engine
    with engine_thread.EngineThread(thread, listening, listening):
        if not waits:
            assert engine.done.wait(5), "it waited for an event loop that is busy"
        else:
            assert await asyncio.to_thread(engine.done.wait, 5)
    assert engine.told_before == (["delivered", "reported", "written"] if waits else [])
