"""Network ports, held from their choice until the mesh has ended. Knows sockets, never who listens.

On Linux, a bound socket with SO_REUSEADDR that does not listen reserves its port: no process that asks for a free port
gets it, and one process may listen there. An abstract Unix socket named after the port keeps another `weft serve` from
choosing the port: one process can have it, and the kernel removes it when that process dies.
"""

import errno
import socket
import sys
from types import TracebackType
from typing import Self

_CAN_BE_SHARED = sys.platform == "linux"
_LOCK_NAME = "\0weft-port-{}"


class HeldPorts:
    """The ports of one mesh. A `with` block around them releases all at its end."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self, host: str, port: int) -> int | None:
        """Holds this port (0: a free one) and returns it; None if it is taken. Raises OSError for other reasons."""
        holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        lock = None
        try:
            holder.bind((host, port))
            taken: int = holder.getsockname()[1]
            if _CAN_BE_SHARED:
                lock = socket.socket(socket.AF_UNIX)
                lock.bind(_LOCK_NAME.format(taken))
        except OSError as error:
            for each in (holder, lock):
                if each is not None:
                    each.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        self._sockets += [holder] if lock is None else [holder, lock]
        return taken

    def free(self, host: str) -> int:
        """Holds a free port and returns it."""
        while (port := self.take(host, 0)) is None:
            pass
        return port

    def all_chosen(self) -> None:
        """Releases the ports on systems other than Linux, where no process can listen at a port that is held."""
        if not _CAN_BE_SHARED:
            self.release()

    def release(self) -> None:
        """Releases all ports."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()
