"""Ports of the loopback interface."""

import contextlib
import random
import socket


def free_port() -> int:
    """A port where nothing listens, outside the range that the kernel gives to outgoing connections."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])
