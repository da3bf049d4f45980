"""Whether anybody listens at an address. Knows TCP alone."""

import socket

PATIENCE_S = 2.0


def listens(address: str) -> bool:
    """Whether something listens at host:port; other forms of address are left to gRPC."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S).close()
    except (OSError, OverflowError):
        return False
    return True
