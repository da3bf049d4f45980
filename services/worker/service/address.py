"""Where gateways reach this worker: as it is told, where it listens, or the address it speaks to the scheduler from."""

import ipaddress
import socket


class NoAddress(Exception):
    """The worker listens everywhere and cannot tell which of its addresses others reach."""


def advertised(told: str, listen: str, port: int, scheduler: str) -> str:
    """host:port for the worker's hello.

    A worker that listens at 0.0.0.0 or [::] takes the address of the interface that leads to the scheduler, since
    gateways are beside it. Raises NoAddress if the scheduler's host is not known here.
    """
    if told:
        return told
    host = listen.rpartition(":")[0]
    if not _is_everywhere(host):
        return f"{host}:{port}"
    own = _toward(scheduler)
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""


def _toward(scheduler: str) -> str:
    host, _, port = scheduler.rpartition(":")
    try:
        family, _, _, _, peer = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)  # Chooses a route; a datagram socket sends nothing here.
            return str(probe.getsockname()[0])
    except OSError:
        raise NoAddress(f"no way to {scheduler}: set WEFT_ADVERTISE to the host:port of this worker") from None
