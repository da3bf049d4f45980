"""How an engine's output reaches the event loop: in order, and first tokens before the engine goes on."""

import asyncio
import threading
from typing import Any

import pytest

from services.worker.engine.base import EngineEvents
from services.worker.job import StepOutput, TokenOut
from services.worker.service import engine_thread


class OneStepEngine:
    """An engine of one step. It notes what had happened to the output when it could go on."""

    def __init__(self, output: StepOutput, happened: list[str]) -> None:
        self.output, self.happened = output, happened
        self.happened_before: list[str] = []
        self.done = threading.Event()

    def run(self, events: EngineEvents, stop: threading.Event) -> None:
        events.stepped(self.output)
        self.happened_before = list(self.happened)
        self.done.set()

    def wake(self) -> None:
        pass


class Receiver:
    """Jobs, their links and the scheduler's link: a link writes in a later turn of the event loop."""

    def __init__(self, happened: list[str], loop: Any) -> None:
        self.happened, self.loop = happened, loop

    def deliver(self, output: StepOutput, step_s: float | None) -> None:
        self.happened.append("delivered")
        self.received = [(token.key, token.position) for token in output.tokens]
        self.loop.call_soon(self.happened.append, "written")

    def changed(self, urgent: bool = True) -> None:
        self.happened.append("reported")


@pytest.mark.parametrize(("position", "waits"), [(0, True), (3, False)])
async def test_first_tokens_are_written_before_the_engine_goes_on(
    position: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_FIRST_WAIT_S", 10.0)
    loop: Any = asyncio.get_running_loop()
    happened: list[str] = []
    engine: Any = OneStepEngine(StepOutput([TokenOut(1, position, 5)], []), happened)
    receiver: Any = Receiver(happened, loop)
    with engine_thread.EngineThread(engine, receiver, receiver):
        if not waits:
            assert engine.done.wait(5), "the engine waited for a busy event loop"
        else:
            assert await asyncio.to_thread(engine.done.wait, 5)
    assert engine.happened_before[:2] == (["delivered", "written"] if waits else [])


async def test_first_tokens_are_delivered_before_the_others_of_their_step() -> None:
    others, firsts = [TokenOut(1, 3, 5), TokenOut(1, 4, 6)], [TokenOut(2, 0, 7), TokenOut(2, 1, 8), TokenOut(3, 0, 9)]
    delivered: list[TokenOut] = []
    engine: Any = OneStepEngine(StepOutput([*others, *firsts], []), [])
    receiver: Any = Receiver([], asyncio.get_running_loop())
    receiver.deliver = lambda output, step_s: delivered.extend(output.tokens)
    with engine_thread.EngineThread(engine, receiver, receiver):
        assert await asyncio.to_thread(engine.done.wait, 5)
    assert delivered == [firsts[0], firsts[2], *others, firsts[1]]


async def test_first_tokens_of_a_step_are_delivered_before_its_others() -> None:
    loop: Any = asyncio.get_running_loop()
    output = StepOutput(
        [TokenOut(1, 8, 5), TokenOut(2, 0, 5), TokenOut(2, 1, 5), TokenOut(3, 2, 5), TokenOut(4, 0, 5)], []
    )
    engine: Any = OneStepEngine(output, [])
    receiver: Any = Receiver([], loop)
    with engine_thread.EngineThread(engine, receiver, receiver):
        assert await asyncio.to_thread(engine.done.wait, 5)
    assert receiver.received == [(2, 0), (4, 0), (1, 8), (2, 1), (3, 2)]


async def test_first_tokens_of_a_step_that_is_not_over_are_written_before_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_thread, "_FIRST_WAIT_S", 10.0)
    happened: list[str] = []

    class Engine(OneStepEngine):
        def run(self, events: EngineEvents, stop: threading.Event) -> None:
            events.launched(0.1)
            events.begun(StepOutput([TokenOut(2, 0, 5)], []))
            self.happened_before = list(self.happened)
            events.stepped(self.output)
            self.done.set()

    engine: Any = Engine(StepOutput([TokenOut(1, 3, 5)], []), happened)
    receiver: Any = Receiver(happened, asyncio.get_running_loop())
    steps: list[tuple[list[TokenOut], bool]] = []
    deliver = receiver.deliver

    def delivered(output: StepOutput, step_s: float | None) -> None:
        steps.append((output.tokens, step_s is None))
        deliver(output, step_s)

    receiver.deliver = delivered
    with engine_thread.EngineThread(engine, receiver, receiver):
        assert await asyncio.to_thread(engine.done.wait, 5)
    assert engine.happened_before[:2] == ["delivered", "written"]
    assert steps == [([TokenOut(2, 0, 5)], True), ([TokenOut(1, 3, 5)], False)]
