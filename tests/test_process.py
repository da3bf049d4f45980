"""The start of processes: gRPC's experiments are set before its import; a missing package is reported in one line."""

import os
import pty
import subprocess
import sys

import pytest

from services.process import POLLING
from tests.deploy import code

_ENTRY = """
import os, sys, types
import weft.load, services.cache, services.gateway, services.scheduler, services.worker  # as `-m` does
entry = types.ModuleType("entry")
entry.run = entry.app = lambda: print(os.environ["GRPC_EXPERIMENTS"], "grpc" in sys.modules)
sys.modules["entry"] = sys.modules["weft.cli.app"] = entry
from services import process
"""
_SERVICE, _COMMAND = 'process.run("entry")', "from weft.main import main; main()"


def start(call: str, **environment: str) -> list[str]:
    """What the entry point of a process finds: the value of GRPC_EXPERIMENTS, and whether gRPC was already imported."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | environment
    done = subprocess.run([sys.executable, "-c", _ENTRY + call], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("call", [_SERVICE, _COMMAND])
def test_services_and_the_command_choose_grpcs_polling(call: str) -> None:
    assert start(call) == [POLLING, "False"]


@pytest.mark.parametrize("call", [_SERVICE, _COMMAND])
def test_the_environment_may_choose_other_experiments(call: str) -> None:
    assert start(call, GRPC_EXPERIMENTS="monitoring_experiment") == ["monitoring_experiment", "False"]


def test_importing_the_client_leaves_grpcs_experiments_alone() -> None:
    program = "import os; from weft import Client; print(os.environ.get('GRPC_EXPERIMENTS'))"
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


def test_grpc_accepts_these_experiments() -> None:
    program = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    env = {**os.environ, "GRPC_EXPERIMENTS": POLLING}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert "Unknown experiment" not in done.stderr


def without(package: str, service: str) -> "subprocess.CompletedProcess[str]":
    """Starts a service in an interpreter without this package."""
    program = f"import sys; sys.modules[{package!r}] = None; from services import process; process.run({service!r})"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "WEFT_LISTEN": "127.0.0.1:0", "MODEL_NAME": "random:tiny"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("service", "package"),
    [("gateway", "tokenizers"), ("gateway", "starlette"), ("cache", "redis"), ("worker", "torch")],
)
def test_a_service_without_its_packages_names_the_extra_to_install(service: str, package: str) -> None:
    done = without(package, f"services.{service}.main")
    line = f"weft: the {service} needs {package}, which is not installed: pip install 'weft[{service}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (os.EX_CONFIG, "", line)
    assert any(each.startswith(package) for each in code.extras()[service])


def test_a_missing_module_of_an_installed_package_stays_a_traceback() -> None:
    done = without("redis.asyncio", "services.cache.main")
    assert done.returncode == 1
    assert "services/cache/redis_client.py" in done.stderr


def test_a_load_client_started_by_hand_names_the_command_to_run() -> None:
    master, terminal = pty.openpty()
    ours, pipe = os.pipe()
    starts: list[tuple[list[str], int]] = [([], terminal), ([], subprocess.DEVNULL), (["--help"], ours)]
    command = [sys.executable, "-m", "weft.load"]
    processes = [subprocess.Popen([*command, *more], stdin=stdin, stderr=subprocess.PIPE) for more, stdin in starts]
    processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE))
    line = b"weft: this is one client process of a load and is started by `weft bench`: run that instead\n"
    for process in processes:
        assert (process.communicate(timeout=60)[1], process.returncode) == (line, 2)
    for end in (master, terminal, ours, pipe):
        os.close(end)
