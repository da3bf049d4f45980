"""The start of processes: gRPC's experiments are set before its import; a missing package is reported in one line."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.process import POLLING
from tests.deploy import code

_ENTRY = """
import os, sys, types
import weft.load, services.cache, services.gateway, services.scheduler, services.worker  # as `-m` does
entry = types.ModuleType("entry")
entry.run = entry.app = lambda: print(
    os.environ["GRPC_EXPERIMENTS"], os.environ["GRPC_ENABLE_FORK_SUPPORT"], "grpc" in sys.modules
)
sys.modules["entry"] = sys.modules["weft.cli.app"] = entry
from services import process
"""
_SERVICE, _COMMAND = 'process.run("entry")', "from weft.main import main; main()"


def start(call: str, **environment: str) -> list[str]:
    """What the entry point of a process finds: both settings of gRPC, and whether gRPC was already imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")} | environment
    done = subprocess.run([sys.executable, "-c", _ENTRY + call], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("call", [_SERVICE, _COMMAND])
def test_services_and_the_command_set_grpc_up(call: str) -> None:
    assert start(call) == [POLLING, "0", "False"]


@pytest.mark.parametrize("call", [_SERVICE, _COMMAND])
def test_the_environment_may_choose_other_experiments(call: str) -> None:
    given = {"GRPC_EXPERIMENTS": "monitoring_experiment", "GRPC_ENABLE_FORK_SUPPORT": "1"}
    assert start(call, **given) == ["monitoring_experiment", "1", "False"]


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


_FORKS = """
from services import process
process.prepare_grpc()
import asyncio, uvloop
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc

async def start_children():
    while True:
        await (await asyncio.create_subprocess_exec("true")).wait()

async def main():
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.gather(start_children(), start_children())

uvloop.run(main())
"""


async def test_children_of_a_server_do_not_touch_its_connections() -> None:
    """uvloop forks them while other threads serve new connections."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _FORKS, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert server.stdout is not None
    address = f"127.0.0.1:{int(await server.stdout.readline())}"

    async def check() -> None:
        async with aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)

    try:
        for _ in range(8):
            await asyncio.gather(*(check() for _ in range(16)))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        await server.wait()


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
