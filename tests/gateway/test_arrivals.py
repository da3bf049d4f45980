"""When readers of job streams are notified: at once, or for several messages together while the process is behind."""

import asyncio
from dataclasses import dataclass, field

from services.gateway.links.arrivals import MOST_HELD, Arrivals


@dataclass
class Clock:
    """Stands still but for what is added."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stream:
    """A reader that takes `cost_s` for each delivery."""

    clock: Clock
    arrivals: Arrivals
    cost_s: float = 0.004
    wants_details: bool = False
    waiting: int = 0
    taken: list[int] = field(default_factory=list)
    """Number of tokens of each delivery."""

    def __post_init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.notified = asyncio.Event()

    def arrive(self) -> None:
        """One token, as a job stream counts it."""
        self.waiting += 1
        if self.waiting == 1:
            self.arrivals.add(self)

    def notify(self) -> None:
        """Takes all tokens."""
        self.clock.now += self.cost_s
        self.taken.append(self.waiting)
        self.waiting = 0
        self.notified.set()


async def message(clock: Clock, arrivals: Arrivals, *streams: Stream, gap_s: float) -> None:
    """A message with a token of each stream that arrives `gap_s` after the last delivery."""
    clock.now += gap_s
    for stream in streams:
        stream.arrive()
    arrivals.received(clock.now)
    await asyncio.sleep(0)


async def test_a_process_that_keeps_up_delivers_every_message_at_once() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    stream = Stream(clock, arrivals)
    for _ in range(5):
        await message(clock, arrivals, stream, gap_s=0.002)
    assert stream.taken == [1, 1, 1, 1, 1]


async def test_while_it_is_behind_the_tokens_of_several_messages_are_delivered_together() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    stream = Stream(clock, arrivals)
    await message(clock, arrivals, stream, gap_s=1.0)
    for _ in range(2 * MOST_HELD):
        await message(clock, arrivals, stream, gap_s=0.0001)
    assert stream.taken == [1, MOST_HELD, MOST_HELD]


async def test_held_tokens_are_delivered_even_if_no_other_message_arrives() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    stream = Stream(clock, arrivals)
    await message(clock, arrivals, stream, gap_s=1.0)
    stream.notified.clear()
    await message(clock, arrivals, stream, gap_s=0.0001)
    assert stream.taken == [1]
    await stream.notified.wait()
    await asyncio.sleep(0)
    assert stream.taken == [1, 1]
    await message(clock, arrivals, stream, gap_s=0.002)
    assert stream.taken == [1, 1, 1]


async def test_a_reader_of_log_probabilities_gets_each_token_at_once() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    plain, detailed = Stream(clock, arrivals), Stream(clock, arrivals, cost_s=0.0, wants_details=True)
    await message(clock, arrivals, plain, detailed, gap_s=1.0)
    for _ in range(MOST_HELD):
        await message(clock, arrivals, plain, detailed, gap_s=0.0001)
    assert plain.taken == [1, MOST_HELD]
    assert detailed.taken == [1] * (1 + MOST_HELD)


async def test_a_message_that_arrives_while_another_one_is_delivered_waits() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    stream = Stream(clock, arrivals)
    stream.arrive()
    arrivals.received(clock.now)
    stream.arrive()
    arrivals.received(clock.now)
    assert stream.taken == [1]
    await asyncio.sleep(0)
    arrivals.deliver()
    assert stream.taken == [1, 1]


async def test_a_stream_that_has_ended_is_notified_after_its_end_was_read() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    stream = Stream(clock, arrivals)
    ended: list[int] = []
    stream.closed.add_done_callback(lambda _: ended.append(len(stream.taken)))
    stream.closed.set_result(None)
    await message(clock, arrivals, stream, gap_s=1.0)
    await stream.notified.wait()
    assert ended == [0]
