"""Runs unmodified clients against a running mesh: `python -m tests.clients.run [NAME ...]`. Knows no client.

A client is a folder beside this file. Its files decide how it is set up and run, each in an environment of its own in
`.clients/NAME`:

    requirements.txt and check.py     a virtual environment with these packages
    package.json and check.mjs        Node with these packages
    go.mod, set_up.sh and check.go    Go
    check.sh                          bash

A check prints a line for each thing that it has tried, and fails with another exit code than 0. Its environment has
`WEFT_HTTP` (http://host:port), `WEFT_GRPC` and `WEFT_WORKER` (host:port of the gateway and of a worker), `WEFT_MODEL`
(the name of a model) and `WEFT_ROOT` (the repository).
"""

import argparse
import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mesh.harness import ROOT, Mesh

FOLDER = Path(__file__).parent
ENVIRONMENTS = ROOT / ".clients"
MODEL = ROOT / "models" / "weft-story-11m"
CHECK_S = 300
SET_UP_S = 900


@dataclass(frozen=True)
class Kind:
    """A kind of client."""

    program: str
    manifest: str
    """The file that lists what it needs; empty: nothing."""
    needs: str
    """The program of this machine that runs it."""
    set_up: Callable[[Path], list[list[str]]]
    """The commands that set up a folder with the client's files."""
    run: Callable[[Path], list[str]]


def _python_set_up(home: Path) -> list[list[str]]:
    python = str(home / "venv" / "bin" / "python")
    return [
        [sys.executable, "-m", "venv", "--clear", str(home / "venv")],
        [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", "requirements.txt"],
    ]


KINDS = (
    Kind("check.py", "requirements.txt", sys.executable, _python_set_up, lambda home: ["venv/bin/python", "check.py"]),
    Kind(
        "check.mjs",
        "package.json",
        "node",
        lambda home: [["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]],
        lambda home: ["node", "check.mjs"],
    ),
    Kind(
        "check.go",
        "go.mod",
        "bash",
        lambda home: [["bash", "set_up.sh", str(ROOT), sys.executable]],
        lambda home: ["./check"],
    ),
    Kind("check.sh", "", "bash", lambda home: [], lambda home: ["bash", "check.sh"]),
)


def clients() -> dict[str, Kind]:
    """The clients by name."""
    found = {}
    for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir()):
        for kind in KINDS:
            if (folder / kind.program).exists():
                found[folder.name] = kind
    return found


def set_up(name: str, kind: Kind) -> Path:
    """Copies the client's files to its environment, and sets that up if what it needs has changed. -> the folder."""
    home = ENVIRONMENTS / name
    home.mkdir(parents=True, exist_ok=True)
    shutil.copytree(FOLDER / name, home, dirs_exist_ok=True)
    # What Go builds depends on all files; the environments of the others on the manifest alone.
    read = sorted((FOLDER / name).iterdir()) if kind.program == "check.go" else [FOLDER / name / kind.manifest]
    contents = b"".join(file.read_bytes() for file in read if file.is_file())
    stamp, digest = home / ".set-up", hashlib.sha256(contents).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        for command in kind.set_up(home):
            subprocess.run(command, cwd=home, check=True, timeout=SET_UP_S)
        stamp.write_text(digest)
    return home


async def check(name: str, kind: Kind, home: Path, environment: Mapping[str, str]) -> bool:
    """Runs a client's check. -> whether it succeeded."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *kind.run(home), cwd=home, env={**os.environ, **environment}, stdout=-1, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), CHECK_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        output = f"no end after {CHECK_S} s".encode()
    passed = process.returncode == 0
    print(f"{'passed' if passed else 'FAILED'}  {name}  ({time.monotonic() - began:.1f} s)")
    for line in output.decode(errors="replace").splitlines():
        print(f"    {line}")
    return passed


async def check_all(wanted: Mapping[str, Kind]) -> bool:
    """Sets up the clients, starts a mesh and runs them one by one. -> whether all have passed."""
    usable = {name: kind for name, kind in wanted.items() if shutil.which(kind.needs)}
    for name in wanted.keys() - usable.keys():
        print(f"FAILED  {name}  ({wanted[name].needs} is not installed)")
    homes = {name: set_up(name, kind) for name, kind in usable.items()}
    with tempfile.TemporaryDirectory(prefix="weft-clients-") as folder:
        async with Mesh(Path(folder), MODEL) as mesh:
            environment = {
                "WEFT_HTTP": mesh.url(),
                "WEFT_GRPC": mesh.gateways[0].address,
                "WEFT_WORKER": mesh.workers[0].address,
                "WEFT_MODEL": MODEL.name,
                "WEFT_ROOT": str(ROOT),
            }
            passed = [await check(name, kind, homes[name], environment) for name, kind in usable.items()]
    print(f"{sum(passed)} of {len(wanted)} clients passed")
    return sum(passed) == len(wanted)


def main() -> None:
    """Runs the clients that the command line names, or all."""
    found = clients()
    parser = argparse.ArgumentParser(description="Run unmodified clients against a running mesh.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(found)}; none: all")
    names: list[str] = parser.parse_args().names
    if unknown := set(names) - found.keys():
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    passed = asyncio.run(check_all({name: kind for name, kind in found.items() if not names or name in names}))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
