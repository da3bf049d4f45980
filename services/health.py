"""Checks the health of a service, for container health checks: `python -m services.health HOST:PORT [SERVICE]`.

Exit code 0 means SERVING, 1 any other state, 2 wrong arguments. Without a service name, such as `weft.v1.Cache`, or
with `--listening` after it, it checks whether the process listens at all. It reads the same settings as the service:
an encrypted port is called with the service's own certificate, and needs the service's name. That of a gateway's public
port may have changed on disk since the gateway read it, so what the gateway presents is trusted.
"""

import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.security import identity as identities
from services.security.door_tls import CERT, probe
from services.security.identity import IdentityError
from services.security.roles import Role, role_name

CHECK_S = 3.0
ROLE_OF: Mapping[str, Role] = {
    "weft.v1.Inference": "gateway",
    "weft.v1.Gateway": "gateway",
    "weft.v1.Scheduler": "scheduler",
    "weft.v1.Worker": "worker",
    "weft.v1.Cache": "cache",
}
"""The role that serves each health name."""


def check(address: str, service: str = "", listening: bool = False) -> str:
    """The state that the gRPC health service at `address` reports, or the status code of a failed call.

    `listening`: that of the process, not of the service. Raises IdentityError for invalid settings.
    """
    try:
        with _channel(address, ROLE_OF.get(service)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="" if listening else service)
            reply = stub.Check(request, timeout=CHECK_S)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code.name
    except OSError:  # No process listens there, or it does not encrypt.
        return grpc.StatusCode.UNAVAILABLE.name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def _channel(address: str, role: Role | None) -> grpc.Channel:
    """A channel to a service of this role; None: a plain one."""
    if role == "gateway":
        if not os.environ.get(CERT):
            return grpc.insecure_channel(address)
        credentials, name = probe(_presented(address))
        return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)])
    own = identities.load(role, identities.named(os.environ)).client() if role is not None else None
    if own is None or role is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, own, [("grpc.ssl_target_name_override", role_name(role))])


def _presented(address: str) -> bytes:
    """The certificate that a server on this machine presents, in PEM. Raises OSError if it presents none."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=CHECK_S).encode()


def main(arguments: Sequence[str]) -> int:
    """Prints the state; returns the exit code."""
    if not 1 <= len(arguments) <= 3 or arguments[2:] not in ([], ["--listening"]):
        print("usage: python -m services.health host:port [service [--listening]]", file=sys.stderr)
        return 2
    try:
        state = check(arguments[0], "".join(arguments[1:2]), len(arguments) == 3)
    except IdentityError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2
    print(state)
    return 0 if state == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
