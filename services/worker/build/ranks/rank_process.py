"""The processes of ranks 1, 2, ...: how they are started, and that they and their worker end together.

A rank that ends takes the worker's process with it, at once and however it ended: to the mesh a grid is one worker.
When the worker dies, the kernel ends the ranks (Linux), and so does the end of their channels. Knows no model.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import services
from services.worker.parallel.channel import Channel

_PARENT_DEATH = Path(services.__file__).with_name("parent_death.py")
_KILL_S = 2.0


class ProcessChannel(Channel):
    """A channel to a process, which ends with it."""

    def __init__(self, connection: socket.socket, process: "subprocess.Popen[bytes]", number: int) -> None:
        super().__init__(connection)
        self._process, self._closed, self._number = process, threading.Event(), number
        threading.Thread(target=self._watch, name=f"rank-{number}", daemon=True).start()

    def close(self) -> None:
        """End the channel and the process."""
        self._closed.set()
        super().close()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._closed.is_set():
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            end_worker(f"rank {self._number} {how}")


def start(number: int) -> Channel:
    """Start rank `number`."""
    own, its = socket.socketpair()
    with its:
        # `-m` alone would import from the current folder.
        path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(_PARENT_DEATH), str(os.getpid()), str(int(signal.SIGKILL))),
                *(sys.executable, *path, "-m", "services.worker.build.ranks.rank"),
                *(str(its.fileno()), str(number)),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )
    return ProcessChannel(own, process, number)


def end_worker(reason: str) -> None:
    """End this process, and with it all ranks: its streams go on at other workers, its supervisor starts it again."""
    print(f"weft: {reason}: the worker ends", file=sys.stderr, flush=True)
    os._exit(1)
