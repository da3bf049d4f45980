"""Ports of the loopback interface."""

import contextlib
import os
import random
import socket

_FIRST, _END = 20_000, 32_000
"""Outside the range that the kernel gives to outgoing connections."""
_given: set[int] = set()


def draw_from(own: int, processes: int) -> None:
    """From now on this process draws from its own range: that of number `own` of this number of processes."""
    os.environ["PYTEST_XDIST_WORKER"], os.environ["PYTEST_XDIST_WORKER_COUNT"] = f"gw{own}", str(processes)


def free_port() -> int:
    """A port where nothing listens, given once. The processes of a test run draw from ranges of their own: nobody else
    takes the port between this call and the start of the process that is to listen there."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = (_END - _FIRST) // processes
    while True:
        port = _FIRST + own * share + random.randrange(share)
        if port in _given and len(_given) < share // 2:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
