"""The compose file agrees with its specification, the Dockerfile and the code; the collector receives the traces."""

import copy
from collections.abc import Callable

import pytest
import yaml

from tests.deploy import code, compose
from tests.deploy.compose import Object

FOLDER = code.ROOT / "deploy"
ENDPOINT = "http://otel-collector:4317"
MEASURED = {*code.SETTINGS, "worker-gpu"}


@pytest.fixture(scope="module")
def written() -> Object:
    """The compose file."""
    return compose.load(FOLDER / "compose.yaml")


@pytest.fixture
def mesh(written: Object) -> Object:
    """A copy of the compose file that a test may break."""
    return copy.deepcopy(written)


@pytest.fixture
def collector() -> Object:
    """The collector's configuration."""
    config: Object = yaml.safe_load((FOLDER / "otel-collector.yaml").read_text())
    return config


def test_the_compose_file_is_valid(written: Object) -> None:
    assert compose.specification_problems(written) == []


def test_the_compose_file_agrees_with_the_code(written: Object) -> None:
    assert compose.problems(written, FOLDER) == []


def test_every_service_is_defined_and_workers_have_profiles(written: Object) -> None:
    services = written["services"]
    assert {service["command"][0] for service in services.values()} >= code.SETTINGS.keys()
    profiles = {name: service["profiles"] for name, service in services.items() if "profiles" in service}
    assert profiles == {"worker": ["cpu"], "worker-gpu": ["gpu"]}
    assert services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"


def test_only_this_machine_reaches_the_gateway(written: Object) -> None:
    assert written["services"]["gateway"]["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in code.ports("gateway").values()
    ]
    assert written["networks"]["mesh"]["internal"] is True


def test_the_default_model_is_in_the_repository(written: Object) -> None:
    worker = written["services"]["worker"]
    source, target, mode = worker["volumes"][0].split(":")
    assert mode == "ro"
    model = worker["environment"]["MODEL_NAME"].removeprefix(f"{target}/")
    assert (FOLDER / source / model / "config.json").is_file()


def test_the_collector_receives_what_services_send(written: Object, collector: Object) -> None:
    assert list(compose.collector_problems(collector, ENDPOINT, MEASURED)) == []
    services = written["services"]
    assert {services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] for name in code.SETTINGS} == {ENDPOINT}
    # The collector reads the mounted file.
    path = services["otel-collector"]["command"][0].removeprefix("--config=")
    assert services["otel-collector"]["volumes"] == [f"./otel-collector.yaml:{path}:ro"]


def service(mesh: Object, name: str) -> Object:
    found: Object = mesh["services"][name]
    return found


def discovery(collector: Object) -> Object:
    job = collector["receivers"]["prometheus"]["config"]["scrape_configs"][0]
    found: Object = job["dns_sd_configs"][0]
    return found


