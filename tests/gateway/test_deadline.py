"""Deadline: a call ends at its deadline or when its client does not read, and for no other reason."""

import asyncio

import grpc
import pytest

from services.errors import WeftError
from services.gateway.answers.deadline import Deadline
from services.gateway.answers.receipt import Phase, Timeline
from tests.timing import timely


@timely
async def test_the_deadline_ends_the_block() -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(WeftError) as caught, Deadline(Timeline(), 0.05, 60):
        await asyncio.sleep(10)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert asyncio.get_running_loop().time() - began < 0.5
    await asyncio.sleep(0.01)  # The task itself is not cancelled.


async def test_a_delivery_that_takes_too_long_ends_the_block() -> None:
    timeline = Timeline()
    timeline.enter(Phase.DELIVER)
    with pytest.raises(WeftError) as caught, Deadline(timeline, None, 0.1):
        await asyncio.sleep(10)
    assert caught.value.reason == "SLOW_CONSUMER"


@timely
async def test_many_deliveries_together_may_take_longer() -> None:
    timeline = Timeline()
    with Deadline(timeline, 10, 0.1):
        for _ in range(10):
            timeline.enter(Phase.DELIVER)
            await asyncio.sleep(0.02)
            timeline.enter(Phase.REMOTE)
        await asyncio.sleep(0.2)  # Waiting for a worker does not count.


async def test_a_cancellation_from_elsewhere_is_passed_on() -> None:
    async def handler() -> None:
        with Deadline(Timeline(), 10, 10):
            await asyncio.sleep(10)

    task = asyncio.create_task(handler())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
