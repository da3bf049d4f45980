"""Checks whether something listens at an address. Knows TCP alone."""

import socket

TIMEOUT_S = 2.0


def listens(address: str) -> bool:
    """Whether something listens at host:port; True for other forms of address, which only gRPC can check."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S).close()
    except (OSError, OverflowError):
        return False
    return True
