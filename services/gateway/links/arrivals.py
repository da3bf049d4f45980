"""When the readers of job streams are notified of new tokens: at once, or together with the tokens of the next messages
while this process is behind. Knows no tokens and no messages.

A process is behind if the next message of a worker was there by the time that it had delivered the last one. Then a
client receives the tokens of several messages as one, which costs hardly more than one token.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

MOST_HELD = 4
"""Most messages whose tokens are delivered together."""
_BEHIND = 0.25
"""Share of the time of a delivery: a message that arrives within it, after the delivery, has waited for that."""


class Reader(Protocol):
    """Who is notified."""

    closed: "asyncio.Future[None]"
    """Done once the stream has ended."""
    wants_details: bool
    """Each token has log-probabilities: the reader is never made to wait for further tokens."""

    def notify(self) -> None:
        """There are tokens to take."""


class Arrivals:
    """The streams of one link that have tokens of which their readers are not notified yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._streams: list[Reader] = []
        self._held = 0
        """Messages whose tokens wait."""
        self._took_s = 0.0
        """Duration of the last delivery, which ended at `_ended`; infinite while one goes on."""
        self._ended = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Reader) -> None:
        """A stream has tokens. Called once until its reader takes them."""
        self._streams.append(stream)

    def received(self, now: float) -> None:
        """A message has been read that arrived at `now` on the clock: notifies the readers now or soon."""
        if not self._streams:
            return
        behind = self._held > 0 or now - self._ended < self._took_s * _BEHIND
        self._held += 1
        if not behind or self._held >= MOST_HELD:
            self.deliver()
            return
        _notify([each for each in self._streams if each.wants_details])
        self._streams = [each for each in self._streams if not each.wants_details]
        if self._timer is None:  # Without holding, the last client would wait for about as long.
            self._timer = asyncio.get_running_loop().call_later(self._took_s, self.deliver)

    def deliver(self) -> None:
        """Notifies all readers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        began = self._clock()
        streams, self._streams, self._held = self._streams, [], 0
        self._ended = math.inf
        _notify(streams)
        asyncio.get_running_loop().call_soon(self._delivered, began)  # Behind the writes that readers have left.

    def _delivered(self, began: float) -> None:
        self._ended = self._clock()
        self._took_s = self._ended - began


def _notify(streams: Sequence[Reader]) -> None:
    for stream in streams:
        if stream.closed.done():  # Its end is read first: last token and end are delivered together.
            asyncio.get_running_loop().call_soon(stream.notify)
        else:
            stream.notify()
