"""Renders Kubernetes manifests and checks them against the schemas of Kubernetes, each other and the code.

Functions that check something yield one sentence for each problem.
"""

import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubernetes_validate import utils

from services.cache.settings import CacheSettings
from tests.deploy import code, dockerfile

Object = dict[str, Any]

# The oldest release with all features in use (preStop's sleep without a feature gate), and the newest with schemas.
RELEASES = ("1.30", "1.37")
_MARGIN_S = 5
# The default of Kubernetes, for a Deployment that sets none.
_PROGRESS_S = 600
_NAME = "app.kubernetes.io/name"
_COMPONENT = "app.kubernetes.io/component"
_ROLE = "weft.role"
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def renderer() -> list[str] | None:
    """The command that renders a kustomization; None if this machine has none."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


def render(folder: Path) -> list[Object]:
    """The rendered objects of a kustomization. Raises CalledProcessError."""
    command = renderer()
    assert command is not None
    text = subprocess.run([*command, str(folder)], check=True, capture_output=True, text=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))


utils.schema_contents = functools.cache(utils.schema_contents)
"""The library reads a schema of a megabyte again for each object."""


def schema_problems(objects: list[Object], release: str) -> list[str]:
    """Problems: unknown fields, missing fields, and values of a wrong type."""
    found = []
    for thing in objects:
        try:
            kubernetes_validate.validate(thing, release, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{title(thing)}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(f"{title(thing)}: {error.message}")
    return found


def title(thing: Object) -> str:
    """Kind and name of an object, for messages."""
    return f"{thing['kind']} {thing['metadata']['name']}"


def problems(objects: list[Object]) -> list[str]:
    """All problems beside those of the schemas."""
    mesh = Manifests(objects)
    checks: list[Callable[[Manifests], Iterator[str]]] = [
        _references,
        _commands,
        _ports,
        _environments,
        _probes,
        _deadlines,
        _drains,
        _confinement,
        _images_and_resources,
        _services,
        _selectors,
        _policies,
        _redis,
    ]
    return [problem for check in checks for problem in check(mesh)]


class Manifests:
    """The rendered objects by kind and name, with the look-ups that several checks need."""

    def __init__(self, objects: list[Object]) -> None:
        self._objects = objects
        self.deployments = {self.component(thing): thing for thing in self.kind("Deployment")}

    def kind(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [thing for thing in self._objects if thing["kind"] == kind]

    def named(self, kind: str, name: str) -> Object | None:
        """The object of this kind and name, or None."""
        return next((thing for thing in self.kind(kind) if thing["metadata"]["name"] == name), None)

    @staticmethod
    def component(deployment: Object) -> str:
        """The component of the mesh that a deployment runs, and behind a hyphen its role if it has one."""
        labels = _pod_labels(deployment)
        name = str(labels.get(_COMPONENT, deployment["metadata"]["name"]))
        return f"{name}-{labels[_ROLE]}" if _ROLE in labels else name

    def first(self, component: str) -> Object:
        """The first deployment of a component."""
        return next(thing for name, thing in self.deployments.items() if without_role(name) == component)

    def ours(self) -> Iterator[tuple[str, Object, Object]]:
        """(component, pod, container) of each deployment that runs the project's code."""
        for component, deployment in self.deployments.items():
            if without_role(component) in code.SETTINGS:
                pod = _pod(deployment)
                yield without_role(component), pod, pod["containers"][0]

    def environment(self, container: Object) -> dict[str, str]:
        """The environment of a container: its ConfigMaps, then its own variables with references replaced."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            config = self.named("ConfigMap", source.get("configMapRef", {}).get("name", ""))
            found.update(config["data"] if config else {})
        for variable in container.get("env", []):
            value = variable.get("value", "10.0.0.7" if "valueFrom" in variable else "")
            for name, replacement in list(found.items()):
                value = value.replace(f"$({name})", replacement)
            found[variable["name"]] = value
        return found

    def select(self, selector: Object) -> list[str]:
        """The components whose pods a label selector matches."""
        return list(dict.fromkeys(map(without_role, self.select_roles(selector))))

    def select_roles(self, selector: Object) -> list[str]:
        """The same, each role for itself."""
        return [name for name, thing in self.deployments.items() if _matches(selector, _pod_labels(thing))]


def without_role(component: str) -> str:
    """worker of worker-decode."""
    return component.partition("-")[0]


def _pod(deployment: Object) -> Object:
    pod: Object = deployment["spec"]["template"]["spec"]
    return pod


def _pod_labels(deployment: Object) -> Object:
    labels: Object = deployment["spec"]["template"]["metadata"].get("labels", {})
    return labels


def _matches(selector: Object, labels: Object) -> bool:
    same = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions), "only the operator In is supported"
    return same and all(labels.get(each["key"]) in each["values"] for each in expressions)


def _container_ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


def _references(mesh: Manifests) -> Iterator[str]:
    for component, deployment in mesh.deployments.items():
        pod = _pod(deployment)
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for volume in pod.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and mesh.named("PersistentVolumeClaim", claim) is None:
                yield f"{component}: there is no claim {claim}"
            config = volume.get("configMap", {}).get("name")
            if config and mesh.named("ConfigMap", config) is None:
                yield f"{component}: there is no ConfigMap {config}"
        for container in pod["containers"]:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            yield from (f"{component}: there is no volume {name}" for name in sorted(mounted - volumes))
            yield from (f"{component}: no container mounts {name}" for name in sorted(volumes - mounted))
            for kind, name in _sources(container):
                if mesh.named(kind, name) is None:
                    yield f"{component}: there is no {kind} {name}"


def _sources(container: Object) -> Iterator[tuple[str, str]]:
    kinds = {
        "configMapRef": "ConfigMap",
        "secretRef": "Secret",
        "configMapKeyRef": "ConfigMap",
        "secretKeyRef": "Secret",
    }
    sources = [*container.get("envFrom", []), *(each.get("valueFrom", {}) for each in container.get("env", []))]
    for source in sources:
        for reference, kind in kinds.items():
            if reference in source:
                yield kind, source[reference]["name"]


def _commands(mesh: Manifests) -> Iterator[str]:
    file = dockerfile.parse((code.ROOT / "deploy/docker/Dockerfile").read_text())
    for component, _, container in mesh.ours():
        target = "worker" if container["image"].rpartition("/")[2].startswith("weft-worker:") else "mesh"
        stage = file.stage(target)
        entry = container.get("command") or [word for each in stage.all("ENTRYPOINT") for word in each.words()]
        command = [*entry, *container.get("args", [])]
        yield from (f"{component}: {problem}" for problem in code.command_problems(command))
        if command[-1] != component:
            yield f"{component}: its container runs {command[-1]}"
        if code.port(component) not in stage.ports():
            yield f"{component}: the image {target} does not hold it"


def _ports(mesh: Manifests) -> Iterator[str]:
    for component, _, container in mesh.ours():
        opened = _container_ports(container)
        wanted = {**code.ports(component), "metrics": code.METRICS_PORT}
        if opened != wanted:
            yield f"{component}: its container opens {opened}, not {wanted}"
        annotations = mesh.first(component)["spec"]["template"]["metadata"].get("annotations", {})
        if annotations.get("prometheus.io/port") != str(code.METRICS_PORT):
            yield f"{component}: Prometheus is given another port"


def _environments(mesh: Manifests) -> Iterator[str]:
    for component, _, container in mesh.ours():
        environment = mesh.environment(container)
        yield from code.settings_problems(component, environment)
        yield from code.peer_problems(component, environment)
        for field, address in code.peers(component, environment).items():
            host, _, number = address.rpartition(":")
            service = mesh.named("Service", host)
            if service is None:
                yield f"{component}: {field} is {address}, and there is no service {host}"
            elif int(number) not in {port["port"] for port in service["spec"]["ports"]}:
                yield f"{component}: {field} is {address}, which {host} does not offer"


def _probes(mesh: Manifests) -> Iterator[str]:
    for component, _, container in mesh.ours():
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = _asked(container.get(kind, {}))
            if probe is None:
                yield f"{component}: has no {kind} by gRPC"
                continue
            name = probe.get("service", "")
            if probe["port"] != code.port(component):
                yield f"{component}: its {kind} asks port {probe['port']}"
            if name and name not in code.health_names(component):
                yield f"{component}: its {kind} asks for {name}"
            if kind == "readinessProbe" and not name:
                yield f"{component}: would be ready before it is"
            if kind == "readinessProbe" and name == "weft.v1.Inference":
                yield f"{component}: would not be ready while no worker is"
            if kind == "livenessProbe" and name:
                yield f"{component}: would be restarted because it is not ready"


def _asked(probe: Object) -> Object | None:
    """Port and health name that a probe asks for, by gRPC or by the command `services.health`; None for others."""
    command = probe.get("exec", {}).get("command", [])
    if command[:3] == ["python", "-m", "services.health"]:
        listening = command[5:] == ["--listening"]
        return {"port": int(command[3].rpartition(":")[2]), "service": "" if listening else command[4]}
    found: Object | None = probe.get("grpc")
    return found


def _deadlines(mesh: Manifests) -> Iterator[str]:
    """Problems: a rollout deadline shorter than the load of a model."""
    probes = [container.get("startupProbe", {}) for component, _, container in mesh.ours() if component == "worker"]
    longest = max(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3) for probe in probes)
    given_s = mesh.first("worker")["spec"].get("progressDeadlineSeconds", _PROGRESS_S)
    if given_s <= longest:
        yield f"worker: its rollout is given up after {given_s} s, and a model may load for {longest}"


def _drains(mesh: Manifests) -> Iterator[str]:
    for component, pod, container in mesh.ours():
        slept = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        settings = code.parse(component, mesh.environment(container))
        needed = slept + (settings.drain_s if settings else 0) + _MARGIN_S
        if pod["terminationGracePeriodSeconds"] < needed:
            yield f"{component}: is killed after {pod['terminationGracePeriodSeconds']} s, and drains for {needed:g}"


def _confinement(mesh: Manifests) -> Iterator[str]:
    stages = dockerfile.parse((code.ROOT / "deploy/docker/Dockerfile").read_text()).stages
    users = {stage.last("USER").partition(":")[0] for stage in stages} - {""}
    for component, deployment in mesh.deployments.items():
        pod = _pod(deployment)
        security = pod.get("securityContext", {})
        if not security.get("runAsNonRoot") or not security.get("runAsUser"):
            yield f"{component}: may run as root"
        elif component in code.SETTINGS and {str(security["runAsUser"])} != users:
            yield f"{component}: runs as {security['runAsUser']}, its image as {', '.join(sorted(users))}"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{component}: no seccomp profile"
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{component}: holds a token of the cluster"
        if pod.get("enableServiceLinks") is not False:
            yield f"{component}: variables of services get among its settings"
        for container in pod["containers"]:
            own = container.get("securityContext", {})
            if not own.get("readOnlyRootFilesystem") or own.get("allowPrivilegeEscalation") is not False:
                yield f"{component}: may write to its root or gain privileges"
            if own.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{component}: keeps capabilities"
            mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
            if component in code.SETTINGS and "/tmp" not in mounts:
                yield f"{component}: has no /tmp to write to"


def _images_and_resources(mesh: Manifests) -> Iterator[str]:
    for component, deployment in mesh.deployments.items():
        for container in _pod(deployment)["containers"]:
            if not dockerfile.pinned(container["image"]):
                yield f"{component}: its image {container['image']} is not pinned"
            if "imagePullPolicy" not in container:
                yield f"{component}: no pull policy"
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
                yield f"{component}: asks for no resources, or may take all memory"
            elif _bytes(requests["memory"]) > _bytes(limits["memory"]):
                yield f"{component}: asks for more memory than it may have"


def _services(mesh: Manifests) -> Iterator[str]:
    for service in mesh.kind("Service"):
        chosen = mesh.select({"matchLabels": service["spec"].get("selector", {})})
        if len(chosen) != 1:
            yield f"{title(service)}: selects {', '.join(chosen) or 'nothing'}"
            continue
        served = _pod(mesh.first(chosen[0]))["containers"][0]
        ports, encrypted = _container_ports(served), mesh.environment(served).get("WEFT_TLS_CERT")
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            number = ports.get(target) if isinstance(target, str) else target
            if number not in ports.values():
                yield f"{title(service)}: {chosen[0]} opens no port {target}"
            elif number != port["port"]:
                yield f"{title(service)}: offers {number} as {port['port']}"
            if chosen[0] in code.SETTINGS and port.get("appProtocol") != _protocol(port["name"], bool(encrypted)):
                spoken = "HTTP/2" if port["name"] == "grpc" else "HTTP"
                yield f"{title(service)}: does not declare {spoken} {'over' if encrypted else 'without'} TLS"


def _protocol(port: str, encrypted: bool) -> str:
    """What a port has to be declared as, for proxies that connect to it."""
    if encrypted:
        return "https"
    return "kubernetes.io/h2c" if port == "grpc" else "http"


def _selectors(mesh: Manifests) -> Iterator[str]:
    for component, deployment in mesh.deployments.items():
        if mesh.select_roles(deployment["spec"]["selector"]) != [component]:
            yield f"{title(deployment)}: its selector is not its own"
    for budget in mesh.kind("PodDisruptionBudget"):
        if len(mesh.select(budget["spec"]["selector"])) != 1:
            yield f"{title(budget)}: protects nothing, or too much"
    for scaler in mesh.kind("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        scaled = mesh.named(target["kind"], target["name"])
        if scaled is None:
            yield f"{title(scaler)}: there is no {target['name']}"
        elif "replicas" in scaled["spec"]:
            yield f"{title(scaler)}: {target['name']} sets its own number of replicas"
    scheduler = mesh.deployments["scheduler"]["spec"]
    if scheduler["replicas"] != 1 or scheduler["strategy"]["type"] != "Recreate":
        yield "scheduler: two of it could be there at once"


def _policies(mesh: Manifests) -> Iterator[str]:
    """Problems: a call between services that no policy allows, or a pod that any other pod may call."""
    wanted = {(caller, "worker", code.port("worker")) for caller in ("gateway", "worker")}
    for component, _, container in mesh.ours():
        for address in code.peers(component, mesh.environment(container)).values():
            service = mesh.named("Service", address.rpartition(":")[0])
            if service is not None:
                wanted.update((component, to, code.port_of(address)) for to in _behind(mesh, service))
    for caller, to, number in sorted(wanted):
        if not any(_allows(mesh, policy, caller, to, number) for policy in mesh.kind("NetworkPolicy")):
            yield f"no policy lets {caller} call {to} at {number}"
    confined = {name for policy in mesh.kind("NetworkPolicy") for name in mesh.select(policy["spec"]["podSelector"])}
    for number in code.ports("gateway").values():
        if not any(_allows(mesh, policy, "", "gateway", number) for policy in mesh.kind("NetworkPolicy")):
            yield f"gateway: no policy lets callers reach it at {number}"
    yield from (f"{name}: any pod may call it" for name in sorted({*map(without_role, mesh.deployments)} - confined))
    for policy in mesh.kind("NetworkPolicy"):
        peers = [peer for rule in policy["spec"].get("ingress", []) for peer in rule.get("from", [])]
        chosen = [policy["spec"]["podSelector"], *(peer["podSelector"] for peer in peers if "podSelector" in peer)]
        if not all(_NAME in selector.get("matchLabels", {}) for selector in chosen):
            yield f"{title(policy)}: selects pods of other projects"
    for name in ("scheduler", "cache", "worker", "redis"):
        inner = code.REDIS_PORT if name == "redis" else code.port(name)
        if any(_allows(mesh, policy, "", name, inner) for policy in mesh.kind("NetworkPolicy")):
            yield f"{name}: other pods may call it"


def _behind(mesh: Manifests, service: Object) -> list[str]:
    return mesh.select({"matchLabels": service["spec"]["selector"]})


def _allows(mesh: Manifests, policy: Object, caller: str, to: str, number: int) -> bool:
    if to not in mesh.select(policy["spec"]["podSelector"]):
        return False
    ports = _container_ports(_pod(mesh.first(to))["containers"][0])
    for rule in policy["spec"].get("ingress", []):
        opened = [ports.get(port["port"], port["port"]) for port in rule.get("ports", [{"port": number}])]
        callers = rule.get("from")
        # Peers from other namespaces are not part of the mesh.
        ours = [each["podSelector"] for each in callers or [] if "namespaceSelector" not in each]
        known = callers is None or any(caller in mesh.select(selector) for selector in ours)
        if number in opened and known:
            return True
    return False


def _redis(mesh: Manifests) -> Iterator[str]:
    container = _pod(mesh.deployments["redis"])["containers"][0]
    if list(_container_ports(container).values()) != [code.REDIS_PORT]:
        yield f"redis: does not listen at {code.REDIS_PORT}"
    yield from redis_problems(container["args"], container["resources"]["limits"]["memory"])
    cache = next(container for component, _, container in mesh.ours() if component == "cache")
    settings = code.parse("cache", mesh.environment(cache))
    if isinstance(settings, CacheSettings):
        kept = settings.cache_result_bytes + settings.cache_block_bytes + settings.cache_vector_bytes
        if kept > _bytes(_flag(container["args"], "--maxmemory")):
            yield "redis: cannot hold the results, blocks and vectors that the cache may keep"


def redis_problems(command: list[str], limit: str) -> Iterator[str]:
    """Problems: a Redis without a memory bound, or with a bound above the limit of its container."""
    most, policy = _flag(command, "--maxmemory"), _flag(command, "--maxmemory-policy")
    if not most or _bytes(most) * 1.25 > _bytes(limit):
        yield f"redis: takes {most or 'all memory'}, and its container has {limit}"
    if policy != "allkeys-lru":
        yield f"redis: evicts by {policy or 'nothing'}"


def _flag(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1] if flag in command else ""


def _bytes(quantity: str) -> int:
    for unit, size in {**_UNITS, "m": 1 << 20, "g": 1 << 30}.items():
        if quantity.endswith(unit):
            return int(quantity.removesuffix(unit)) * size
    return int(quantity or 0)
