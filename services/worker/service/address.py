"""The address at which gateways reach this worker. Knows the network interfaces, nothing of the mesh."""

import ipaddress
import socket


class NoAddress(Exception):
    """The worker listens on all interfaces, and the address that gateways reach cannot be determined."""


def advertised(configured: str, listen: str, port: int, scheduler: str) -> str:
    """host:port for the worker's hello.

    This is `configured`, if set, or the address that the worker listens at. A worker that listens at 0.0.0.0 or [::]
    takes the address of the interface with the route to the scheduler: gateways are expected in the same network.
    Raises NoAddress if the scheduler's host cannot be resolved.
    """
    if configured:
        return configured
    host = listen.rpartition(":")[0]
    if not _is_unspecified(host):
        return f"{host}:{port}"
    own = _local_address_toward(scheduler)
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""


def _local_address_toward(scheduler: str) -> str:
    host, _, port = scheduler.rpartition(":")
    try:
        family, _, _, _, peer = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)  # Chooses a route; a datagram socket sends nothing.
            return str(probe.getsockname()[0])
    except OSError:
        raise NoAddress(
            f"no route to the scheduler at {scheduler}: set WEFT_ADVERTISE to the host:port of this worker"
        ) from None
