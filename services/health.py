"""`python -m services.health 127.0.0.1:50053 weft.v1.Cache` asks a service for its health: for container health checks.

Exit code 0 is SERVING, 1 anything else, 2 a wrong call. Without a name it asks whether the process listens at all.
"""

import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

CHECK_S = 3.0


def check(address: str, service: str = "") -> str:
    """The word of the gRPC health service at `address`, or the status code of the failure."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CHECK_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code.name
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def main(arguments: Sequence[str]) -> int:
    """Says the word on standard output; the exit code is as above."""
    if len(arguments) not in (1, 2):
        print("usage: python -m services.health host:port [service]", file=sys.stderr)
        return 2
    word = check(*arguments)
    print(word)
    return 0 if word == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
