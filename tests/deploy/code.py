"""Facts that a deployment must agree with, read from the code: ports, health names, settings, commands, images.

Functions named `*_problems` yield one sentence for each thing that is wrong.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from opentelemetry.sdk import environment_variables as otel
from pydantic import AliasChoices, ValidationError

from services import settings as common
from services.cache.settings import CacheSettings
from services.gateway.settings import GatewaySettings
from services.scheduler.settings import SchedulerSettings
from services.settings import CommonSettings
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]

SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "cache": CacheSettings,
    "worker": WorkerSettings,
}
REDIS_PORT = 6379
# The conventional port of metrics where each process has its own address.
METRICS_PORT = 9464
# Variables that the operating system or a library reads, not a service.
FOREIGN = {"HOME", "TMPDIR", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR", "POD_IP", "POD_NAME"}
OTEL = {name for name in vars(otel).values() if isinstance(name, str) and name.startswith("OTEL_")}


def port(service: str) -> int:
    """The port that a service listens at by default."""
    return port_of(getattr(common, f"{service.upper()}_ADDRESS"))


def ports(service: str) -> dict[str, int]:
    """The ports that a service listens at by name, beside that for metrics."""
    return {"grpc": port(service)} | ({"http": common.HTTP_PORT} if service == "gateway" else {})


def port_of(address: str) -> int:
    """The port of an address host:port."""
    return int(address.rpartition(":")[2])


@functools.cache
def health_names(service: str) -> set[str]:
    """The names that a service registers with its health service, without the empty name."""
    names = set()
    for path in (ROOT / "services" / service).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                package, _, name = node.value.rpartition(".")
                if package == "weft.v1" and name.isidentifier():
                    names.add(node.value)
    return names


def variables(service: str) -> dict[str, str]:
    """Environment variable -> field of the settings, for all that a service reads."""
    settings = SETTINGS[service]
    prefix = str(settings.model_config.get("env_prefix", ""))
    names = {}
    for field, info in settings.model_fields.items():
        alias = info.validation_alias
        if isinstance(alias, AliasChoices):
            choices = [str(choice) for choice in alias.choices]
        else:
            choices = [str(alias)] if alias else [f"{prefix}{field}"]
        names.update({choice.upper(): field for choice in choices})
    return names


def settings_problems(service: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Problems of the environment of a service that runs in its own container."""
    known = variables(service)
    for name in sorted(environment.keys() - known.keys() - OTEL - FOREIGN):
        yield f"{service}: {name} is no setting of it"
    try:
        settings = _read(service, environment)
    except ValidationError as error:
        yield f"{service}: {error}"
        return
    host, _, listening = settings.listen.rpartition(":")
    if not (settings.allow_unprotected or _is_protected(settings)):
        yield f"{service}: listens for other machines without protection and without WEFT_ALLOW_UNPROTECTED"
    if host not in ("0.0.0.0", "[::]"):
        yield f"{service}: listens at {settings.listen or 'its default'}, which others do not reach"
    elif int(listening) != port(service):
        yield f"{service}: listens at {listening}, not at its default {port(service)}"
    if isinstance(settings, GatewaySettings) and settings.gateway_http_port != common.HTTP_PORT:
        yield f"{service}: HTTP is at {settings.gateway_http_port or 'no port'}, not at {common.HTTP_PORT}"
    if settings.metrics_port != METRICS_PORT:
        yield f"{service}: its metrics are at {settings.metrics_port or 'no port'}, not at {METRICS_PORT}"
    given = {known[name] for name in environment.keys() & known.keys()}
    for field in sorted(peers(service, environment)):
        if field not in given:
            yield f"{service}: {field} is not given, so it looks for it in its own container"


def _is_protected(settings: CommonSettings) -> bool:
    """Whether the port is encrypted and authenticated, as far as the settings say."""
    if isinstance(settings, GatewaySettings):
        return all((settings.gateway_tls_cert, settings.gateway_tls_key, settings.tenants_file))
    certificate = all((settings.tls_ca, settings.tls_cert, settings.tls_key))
    return bool(settings.secret() or settings.mesh_secret_file) or certificate


def parse(service: str, environment: Mapping[str, str]) -> CommonSettings | None:
    """The settings from an environment; None if they are invalid, which `settings_problems` reports."""
    try:
        return _read(service, environment)
    except ValidationError:
        return None


def _read(service: str, environment: Mapping[str, str]) -> CommonSettings:
    return _settings(service, frozenset(environment.items()))


@functools.cache
def _settings(service: str, environment: frozenset[tuple[str, str]]) -> CommonSettings:
    """The same few environments are read by each check of each manifest."""
    with mock.patch.dict(os.environ, dict(environment), clear=True):
        return SETTINGS[service]()


def peers(service: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Field -> host:port, for the settings of a service that hold the address of a peer."""
    settings = parse(service, environment)
    if settings is None:
        return {}
    found = {
        field: str(getattr(settings, field)) for field in type(settings).model_fields if field.endswith("_address")
    }
    if isinstance(settings, CacheSettings):
        found["redis_url"] = settings.redis_url.get_secret_value().partition("://")[2].partition("/")[0]
    return {field: address for field, address in found.items() if address}


def peer_problems(service: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Problems: addresses of peers on loopback, which is the service's own container."""
    for field, address in peers(service, environment).items():
        host = address.rpartition(":")[0].strip("[]")
        if host == "localhost" or (host[:1].isdigit() and ipaddress.ip_address(host).is_loopback):
            yield f"{service}: {field} is {address}, its own container"


@functools.cache
def project() -> dict[str, object]:
    """The [project] table of pyproject.toml."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def extras() -> dict[str, list[str]]:
    """Extra -> requirements: the optional dependencies of pyproject.toml."""
    table = project()["optional-dependencies"]
    assert isinstance(table, dict)
    return table


def command_problems(command: Sequence[str]) -> Iterator[str]:
    """Problems of a command that runs in one of the project's images."""
    match list(command):
        case ["weft", *rest]:
            yield from _weft_problems(rest)
        case ["python", "-m", module, *rest]:
            yield from _module_problems(module, rest)
        case _:
            yield f"{' '.join(command)} is no command of ours"


def _weft_problems(rest: list[str]) -> Iterator[str]:
    scripts = project()["scripts"]
    assert isinstance(scripts, dict)
    module, _, attribute = scripts.get("weft", ":").partition(":")
    if not module or not hasattr(importlib.import_module(module), attribute):
        yield "there is no command weft"
        return
    serving = importlib.import_module("weft.cli.serve")
    if len(rest) != 2 or rest[0] != "serve" or not inspect.isfunction(getattr(serving, rest[0], None)):
        yield f"weft {' '.join(rest)} is not `weft serve SERVICE`"
    elif rest[1] not in {part.value for part in serving.ServiceName} or not _exists(f"services.{rest[1]}.__main__"):
        yield f"{rest[1]} is no service"


def _module_problems(module: str, rest: list[str]) -> Iterator[str]:
    if not _exists(module):
        yield f"there is no module {module}"
    elif module == "services.health":
        address, name = (*rest, "", "")[:2]
        services = {port(service): service for service in SETTINGS}
        number = address.rpartition(":")[2]
        service = services.get(int(number)) if number.isdigit() else None
        if len(rest) not in (1, 2) or service is None:
            yield f"services.health is asked about {' '.join(rest) or 'nothing'}"
        elif name and name not in health_names(service):
            yield f"{name} is no health name of the {service}"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
