"""`python -m tests.deploy.replay mesh` runs the build steps of an image in a folder, then the services in it.

Building an image needs a container engine. This replays the steps that may fail: the copies that .dockerignore
permits and every pip and protoc step. Then it starts each service by the image's entry point and checks its
health. Steps that need root (users, system packages) are skipped with a message. `--python` replaces the base image.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from services import health
from tests.deploy import code, dockerfile
from tests.deploy.dockerfile import Dockerfile, Ignore, Instruction, Stage

_ROOT_ONLY = ("useradd", "apt-get")
_HEAVY = ("torch", "transformers", "numpy", "safetensors")
_READY_S = 30.0


class Replay:
    """The stages of a Dockerfile, each with a folder as its root. They share /opt: environments cannot be moved."""

    def __init__(self, file: Dockerfile, folder: Path, python: str) -> None:
        self._file = file
        self._folder = folder
        self._python = python
        self._ignore = Ignore((code.ROOT / ".dockerignore").read_text())

    def build(self, target: str) -> Stage:
        """Replays a stage, after the stages that it copies from. Raises CalledProcessError."""
        stage = self._file.stage(target)
        for instruction in stage.all("COPY"):
            origin = instruction.copies()[0]
            if origin and not (self._folder / origin).exists():
                self.build(origin)
        print(f"== {target}", flush=True)
        root = self._folder / target
        root.mkdir(parents=True)
        place, arguments = root, dict(self._file.arguments)
        for instruction in stage.body:
            match instruction.keyword:
                case "WORKDIR":
                    place = root / instruction.rest.lstrip("/")
                    place.mkdir(parents=True, exist_ok=True)
                case "ARG":
                    name, _, value = instruction.rest.partition("=")
                    arguments[name] = os.environ.get(name, value.strip('"'))
                case "COPY":
                    self._copy(instruction, place)
                case "RUN":
                    self._run(instruction, place, arguments)
        return stage

    def _copy(self, instruction: Instruction, place: Path) -> None:
        origin, sources, target = instruction.copies()
        print(f"-- COPY {instruction.rest}", flush=True)
        if target.startswith("/opt/"):
            return
        root = self._folder / origin if origin else code.ROOT
        for source in sources:
            path = root / source.lstrip("/")
            files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            for file in files:
                if origin or not self._ignore.excludes(file.relative_to(root).as_posix()):
                    inside = file.relative_to(path) if path.is_dir() else Path(file.name)
                    destination = place / target / inside
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, destination)

    def _run(self, instruction: Instruction, place: Path, arguments: dict[str, str]) -> None:
        if instruction.rest.startswith(_ROOT_ONLY):
            print(f"-- left out: RUN {instruction.rest}", flush=True)
            return
        print(f"-- RUN {instruction.rest}", flush=True)
        command = instruction.rest.replace("/opt/", f"{self._folder}/opt/")
        command = command.replace("python -m venv", f"{self._python} -m venv")
        environment = {**os.environ, **arguments, "PIP_QUIET": "2", "PYTHONPATH": ""}
        subprocess.run(["/bin/sh", "-ec", command], cwd=place, env=environment, check=True)

    def command(self, *words: str) -> list[str]:
        """The command line of a program in the image's environment."""
        return [str(self._folder / "opt/weft/bin" / words[0]), *words[1:]]


def _listening_name(service: str) -> str:
    """The health name to wait for. A gateway without a model is never ready, so it is checked by the empty name."""
    return "" if service == "gateway" else f"weft.v1.{service.capitalize()}"


def serve(replay: Replay, stage: Stage, service: str, folder: Path) -> None:
    """Starts a service as its container would, outside of the sources, and waits until it is healthy."""
    with socket.socket() as free, socket.socket() as free_http:
        free.bind(("127.0.0.1", 0))
        free_http.bind(("127.0.0.1", 0))
        address, http_port = f"127.0.0.1:{free.getsockname()[1]}", str(free_http.getsockname()[1])
    entry = [word for instruction in stage.all("ENTRYPOINT") for word in instruction.words()]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "WEFT_LISTEN": address}
    environment |= {"WEFT_GATEWAY_HTTP_PORT": http_port} if service == "gateway" else {}
    environment |= {"MODEL_NAME": str(code.ROOT / "models/weft-story-2m")} if service == "worker" else {}
    process = subprocess.Popen(replay.command(*entry, service), cwd=folder, env=environment)
    try:
        deadline = time.monotonic() + _READY_S
        while (word := health.check(address, _listening_name(service))) != "SERVING":
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{service}: {word}, exit code {process.poll()}")
            time.sleep(0.1)
        subprocess.run(replay.command("python", "-m", "services.health", address), cwd=folder, check=True)
    finally:
        process.send_signal(signal.SIGTERM)
        exit_code = process.wait(30)
    if exit_code != 0:
        raise SystemExit(f"{service}: exit code {exit_code} after SIGTERM")
    print(f"== {service}: serves, and stops", flush=True)


def main() -> None:
    """Replays the build of one image and runs its services."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", choices=["mesh", "worker"])
    parser.add_argument("--python", default=sys.executable, help="stands for the base image's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = dockerfile.parse((code.ROOT / "deploy/docker/Dockerfile").read_text())
        replay = Replay(file, folder, options.python)
        stage = replay.build(options.image)
        if options.image == "mesh":
            absent = f"import importlib.util as u; print([n for n in {_HEAVY!r} if u.find_spec(n)])"
            found = subprocess.run(replay.command("python", "-c", absent), check=True, capture_output=True, text=True)
            if found.stdout.strip() != "[]":
                raise SystemExit(f"the small image holds {found.stdout.strip()}")
        size = sum(path.lstat().st_size for path in (folder / "opt/weft").rglob("*") if path.is_file())
        print(f"== /opt/weft: {size / 1e6:.0f} MB", flush=True)
        services = ["worker"] if options.image == "worker" else ["gateway", "scheduler", "cache"]
        for service in services:
            serve(replay, stage, service, folder)


if __name__ == "__main__":
    main()
