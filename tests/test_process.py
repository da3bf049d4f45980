"""How our processes begin: gRPC is told how to wait before it is there."""

import os
import subprocess
import sys

import pytest

from services.process import POLLING

_ENTRY = """
import os, sys, types
import bench.load, services.cache, services.gateway, services.scheduler, services.worker  # what -m imports first
entry = types.ModuleType("entry")
entry.run = entry.app = lambda: print(os.environ["GRPC_EXPERIMENTS"], "grpc" in sys.modules)
sys.modules["entry"] = sys.modules["client.cli"] = entry
from services import process
"""
_SERVICE, _COMMAND = 'process.run("entry")', "process.weft()"


def began(call: str, **environment: str) -> list[str]:
    """What the entry point of a process finds: gRPC's experiments, and whether gRPC was imported before."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | environment
    done = subprocess.run([sys.executable, "-c", _ENTRY + call], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("call", [_SERVICE, _COMMAND])
def test_services_and_the_command_poll_their_own_connections(call: str) -> None:
    assert began(call) == [POLLING, "False"]


@pytest.mark.parametrize("call", [_SERVICE, _COMMAND])
def test_who_runs_them_may_choose_otherwise(call: str) -> None:
    assert began(call, GRPC_EXPERIMENTS="monitoring_experiment") == ["monitoring_experiment", "False"]


def test_who_imports_the_client_keeps_what_grpc_does() -> None:
    code = "import os, client; print(os.environ.get('GRPC_EXPERIMENTS'))"
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


def test_grpc_knows_these_experiments() -> None:
    code = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    env = {**os.environ, "GRPC_EXPERIMENTS": POLLING}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "Unknown experiment" not in done.stderr
