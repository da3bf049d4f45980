"""Checks an address before it is called: its form, whether something listens there. Knows TCP alone."""

import socket

from weft.cli.flags import fail, no_mesh
from weft.client.channel import TLS_PREFIX, CaFileError, authorities

TIMEOUT_S = 2.0


def require_mesh(*addresses: str) -> None:
    """Ends the command with one line if an address is none, if nothing listens there, or if the file of authorities
    cannot be read."""
    for address in addresses:
        require_address(address)
        if not listens(address):
            fail(no_mesh(address))
        try:
            authorities(address)
        except CaFileError as error:
            fail(str(error), usage=True)


def require_address(address: str) -> None:
    """Ends the command with one line if an address is none."""
    host, _, port = address.removeprefix(TLS_PREFIX).rstrip("/").rpartition(":")
    known = address.startswith(("unix:", "dns:", "ipv4:", "ipv6:"))
    if not known and not (host and "/" not in host and port.isdecimal()):
        fail(f"--address: {address!r} is neither host:port nor https://host:port", usage=True)


def listens(address: str) -> bool:
    """Whether something listens at host:port; True for other forms of address, which only gRPC can check."""
    host, _, port = address.removeprefix(TLS_PREFIX).rstrip("/").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S).close()
    except (OSError, OverflowError):
        return False
    return True
