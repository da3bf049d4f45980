"""The channel from rank 0 to another rank: orders and answers over a pair of sockets, in order. Knows bytes, no model.

A message is a kind, a number of bytes and these bytes. When rank 0 dies the channel ends, and so does the rank.
"""

import contextlib
import enum
import select
import socket
import struct
import threading

_HEADER = struct.Struct("=iq")


class Kind(enum.IntEnum):
    """What a message asks or answers."""

    BEGIN = 0
    """What the rank computes: JSON."""
    READY = 1
    """Answer: the model is loaded."""
    REFUSED = 2
    """Answer: the model cannot be loaded, with the reason."""
    STEP = 3
    """A packed step: int32."""
    DRAW = 4
    """Masks of the last step: int32."""
    RESULT = 5
    """Answer: the results of a step, as JSON."""
    SCRUB = 6
    """Blocks whose contents become zeros: int32."""
    READ = 7
    """Blocks whose contents are asked for: int32."""
    CONTENTS = 8
    """Answer: the contents of blocks, one after another."""
    WRITE = 9
    """The number of blocks, the blocks (int32) and their contents."""
    MODULE = 10
    """The rank's part of a module of an adapter: its matrices, behind the number of the adapter."""
    KEEP = 11
    """The number of an adapter whose modules have all been sent: the rank makes its host copy."""
    LOAD = 12
    """A slot, and the number of the adapter that is copied to it."""
    DROP = 13
    """The number of an adapter whose host copy is not needed any more."""


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class Channel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, kind: Kind, *parts: bytes) -> None:
        """Send a message. Raises ChannelClosed."""
        length = sum(map(len, parts))
        try:
            with self._sending:
                for part in (_HEADER.pack(kind, length), *parts):
                    self.connection.sendall(part)
        except OSError:
            raise ChannelClosed from None

    def receive(self) -> tuple[Kind, bytes]:
        """The next message. Raises ChannelClosed."""
        kind, length = _HEADER.unpack(self._read(_HEADER.size))
        return Kind(kind), self._read(length)

    def waiting(self) -> bool:
        """Whether `receive` would begin at once."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def close(self) -> None:
        """End the channel; a thread that waits in `receive` is woken."""
        with contextlib.suppress(OSError):  # The other end may be gone already.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _read(self, length: int) -> bytes:
        content = bytearray(length)
        view, at = memoryview(content), 0
        while at < length:
            try:
                count = self.connection.recv_into(view[at:])
            except OSError:
                raise ChannelClosed from None
            if count == 0:
                raise ChannelClosed
            at += count
        return bytes(content)
