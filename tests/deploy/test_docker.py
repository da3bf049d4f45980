"""The Dockerfile and the repository fit together, as far as can be checked without building an image."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import code, dockerfile
from tests.deploy.dockerfile import Ignore

DOCKERFILE = code.ROOT / "deploy/docker/Dockerfile"
TEXT = DOCKERFILE.read_text()
HEAVY = ("torch", "transformers", "numpy", "safetensors", "triton")


@pytest.fixture(scope="module")
def ignore() -> Ignore:
    """The rules of .dockerignore."""
    return Ignore((code.ROOT / ".dockerignore").read_text())


def test_the_dockerfile_agrees_with_the_repository(ignore: Ignore) -> None:
    assert dockerfile.problems(TEXT, ignore, code.ROOT) == []


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([program, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")


def test_each_image_exposes_the_ports_of_its_services() -> None:
    file = dockerfile.parse(TEXT)
    held = {stage.name: stage.ports() for stage in file.stages if stage.all("ENTRYPOINT")}
    light = {
        code.METRICS_PORT,
        *(port for name in ("gateway", "scheduler", "cache") for port in code.ports(name).values()),
    }
    assert held == {"mesh": light, "worker": {code.port("worker"), code.METRICS_PORT}}


def test_versions_in_the_dockerfile_are_those_of_the_project() -> None:
    tools = next(name for name in code.extras()["dev"] if name.startswith("grpcio-tools"))
    assert f" {tools}\n" in TEXT
    assert f":{code.project()['version']} ." in TEXT


def test_no_later_step_replaces_the_installed_torch() -> None:
    """If torch needed another Triton than the project pins, the next pip step would install an older torch."""
    wanted = {"torch==2.11.0": "triton==3.6.0", "torch==2.12.0": "triton==3.7.0", "torch==2.13.0": "triton==3.7.1"}
    releases = re.findall(r"^ARG TORCH=(\S+)$", TEXT, re.MULTILINE)
    releases += re.findall(r"make serve .*TORCH=(\S+)", (code.ROOT / "README.md").read_text())
    assert len(releases) == 2, "one release in the Dockerfile, one in the README for GPUs"
    for torch in releases:
        assert wanted[torch] in code.extras()["worker"]


def test_stubs_and_caches_stay_out_of_the_context(ignore: Ignore) -> None:
    assert ignore.excludes("protos/mesh_pb2.py")
    assert ignore.excludes("services/cache/__pycache__/store.cpython-311.pyc")
    assert ignore.excludes(".venv/bin/python")
    assert ignore.excludes("models/weft-story-11m/model.safetensors")
    assert ignore.excludes(".git/config")
    assert not ignore.excludes("services/cache/store.py")
    assert not ignore.excludes("protos/mesh.proto")


def test_the_small_image_asks_for_nothing_heavy() -> None:
    install = " ".join(each.rest for each in dockerfile.parse(TEXT).stage("mesh-build").all("RUN"))
    match = re.search(r"\.\[([\w,]+)\]", install)
    assert match is not None
    wanted = [requirement for extra in match[1].split(",") for requirement in code.extras()[extra]]
    assert not [requirement for requirement in wanted if requirement.startswith(HEAVY)]


@pytest.mark.parametrize("service", ["gateway", "scheduler", "cache"])
def test_a_light_service_never_imports_what_its_image_lacks(service: str) -> None:
    program = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # Importing it raises ImportError, as if it were not installed.
import services.health, weft.cli.app, services.{service}.main
"""
    environment = {**os.environ, "PYTHONPATH": str(code.ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("COPY services ./services", "COPY servers ./services", "servers does not exist"),
        ("COPY kernels ./kernels", "COPY models ./models", ".dockerignore leaves models out"),
        ("--from=stubs", "--from=stub", "there is no stage stub before this one"),
        ("AS stubs", "AS stubbed", "there is no stage stubs before this one"),
        ("[gateway,cache,telemetry]", "[gateway,cash]", "there is no extra cash"),
        ('["weft", "serve"]', '["weft", "run"]', "is not `weft serve SERVICE`"),
        ('CMD ["worker"]', 'CMD ["wrker"]', "wrker is no service"),
        ("EXPOSE 50061", "EXPOSE 50062", "no service listens at 50062"),
        ("EXPOSE 50061", "EXPOSE 50051", "does not expose what worker listens at"),
        ("EXPOSE 50051 8000", "EXPOSE 50051", "does not expose what gateway listens at"),
        ("USER 10001:10001", "USER weft", "not an unprivileged number"),
        ("USER 10001:10001", "USER 0:0", "not an unprivileged number"),
        ("ARG TORCH=torch==2.11.0\n", "", "${TORCH} is not set in this stage"),
        ("BASE=python:3.12.12-slim-bookworm", "BASE=python:3-slim", "python:3-slim is not pinned"),
        (" --no-cache-dir", "", "pip's cache stays in the image"),
    ],
)
def test_each_mistake_is_found(ignore: Ignore, old: str, new: str, complaint: str) -> None:
    assert old in TEXT
    found = dockerfile.problems(TEXT.replace(old, new), ignore, code.ROOT)
    assert any(complaint in problem for problem in found), found


@pytest.mark.parametrize("text", ["HEALTHCHECK NONE", "RUN true", "FROM python:3.12.1", "FROM a:1.2.3 AS a\nADD x y"])
def test_an_unsupported_instruction_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line"):
        dockerfile.parse(text)


def test_a_command_in_a_shell_is_refused(ignore: Ignore) -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        dockerfile.problems(TEXT.replace('CMD ["worker"]', "CMD worker"), ignore, code.ROOT)


@pytest.mark.parametrize(
    ("pattern", "path", "excluded"),
    [
        ("*", "a/b", True),
        ("*\n!a", "a/b", False),
        ("*\n!a\n**/b", "a/b", True),
        ("b", "a/b", False),
        ("**/*.pyc", "b.pyc", True),
        ("a/?", "a/b", True),
        ("a/?", "a/bc", False),
        ("# a", "a", False),
    ],
)
def test_dockerignore_patterns(pattern: str, path: str, excluded: bool) -> None:
    assert Ignore(pattern).excludes(path) is excluded
