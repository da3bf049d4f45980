"""A process to supervise. Writes its pid to a file when it is ready; its first argument selects its behaviour.

dummy.py (polite | stubborn | parent | broken | hopeless | grpc) PATH
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Runs with the behaviour that the first argument selects."""
    how, path = sys.argv[1], Path(sys.argv[2])
    if how in ("broken", "hopeless"):
        record = {"event": "the checkpoint is broken", "level": "error", "shard": 2, "timestamp": "now"}
        print("a first line", json.dumps(record), "", sep="\n", file=sys.stderr)
        sys.exit(78 if how == "hopeless" else 1)
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "parent":
        subprocess.Popen([sys.executable, __file__, "polite", f"{path}.child"], start_new_session=False)
    if how == "grpc":
        server = serve(path)  # noqa: F841 (it ends when no reference is left)
    path.write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def serve(path: Path) -> object:
    """Answers health checks at the address in WEFT_LISTEN: SERVING once the file at `path` exists."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    checks = health.HealthServicer()
    checks.set("weft.v1.Cache", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    server.add_insecure_port(os.environ["WEFT_LISTEN"])
    server.start()
    while not path.exists():
        time.sleep(0.01)
    checks.set("weft.v1.Cache", health_pb2.HealthCheckResponse.SERVING)
    return server


if __name__ == "__main__":
    main()
