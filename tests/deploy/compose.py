"""Checks the compose file and the collector's configuration against the compose specification and the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import yaml

from tests.deploy import code, dockerfile, manifests

Object = dict[str, Any]
_MARGIN_S = 5
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def load(path: Path) -> Object:
    """The parsed compose file: default values filled in, YAML merges resolved, `x-` templates removed."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text())
    whole: Object = yaml.safe_load(text)
    return {key: value for key, value in whole.items() if not key.startswith("x-")}


def specification_problems(compose: Object) -> list[str]:
    """Problems: violations of the compose specification."""
    try:
        compose_spec.PyCompose.from_json(json.dumps(compose)).validate()
    except ValueError as error:
        return [str(error)]
    return []


def problems(compose: Object, folder: Path) -> list[str]:
    """All problems beside those of the specification. Paths in the file are relative to `folder`."""
    found: list[str] = []
    for name, service in compose["services"].items():
        found += _surroundings(name, service, compose, folder)
        if "build" in service:
            found += _build(name, service, folder)
            found += _ours(name, service, compose)
    published = [name for name, service in compose["services"].items() if service.get("ports")]
    if published != ["gateway"]:
        found.append(f"published are {', '.join(published) or 'none'}, not the gateway alone")
    found += manifests.redis_problems(
        compose["services"]["redis"]["command"], compose["services"]["redis"]["mem_limit"]
    )
    return found


def _surroundings(name: str, service: Object, compose: Object, folder: Path) -> Iterator[str]:
    if not dockerfile.pinned(service["image"]):
        yield f"{name}: its image {service['image']} is not pinned"
    if not service.get("read_only") or service.get("cap_drop") != ["ALL"]:
        yield f"{name}: may write to its root, or keeps capabilities"
    for other, condition in service.get("depends_on", {}).items():
        awaited = compose["services"].get(other)
        if awaited is None:
            yield f"{name}: waits for {other}, which is not there"
        elif condition["condition"] == "service_healthy" and "healthcheck" not in awaited:
            yield f"{name}: waits for the health of {other}, which has no check"
    for volume in service.get("volumes", []):
        source = folder / volume.split(":")[0]
        if not source.exists():
            yield f"{name}: mounts {source}, which does not exist"


def _build(name: str, service: Object, folder: Path) -> Iterator[str]:
    build = service["build"]
    context = (folder / build["context"]).resolve()
    path = context / build["dockerfile"]
    if not path.is_file():
        yield f"{name}: there is no {path}"
        return
    file = dockerfile.parse(path.read_text())
    stages = {stage.name: stage for stage in file.stages}
    stage = stages.get(build["target"])
    if stage is None:
        yield f"{name}: the Dockerfile has no stage {build['target']}"
        return
    entry = [word for each in stage.all("ENTRYPOINT") for word in each.words()]
    yield from (f"{name}: {problem}" for problem in code.command_problems([*entry, *service["command"]]))
    if code.port(service["command"][0]) not in stage.ports() if service["command"][0] in code.SETTINGS else True:
        yield f"{name}: the image {stage.name} does not hold it"


def _ours(name: str, service: Object, compose: Object) -> Iterator[str]:
    part = service["command"][0]
    if part not in code.SETTINGS:
        return
    environment = {key: str(value) for key, value in service["environment"].items()}
    yield from code.settings_problems(part, environment)
    yield from code.peer_problems(part, environment)
    for field, address in code.peers(part, environment).items():
        host, _, number = address.rpartition(":")
        peer = compose["services"].get(host)
        if peer is None or number not in peer.get("expose", []):
            yield f"{name}: {field} is {address}, where nothing is"
        elif not set(peer["networks"]) & set(service["networks"]):
            yield f"{name}: shares no network with {host}"
    collector = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").removeprefix("http://")
    host, _, number = collector.rpartition(":")
    if collector and number not in compose["services"].get(host, {}).get("expose", []):
        yield f"{name}: its traces go to {collector}, where nothing is"
    opened = {*service.get("expose", []), *(port.rpartition(":")[2] for port in service.get("ports", []))}
    wanted = [*map(str, code.ports(part).values()), str(code.METRICS_PORT)]
    if opened != set(wanted):
        yield f"{name}: opens {', '.join(sorted(opened)) or 'nothing'}, not {' and '.join(wanted)}"
    settings, grace_s = code.parse(part, environment), seconds(service.get("stop_grace_period", "10s"))
    if settings is not None and grace_s < settings.drain_s + _MARGIN_S:
        yield f"{name}: is killed after {grace_s} s, and drains for {settings.drain_s:g} s"
    yield from _check(name, part, service)


def _check(name: str, part: str, service: Object) -> Iterator[str]:
    test = service.get("healthcheck", {}).get("test", [])
    if test[:1] != ["CMD"]:
        yield f"{name}: has no health check"
        return
    yield from (f"{name}: {problem}" for problem in code.command_problems(test[1:]))
    if not set(test) & code.health_names(part):
        yield f"{name}: its health check asks for another service"


def seconds(duration: str) -> int:
    """The seconds of a duration with one unit, such as 30s or 5m."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def collector_problems(config: Object, endpoint: str, services: set[str]) -> Iterator[str]:
    """Problems of the collector: its pipelines, its port (that of `endpoint`), and the services that it scrapes."""
    pipelines = config["service"]["pipelines"]
    for kind in ("receivers", "processors", "exporters"):
        defined = set(config.get(kind, {}))
        used = {name for pipeline in pipelines.values() for name in pipeline.get(kind, [])}
        yield from (f"{kind}: {name} is used and not defined" for name in sorted(used - defined))
        yield from (f"{kind}: {name} is defined and not used" for name in sorted(defined - used))
    if "traces" not in pipelines:
        yield "traces go nowhere"
    for name, pipeline in pipelines.items():
        if pipeline.get("processors", [""])[0] != "memory_limiter":
            yield f"{name}: memory is not limited first"
    yield from _scrape_problems(config["receivers"].get("prometheus", {}), services)
    listening = config["receivers"].get("otlp", {}).get("protocols", {}).get("grpc", {}).get("endpoint", "")
    if not listening.startswith("0.0.0.0:") or code.port_of(listening) != code.port_of(endpoint):
        yield f"traces are sent to {endpoint}, and it listens at {listening or 'nothing'}"


def _scrape_problems(receiver: Object, services: set[str]) -> Iterator[str]:
    jobs = receiver.get("config", {}).get("scrape_configs", [])
    found = [discovery for job in jobs for discovery in job["dns_sd_configs"]]
    scraped = {name for discovery in found for name in discovery["names"]}
    yield from (f"metrics of {name} are not read" for name in sorted(services - scraped))
    yield from (f"metrics are read of {name}, which is not there" for name in sorted(scraped - services))
    if any(discovery["port"] != code.METRICS_PORT for discovery in found):
        yield f"metrics are not read at {code.METRICS_PORT}"