BROKEN: dict[str, tuple[Callable[[Object], object], str]] = {
    "command": (lambda m: service(m, "cache").update(command=["cash"]), "cash is no service"),
    "image": (lambda m: service(m, "worker")["build"].update(target="mesh"), "the image mesh does not hold it"),
    "stage": (lambda m: service(m, "cache")["build"].update(target="cache"), "has no stage cache"),
    "Dockerfile": (lambda m: service(m, "cache")["build"].update(dockerfile="Dockerfile"), "there is no"),
    "moving image": (lambda m: service(m, "redis").update(image="valkey/valkey:latest"), "is not pinned"),
    "variable": (lambda m: service(m, "cache")["environment"].update(WEFT_REDIS="x"), "WEFT_REDIS is no setting"),
    "value": (lambda m: service(m, "cache")["environment"].update(WEFT_DRAIN_S="long"), "valid number"),
    "loopback": (
        lambda m: service(m, "cache")["environment"].update(WEFT_LISTEN="127.0.0.1:50053"),
        "which others do not reach",
    ),
    "remote": (
        lambda m: service(m, "cache")["environment"].pop("WEFT_ALLOW_UNPROTECTED"),
        "without WEFT_ALLOW_UNPROTECTED",
    ),
    "peer": (
        lambda m: service(m, "gateway")["environment"].update(WEFT_CACHE_ADDRESS="cache:50054"),
        "cache_address is cache:50054, where nothing is",
    ),
    "no peer": (
        lambda m: service(m, "worker")["environment"].pop("WEFT_SCHEDULER_ADDRESS"),
        "scheduler_address is not given",
    ),
    "network": (lambda m: service(m, "redis").update(networks=["public"]), "shares no network with redis"),
    "collector": (
        lambda m: service(m, "cache")["environment"].update(OTEL_EXPORTER_OTLP_ENDPOINT="http://otel-collector:4318"),
        "its traces go to otel-collector:4318",
    ),
    "port": (lambda m: service(m, "scheduler").update(expose=["50053"]), "opens 50053, not 50052"),
    "HTTP": (
        lambda m: service(m, "gateway")["environment"].update(WEFT_GATEWAY_HTTP_PORT="0"),
        "gateway: HTTP is at no port, not at 8000",
    ),
    "metrics": (
        lambda m: service(m, "cache")["environment"].update(WEFT_METRICS_PORT="9090"),
        "its metrics are at 9090, not at 9464",
    ),
    "published": (lambda m: service(m, "redis").update(ports=["6379:6379"]), "not the gateway alone"),
    "drain": (lambda m: service(m, "worker").update(stop_grace_period="20s"), "is killed after 20 s"),
    "check": (lambda m: service(m, "cache").pop("healthcheck"), "cache: has no health check"),
    "check's name": (
        lambda m: service(m, "cache")["healthcheck"]["test"].__setitem__(-1, "weft.v1.Scheduler"),
        "weft.v1.Scheduler is no health name of the cache",
    ),
    "check's module": (
        lambda m: service(m, "cache")["healthcheck"]["test"].__setitem__(3, "services.healthy"),
        "there is no module services.healthy",
    ),
    "awaited": (
        lambda m: service(m, "cache").update(depends_on={"valkey": {"condition": "service_healthy"}}),
        "waits for valkey, which is not there",
    ),
    "awaited without a check": (
        lambda m: service(m, "cache").update(depends_on={"otel-collector": {"condition": "service_healthy"}}),
        "which has no check",
    ),
    "mount": (lambda m: service(m, "worker").update(volumes=["./weights:/models"]), "which does not exist"),
    "root": (lambda m: service(m, "cache").pop("read_only"), "may write to its root"),
    "unbounded Redis": (lambda m: service(m, "redis").update(mem_limit="512m"), "its container has 512m"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_each_mistake_is_found(mesh: Object, mistake: str) -> None:
    change, complaint = BROKEN[mistake]
    change(mesh)
    found = compose.problems(mesh, FOLDER)
    assert any(complaint in problem for problem in found), found


@pytest.mark.parametrize(
    "change",
    [
        lambda m: service(m, "cache").update(imagee="weft"),
        lambda m: service(m, "cache").update(restart="sometimes"),
        lambda m: service(m, "cache").update(networks=["nowhere"]),
        lambda m: service(m, "cache")["healthcheck"].update(tests=["CMD", "true"]),
    ],
)
def test_what_the_specification_forbids_is_found(mesh: Object, change: Callable[[Object], object]) -> None:
    change(mesh)
    assert compose.specification_problems(mesh)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c["exporters"].clear(), "exporters: debug is used and not defined"),
        (lambda c: c["exporters"].update(otlp={}), "exporters: otlp is defined and not used"),
        (lambda c: c["service"]["pipelines"].pop("traces"), "traces go nowhere"),
        (lambda c: discovery(c)["names"].remove("cache"), "metrics of cache are not read"),
        (lambda c: discovery(c)["names"].append("cash"), "metrics are read of cash, which is not there"),
        (lambda c: discovery(c).update(port=9090), "metrics are not read at 9464"),
        (lambda c: c["service"]["pipelines"]["traces"].update(processors=["batch"]), "memory is not limited first"),
        (lambda c: c["receivers"]["otlp"]["protocols"]["grpc"].update(endpoint="0.0.0.0:4318"), "listens at"),
        (lambda c: c["receivers"]["otlp"]["protocols"]["grpc"].update(endpoint="localhost:4317"), "listens at"),
    ],
)
def test_each_mistake_in_the_collectors_configuration_is_found(
    collector: Object, change: Callable[[Object], object], complaint: str
) -> None:
    change(collector)
    assert complaint in "\n".join(compose.collector_problems(collector, ENDPOINT, MEASURED))
