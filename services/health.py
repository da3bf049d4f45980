"""Checks the health of a service, for container health checks: `python -m services.health HOST:PORT [SERVICE]`.

Exit code 0 means SERVING, 1 any other state, 2 wrong arguments. Without a service name, such as `weft.v1.Cache`, it
checks whether the process listens at all.
"""

import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

CHECK_S = 3.0


def check(address: str, service: str = "") -> str:
    """The state that the gRPC health service at `address` reports, or the status code of a failed call."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CHECK_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code.name
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def main(arguments: Sequence[str]) -> int:
    """Prints the state; returns the exit code."""
    if len(arguments) not in (1, 2):
        print("usage: python -m services.health host:port [service]", file=sys.stderr)
        return 2
    state = check(*arguments)
    print(state)
    return 0 if state == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
