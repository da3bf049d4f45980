"""The Kubernetes manifests agree with Kubernetes and the code, and the checks find each kind of mistake in them."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.build.choose import resolve_engine
from services.worker.settings import WorkerSettings
from tests.deploy import code, manifests
from tests.deploy.manifests import Object

KUSTOMIZE = code.ROOT / "deploy/kustomize"
OVERLAYS = ("cpu", "gpu", "roles")

pytestmark = pytest.mark.skipif(manifests.renderer() is None, reason="neither kustomize nor kubectl is here")


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    """The objects of each overlay."""
    return {name: manifests.render(KUSTOMIZE / "overlays" / name) for name in OVERLAYS}


@pytest.fixture
def mesh(rendered: dict[str, list[Object]]) -> list[Object]:
    """A copy of the GPU overlay's objects that a test may break."""
    return copy.deepcopy(rendered["gpu"])


@pytest.mark.parametrize("release", manifests.RELEASES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_accepts_every_field(rendered: dict[str, list[Object]], overlay: str, release: str) -> None:
    assert manifests.schema_problems(rendered[overlay], release) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifests_agree_with_the_code(rendered: dict[str, list[Object]], overlay: str) -> None:
    assert manifests.problems(rendered[overlay]) == []


def test_the_ports_of_the_base_are_declared_as_plain_ones() -> None:
    found = manifests.problems(manifests.render(KUSTOMIZE / "base"))
    assert not [each for each in found if "declare" in each]


def test_every_service_has_a_deployment(rendered: dict[str, list[Object]]) -> None:
    for objects in rendered.values():
        deployed = map(manifests.without_role, manifests.Manifests(objects).deployments)
        assert {*code.SETTINGS, "redis"} == set(deployed)


def test_workers_of_each_role_are_scaled_alone(rendered: dict[str, list[Object]]) -> None:
    mesh = manifests.Manifests(rendered["roles"])
    for role in ("prefill", "decode"):
        worker = deployment(rendered["roles"], f"worker-{role}")
        environment = mesh.environment(container(rendered["roles"], f"worker-{role}"))
        settings = code.parse("worker", environment)
        assert isinstance(settings, WorkerSettings)
        assert settings.role == role
        scaled = mesh.named("HorizontalPodAutoscaler", worker["metadata"]["name"])
        assert scaled is not None
        assert scaled["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    assert "worker" not in mesh.deployments


def test_only_the_gpu_overlay_asks_for_a_gpu(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        mesh = manifests.Manifests(objects)
        limits = [pod["containers"][0]["resources"]["limits"] for each, pod, _ in mesh.ours() if each == "worker"]
        assert [each.get("nvidia.com/gpu") for each in limits] == ([1] if name == "gpu" else [None] * len(limits))


def test_a_gpu_runs_as_large_a_batch_as_without_manifests(mesh: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifests set no batch size for all workers, because the default depends on the device."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    worker = code.parse("worker", manifests.Manifests(mesh).environment(container(mesh, "worker")))
    assert isinstance(worker, WorkerSettings)
    for size in ("max_batch_size", "step_tokens", "chunk_tokens"):
        assert getattr(resolve_engine(worker), size) == getattr(resolve_engine(WorkerSettings()), size), size


def test_loading_may_take_ten_minutes(mesh: list[Object]) -> None:
    probe = container(mesh, "worker")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 600


def with_component(folder: Path, name: str) -> list[Object]:
    """The GPU overlay with a component added; asserts that all checks of the overlays hold for it."""

    def near(path: str) -> str:
        return os.path.relpath(KUSTOMIZE / path, folder.resolve())

    resources, component = near("overlays/gpu"), near(f"components/{name}")
    (folder / "kustomization.yaml").write_text(f"resources: [{resources}]\ncomponents: [{component}]\n")
    objects = manifests.render(folder)
    assert manifests.problems(objects) == []
    assert manifests.schema_problems(objects, manifests.RELEASES[-1]) == []
    return objects


def test_a_model_may_come_from_an_image(tmp_path: Path) -> None:
    objects = with_component(tmp_path, "model-image")
    volumes = deployment(objects, "worker")["spec"]["template"]["spec"]["volumes"]
    assert [volume["image"]["reference"] for volume in volumes if volume["name"] == "models"] == [
        "weft-story-11m:0.1.0"
    ]
    assert not [thing for thing in objects if thing["kind"] == "PersistentVolumeClaim"]


def test_tenants_may_come_from_a_secret(tmp_path: Path) -> None:
    objects = with_component(tmp_path, "tenants")
    file = manifests.Manifests(objects).environment(container(objects, "gateway"))["WEFT_TENANTS_FILE"]
    mounts = {mount["name"]: mount for mount in container(objects, "gateway")["volumeMounts"]}
    assert Path(file).parent == Path(mounts["tenants"]["mountPath"])
    volumes = {volume["name"]: volume for volume in pod(objects, "gateway")["volumes"]}
    assert volumes["tenants"]["secret"]["secretName"] == "weft-tenants"


def test_the_overlay_in_the_readme_is_valid(tmp_path: Path) -> None:
    text = (code.ROOT / "deploy/README.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    path = os.path.relpath(KUSTOMIZE, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(example.replace("../weft/deploy/kustomize", path))
    objects = manifests.render(tmp_path)
    assert manifests.problems(objects) == []
    assert manifests.schema_problems(objects, manifests.RELEASES[-1]) == []
    assert container(objects, "worker")["image"] == "registry.example/weft-worker:0.1.0"
    worker = manifests.Manifests(objects).environment(container(objects, "worker"))
    assert worker["MODEL_NAME"] == "/models/my-model"
    assert worker["WEFT_ADVERTISE"] == "10.0.0.7:50061"
    assert {thing["metadata"]["namespace"] for thing in objects} == {"weft"}


# ---- each mistake is found ----


def deployment(objects: list[Object], component: str) -> Object:
    return manifests.Manifests(objects).deployments[component]


def pod(objects: list[Object], component: str) -> Object:
    spec: Object = deployment(objects, component)["spec"]["template"]["spec"]
    return spec


def container(objects: list[Object], component: str) -> Object:
    first: Object = pod(objects, component)["containers"][0]
    return first


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(each for each in objects if each["kind"] == kind and each["metadata"]["name"].startswith(name))


def config(objects: list[Object], name: str, **values: str) -> None:
    named(objects, "ConfigMap", f"{name}-")["data"].update(values)


def env(objects: list[Object], component: str, name: str, value: str) -> None:
    variables = container(objects, component)["env"]
    variables[:] = [each for each in variables if each["name"] != name]
    variables.append({"name": name, "value": value})


def without_credentials(objects: list[Object], component: str) -> None:
    for name in ("WEFT_TLS_CERT", "WEFT_MESH_SECRET_FILE"):
        env(objects, component, name, "")


def remove(objects: list[Object], kind: str, name: str) -> None:
    objects.remove(named(objects, kind, name))


def policy(objects: list[Object], name: str) -> Object:
    rule: Object = named(objects, "NetworkPolicy", name)["spec"]["ingress"][0]
    return rule


def asked(objects: list[Object], component: str, kind: str) -> list[str]:
    """The command of a probe."""
    command: list[str] = container(objects, component)[kind]["exec"]["command"]
    return command


def replace(values: list[Any], old: object, new: object) -> None:
    values[values.index(old)] = new


BROKEN: dict[str, tuple[Callable[[list[Object]], object], str]] = {
    "container port": (
        lambda m: container(m, "cache")["ports"][0].update(containerPort=50054),
        "cache: its container opens",
    ),
    "HTTP that nobody reaches": (
        lambda m: policy(m, "weft-gateway").update(ports=[{"port": "grpc"}]),
        "gateway: no policy lets callers reach it at 8000",
    ),
    "metrics": (
        lambda m: config(m, "weft-common", WEFT_METRICS_PORT="0"),
        "cache: its metrics are at no port, not at 9464",
    ),
    "metrics that Prometheus does not find": (
        lambda m: deployment(m, "cache")["spec"]["template"]["metadata"].pop("annotations"),
        "cache: Prometheus is given another port",
    ),
    "service port": (
        lambda m: named(m, "Service", "weft-cache")["spec"]["ports"][0].update(port=80),
        "cache_address is weft-cache:50053, which weft-cache does not offer",
    ),
    "target port": (
        lambda m: named(m, "Service", "weft-redis")["spec"]["ports"][0].update(targetPort="grpc"),
        "redis opens no port grpc",
    ),
    "protocol": (
        lambda m: named(m, "Service", "weft-worker")["spec"]["ports"][0].pop("appProtocol"),
        "does not declare HTTP/2",
    ),
    "protocol without TLS": (
        lambda m: named(m, "Service", "weft-gateway")["spec"]["ports"][1].update(appProtocol="http"),
        "does not declare HTTP over TLS",
    ),
    "service selector": (
        lambda m: named(m, "Service", "weft-scheduler")["spec"].update(selector={"app": "scheduler"}),
        "weft-scheduler: selects nothing",
    ),
    "deployment selector": (
        lambda m: deployment(m, "cache")["spec"]["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
        "Deployment weft-cache: its selector is not its own",
    ),
    "unknown variable": (
        lambda m: config(m, "weft-gateway", WEFT_SCHEDULER_ADRESS="weft-scheduler:50052"),
        "WEFT_SCHEDULER_ADRESS is no setting of it",
    ),
    "another service's variable": (
        lambda m: config(m, "weft-scheduler", MAX_BATCH_SIZE="8"),
        "scheduler: MAX_BATCH_SIZE is no setting",
    ),
    "a value that does not parse": (lambda m: config(m, "weft-worker", MAX_BATCH_SIZE="many"), "valid integer"),
    "a value out of range": (lambda m: config(m, "weft-common", WEFT_DRAIN_S="-1"), "greater than or equal to 0"),
    "loopback": (lambda m: env(m, "cache", "WEFT_LISTEN", "127.0.0.1:50053"), "which others do not reach"),
    "another listening port": (lambda m: env(m, "cache", "WEFT_LISTEN", "0.0.0.0:1234"), "listens at 1234"),
    "remote forbidden": (
        lambda m: without_credentials(m, "cache"),
        "without WEFT_ALLOW_UNPROTECTED",
    ),
    "peer left out": (
        lambda m: named(m, "ConfigMap", "weft-worker-")["data"].pop("WEFT_SCHEDULER_ADDRESS"),
        "worker: scheduler_address is not given",
    ),
    "peer on loopback": (
        lambda m: config(m, "weft-cache", WEFT_REDIS_URL="redis://127.0.0.1:6379/0"),
        "cache: redis_url is 127.0.0.1:6379, its own container",
    ),
    "peer that is not there": (
        lambda m: config(m, "weft-gateway", WEFT_CACHE_ADDRESS="weft-cash:50053"),
        "there is no service weft-cash",
    ),
    "unknown command": (lambda m: container(m, "cache").update(args=["cash"]), "cash is no service"),
    "another command": (lambda m: container(m, "cache").update(command=["weft-cache"]), "no command of ours"),
    "another service's command": (lambda m: container(m, "cache").update(args=["gateway"]), "container runs gateway"),
    "image without it": (lambda m: container(m, "worker").update(image="weft:0.1.0"), "image mesh does not hold it"),
    "moving image": (lambda m: container(m, "gateway").update(image="weft:latest"), "weft:latest is not pinned"),
    "no pull policy": (lambda m: container(m, "gateway").pop("imagePullPolicy"), "no pull policy"),
    "probe of an unknown name": (
        lambda m: replace(asked(m, "gateway", "readinessProbe"), "weft.v1.Gateway", "weft.v1.Portal"),
        "its readinessProbe asks for weft.v1.Portal",
    ),
    "gateways that wait for workers": (
        lambda m: replace(asked(m, "gateway", "readinessProbe"), "weft.v1.Gateway", "weft.v1.Inference"),
        "gateway: would not be ready while no worker is",
    ),
    "probe of another port": (
        lambda m: replace(asked(m, "gateway", "livenessProbe"), "127.0.0.1:50051", "127.0.0.1:50052"),
        "its livenessProbe asks port 50052",
    ),
    "ready too early": (
        lambda m: asked(m, "worker", "readinessProbe").append("--listening"),
        "worker: would be ready before it is",
    ),
    "restarted while it waits": (
        lambda m: asked(m, "gateway", "livenessProbe").pop(),
        "gateway: would be restarted because it is not ready",
    ),
    "no probe": (lambda m: container(m, "worker").pop("startupProbe"), "worker: has no startupProbe"),
    "killed while it drains": (
        lambda m: pod(m, "gateway").update(terminationGracePeriodSeconds=30),
        "gateway: is killed after 30 s, and drains for 40",
    ),
    "root": (lambda m: pod(m, "cache")["securityContext"].pop("runAsNonRoot"), "cache: may run as root"),
    "another user than the image's": (
        lambda m: pod(m, "cache")["securityContext"].update(runAsUser=1000),
        "runs as 1000, its image as 10001",
    ),
    "writable root": (
        lambda m: container(m, "redis")["securityContext"].update(readOnlyRootFilesystem=False),
        "redis: may write to its root",
    ),
    "capabilities": (
        lambda m: container(m, "worker")["securityContext"].pop("capabilities"),
        "worker: keeps capabilities",
    ),
    "seccomp": (lambda m: pod(m, "worker")["securityContext"].pop("seccompProfile"), "no seccomp profile"),
    "token": (lambda m: pod(m, "cache").pop("automountServiceAccountToken"), "holds a token"),
    "service links": (lambda m: pod(m, "cache").pop("enableServiceLinks"), "get among its settings"),
    "no place to write": (lambda m: container(m, "cache").update(volumeMounts=[]), "cache: has no /tmp"),
    "no bound on memory": (lambda m: container(m, "cache")["resources"].pop("limits"), "may take all memory"),
    "more asked than allowed": (
        lambda m: container(m, "cache")["resources"]["requests"].update(memory="2Gi"),
        "asks for more memory",
    ),
    "config map": (lambda m: remove(m, "ConfigMap", "weft-cache-"), "cache: there is no ConfigMap weft-cache-"),
    "claim": (lambda m: remove(m, "PersistentVolumeClaim", "weft-models"), "there is no claim weft-models"),
    "volume": (lambda m: pod(m, "worker").update(volumes=[]), "worker: there is no volume models"),
    "secret": (
        lambda m: container(m, "cache")["envFrom"].append({"secretRef": {"name": "redis-password"}}),
        "cache: there is no Secret redis-password",
    ),
    "budget": (
        lambda m: named(m, "PodDisruptionBudget", "weft-cache")["spec"]["selector"].update(matchLabels={"a": "b"}),
        "PodDisruptionBudget weft-cache: protects nothing",
    ),
    "autoscaler": (
        lambda m: named(m, "HorizontalPodAutoscaler", "weft")["spec"]["scaleTargetRef"].update(name="weft"),
        "there is no weft",
    ),
    "replicas set beside an autoscaler": (
        lambda m: deployment(m, "gateway")["spec"].update(replicas=2),
        "weft-gateway sets its own number of replicas",
    ),
    "two schedulers": (
        lambda m: deployment(m, "scheduler")["spec"].update(strategy={"type": "RollingUpdate"}),
        "two of it could be there at once",
    ),
    "a call that is not allowed": (
        lambda m: replace(
            policy(m, "weft-scheduler")["from"][0]["podSelector"]["matchExpressions"][0]["values"], "worker", "x"
        ),
        "no policy lets worker call scheduler at 50052",
    ),
    "a wrong port in a policy": (
        lambda m: policy(m, "weft-redis").update(ports=[{"port": 6380}]),
        "no policy lets cache call redis at 6379",
    ),
    "a call from any pod": (lambda m: policy(m, "weft-worker").pop("from"), "worker: other pods may call it"),
    "a policy for all pods": (
        lambda m: named(m, "NetworkPolicy", "weft-deny")["spec"].update(podSelector={}),
        "selects pods of other projects",
    ),
    "a Redis that grows": (
        lambda m: replace(container(m, "redis")["args"], "1gb", "2gb"),
        "redis: takes 2gb, and its container has 1536Mi",
    ),
    "a Redis that refuses": (
        lambda m: replace(container(m, "redis")["args"], "allkeys-lru", "noeviction"),
        "redis: evicts by noeviction",
    ),
    "more results than Redis holds": (
        lambda m: config(m, "weft-cache", WEFT_CACHE_RESULT_BYTES=str(2 << 30)),
        "cannot hold the results",
    ),
    "more blocks than Redis holds beside the results": (
        lambda m: config(m, "weft-cache", WEFT_CACHE_BLOCK_BYTES=str(1000 << 20)),
        "cannot hold the results, blocks and vectors",
    ),
    "more vectors than Redis holds beside the rest": (
        lambda m: config(m, "weft-cache", WEFT_CACHE_VECTOR_BYTES=str(512 << 20)),
        "cannot hold the results, blocks and vectors",
    ),
    "a rollout that is given up too early": (
        lambda m: deployment(m, "worker")["spec"].pop("progressDeadlineSeconds"),
        "worker: its rollout is given up after 600 s, and a model may load for 600",
    ),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_each_mistake_is_found(mesh: list[Object], mistake: str) -> None:
    change, complaint = BROKEN[mistake]
    change(mesh)
    assert any(complaint in problem for problem in manifests.problems(mesh)), manifests.problems(mesh)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: container(m, "cache").update(imagePullPolicie="Always"), "imagePullPolicie"),
        (lambda m: container(m, "cache")["ports"][0].update(containerPort="50053"), "50053"),
        (lambda m: deployment(m, "cache").update(apiVersion="apps/v1beta1"), "Couldn't find schema"),
        (lambda m: named(m, "Service", "weft-cache")["spec"].update(ports="50053"), "50053"),
    ],
)
def test_fields_and_values_unknown_to_kubernetes_are_found(
    mesh: list[Object], change: Callable[[list[Object]], object], complaint: str
) -> None:
    change(mesh)
    assert complaint in "\n".join(manifests.schema_problems(mesh, manifests.RELEASES[-1]))
