"""Reads at once what gRPC's poller thread has written to a socket to wake an event loop: a byte for each event.

gRPC itself reads one byte at a turn of the loop, handles all events in it, and is called once more for each other byte.
While more than one event comes at a turn, unread bytes collect; some 280 fill the socket. Then the poller waits until
half of them are read, and no event is handled for as many turns. Knows gRPC's callback, nothing of its events.
"""

import asyncio
import socket
from functools import partial
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]

_MOST_BYTES = 4096


def read_together(loop: asyncio.AbstractEventLoop) -> None:
    """Call this before the loop's first channel or server is created."""
    add_reader: Any = loop.add_reader

    def add(source: Any, callback: Any, *arguments: Any) -> Any:
        handler = callback.func if isinstance(callback, partial) else callback
        if isinstance(getattr(handler, "__self__", None), cygrpc.PollerCompletionQueue):
            return add_reader(source, _read_all_but_one, source, callback, *arguments)
        return add_reader(source, callback, *arguments)

    setattr(loop, "add_reader", add)  # noqa: B010 - a method of the loop


def _read_all_but_one(source: socket.socket, callback: Any, *arguments: Any) -> None:
    """Leaves one byte to the callback. An event is there before its byte, so the callback handles all of them."""
    waiting = len(source.recv(_MOST_BYTES, socket.MSG_PEEK))
    if waiting > 1:
        source.recv(waiting - 1)
    callback(*arguments)
