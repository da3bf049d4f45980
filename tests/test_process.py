"""How a service's process begins: gRPC is told how to wait before it is there."""

import os
import subprocess
import sys

from services.process import POLLING

_ENTRY = """
import os, sys, types
import services.cache, services.gateway, services.scheduler, services.worker  # what `python -m` imports first
entry = types.ModuleType("entry")
entry.run = lambda: print(os.environ["GRPC_EXPERIMENTS"], "grpc" in sys.modules)
sys.modules["entry"] = entry
from services import process
process.run("entry")
"""


def began(**environment: str) -> list[str]:
    """What the entry point of a service finds: gRPC's experiments, and whether gRPC was imported before."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | environment
    done = subprocess.run([sys.executable, "-c", _ENTRY], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_service_polls_its_own_connections() -> None:
    assert began() == [POLLING, "False"]


def test_who_runs_a_service_may_choose_otherwise() -> None:
    assert began(GRPC_EXPERIMENTS="monitoring_experiment") == ["monitoring_experiment", "False"]


def test_grpc_knows_these_experiments() -> None:
    code = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    env = {**os.environ, "GRPC_EXPERIMENTS": POLLING}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "Unknown experiment" not in done.stderr
