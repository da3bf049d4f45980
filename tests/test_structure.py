"""Holds the import rules of ARCHITECTURE.md: imports are read from the code, imports by name included."""

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[1]
Room = TypeVar("Room", str, Path)
NODES = (ast.Import, ast.ImportFrom, ast.Constant, ast.Call, ast.keyword)
LARGEST_FOLDER = 20
MOST_FLOORS = 4

# The packages that each package may import beside itself.
TOP: Mapping[str, set[str]] = {
    "protos": set(),
    "kernels": set(),
    "report": set(),
    "services": {"protos", "kernels"},
    "compress": {"kernels", "report"},
    "weft": {"services", "protos", "report"},
    "verify": {"compress", "services", "kernels", "report"},
    "models": {"compress", "verify", "services", "report"},
    "bench": {"weft", "services", "kernels", "report", "protos"},
}
SERVICES = ("gateway", "scheduler", "worker", "cache")
# Within a package: each room and the rooms that it may import. A room is a folder or a single file.
ROOMS: Mapping[str, Mapping[str, set[str]]] = {
    "weft": {
        "main": {"cli"},
        "cli": {"load", "launch", "client", "batch"},
        "batch": {"client"},
        "load": {"client"},
        "launch": {"client"},
        "client": set(),
    },
    "compress": {
        "__main__": {"cli"},
        "cli": {"heads", "prune", "quantize", "training", "base", "text", "progress", "choices", "errors"},
        "heads": {"training", "output", "base", "text", "progress", "errors"},
        "prune": {"training", "output", "base", "text", "progress", "choices", "errors"},
        "quantize": {"training", "output", "base", "text", "progress", "choices", "errors"},
        "training": {"output", "base", "text", "progress", "errors"},
        "output": {"base", "errors"},
        "base": {"errors"},
        "text": {"errors"},
        "progress": set(),
        "choices": set(),
        "errors": set(),
    },
    "services/gateway": {
        "__main__": {"processes"},
        "processes": {"main", "member", "access", "settings"},
        "main": {"ports", "backend", "links", "text", "access", "metrics", "settings", "member"},
        "ports": {"doors", "answers", "backend", "access", "settings"},
        "doors": {"answers", "backend", "links", "text", "access", "metrics", "settings"},
        "answers": {"backend", "links", "text", "access", "metrics", "traffic", "settings"},
        "backend": {"links", "text", "access", "metrics", "settings"},
        "links": {"text", "access", "metrics", "traffic", "settings"},
        "text": {"settings"},
        "access": {"settings"},
        "metrics": {"traffic"},
        "traffic": set(),
        "settings": set(),
        "member": set(),
    },
    "services/worker": {
        "__main__": {"main"},
        "warm": {"main", "build", "loader", "settings", "options", "errors"},
        "export": {"build", "loader", "errors"},
        "main": {"service", "build", "engine", "loader", "settings", "job", "options", "numerics", "errors"},
        "service": {"engine", "settings", "job", "options", "numerics", "errors"},
        "build": {
            "engine", "speculative", "structured", "runners", "kvcache", "models", "planner", "loader", "parallel",
            "settings", "job", "options", "numerics", "errors",
        },
        "engine": {
            "speculative", "runners", "kvcache", "planner", "structured", "job", "options", "numerics", "errors",
        },
        "speculative": {"runners", "kvcache", "planner", "job", "options", "numerics", "errors"},
        "loader": {"models", "parallel", "job", "options", "numerics", "errors"},
        "runners": {"kvcache", "models", "parallel", "structured", "job", "options", "numerics", "errors"},
        "kvcache": {"models", "parallel", "job", "options", "numerics", "errors"},
        "models": {"parallel", "job", "options", "numerics", "errors"},
        "planner": {"parallel", "structured", "job", "options", "numerics", "errors"},
        "parallel": {"job", "options", "numerics", "errors"},
        "structured": {"job", "options", "numerics", "errors"},
        "settings": {"options", "errors"},
        "job": {"options", "numerics", "errors"},
        "options": {"numerics", "errors"},
        "numerics": {"errors"},
        "errors": set(),
    },
}  # fmt: skip
# `service` may import only these modules of the engine.
INTERFACES = {"services/worker/service": ("services.worker.engine", "services.worker.engine.base")}
# The only files of the serving path that may import each outside library.
DOORS: Mapping[str, tuple[str, ...]] = {
    "redis": ("services/cache/redis_client.py",),
    "tokenizers": ("services/gateway/text/", "services/worker/loader/"),
    "safetensors": ("services/worker/loader/",),
    "llguidance": ("services/forms/grammar.py", "services/forms/check_child.py", "services/worker/structured/"),
    "opentelemetry": ("services/telemetry.py",),
    "starlette": (
        "services/gateway/doors/http.py",
        "services/gateway/doors/http_routes.py",
        "services/gateway/doors/http_server.py",
    ),
    "uvicorn": ("services/gateway/doors/http_server.py",),
    "prometheus_client": ("services/metrics.py",),
    "jinja2": ("services/gateway/text/template_child.py", "services/worker/loader/tokenizer_check.py"),
    "jwt": ("services/gateway/access/bearer_tokens.py",),
    "cryptography": ("services/security/certificates.py", "services/security/door_tls.py"),
    "torch.distributed": ("services/worker/parallel/collectives.py",),
    "onnxruntime": ("services/worker/runners/onnxruntime.py",),
    "openvino": ("services/worker/runners/openvino.py",),
    "tensorrt": ("services/worker/runners/tensorrt.py",),
}
TORCH = ("torch", "kernels", "safetensors", "triton")
CLOCKED = ("asyncio", "grpc", "torch", "time", "threading", "socket", "random")
# Libraries and modules that these places must not import.
WITHOUT: Mapping[str, tuple[str, ...]] = {
    "services/scheduler/core": CLOCKED,
    "services/worker/planner": CLOCKED,
    "services/cache/breaker.py": CLOCKED,
    "services/gateway/text/stop_strings.py": CLOCKED,
    "services/worker/engine": (*TORCH, "grpc", "asyncio", "protos"),
    "services/worker/speculative/proposer.py": TORCH,
    "services/worker/runners/base.py": TORCH,
    "services/worker/job.py": TORCH,
    "services/worker/options.py": TORCH,
    "services/worker/numerics.py": TORCH,
    "services/worker/service": TORCH,
    "services/gateway/access": ("grpc.aio",),
    "services/gateway/answers": ("grpc.aio", "starlette", "protos.inference_pb2_grpc"),
    "services/gateway": (*TORCH, "transformers", "numpy", "llguidance", "services.forms.grammar"),
    "services/scheduler": (*TORCH, "transformers", "numpy"),
    "services/cache": (*TORCH, "transformers", "numpy"),
    "weft": (*TORCH, "transformers", "numpy"),
    "weft/client": ("services", "report", "pydantic", "structlog", "typer", "rich"),
}


def files(*places: str) -> Iterator[Path]:
    """Python files at or below these places, without generated ones."""
    for place in places:
        path = ROOT / place
        found = [path] if path.is_file() else sorted(path.rglob("*.py"))
        yield from (each for each in found if "_pb2" not in each.name)


@cache
def modules() -> frozenset[str]:
    """Dotted names of all modules and packages of the project."""
    named = (path.relative_to(ROOT).with_suffix("").parts for path in files(*TOP))
    return frozenset(".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in named)


@cache
def nodes(path: Path) -> Sequence[ast.AST]:
    """The imports, strings, calls and arguments by name in a file; its tree is not kept."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, NODES)]


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, wherever in it, and modules of the project that it names in a string."""
    return frozenset(imported(nodes(path)))


def imported(found: Iterable[ast.AST]) -> set[str]:
    """The same as `imports`, for parts of a parsed source text."""
    names: set[str] = set()
    for node in found:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(_named(node.value))
    return names


def _named(text: str) -> set[str]:
    """The module of the project that a string names, or begins with (as the first part of an f-string does)."""
    if text in modules() and "." in text:
        return {text}
    begins = re.fullmatch(r"(\w+(?:\.\w+)*)\.", text)
    return {begins[1]} if begins and begins[1] in modules() else set()


def reaches(path: Path, *packages: str) -> list[str]:
    """One sentence for each import by a file of one of these packages."""
    names = sorted(name for name in imports(path) if any(name == p or name.startswith(f"{p}.") for p in packages))
    return [f"{path.relative_to(ROOT)} imports {name}" for name in names]


def offenders(paths: Iterator[Path], *packages: str) -> list[str]:
    """One sentence for each import by these files of one of these packages."""
    return [sentence for path in paths for sentence in reaches(path, *packages)]


def floors(graph: Mapping[Room, set[Room]]) -> int:
    """The length of the longest chain of imports. Raises RecursionError if imports form a circle."""
    heights: dict[Room, int] = {}

    def height(name: Room) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(other) for other in graph[name] if other in graph), default=0)
        return heights[name]

    return max(map(height, graph))


@pytest.mark.parametrize("package", TOP)
def test_packages_import_what_the_table_allows(package: str) -> None:
    others = TOP.keys() - TOP[package] - {package}
    assert offenders(files(package), *others, "tests") == []


def test_the_top_has_few_floors_and_no_circle() -> None:
    actual = {
        package: {other for other in TOP if other != package and offenders(files(package), other)} for package in TOP
    }
    assert all(actual[package] <= TOP[package] for package in TOP)
    assert floors(actual) <= MOST_FLOORS


def test_no_files_import_one_another_in_a_circle() -> None:
    """Imports for types alone and imports inside functions count, too."""
    graph = {path: imported_files(path) for path in files(*TOP)}
    assert floors(graph) > 1  # raises if imports form a circle


def imported_files(path: Path) -> set[Path]:
    """The files of the project that the import statements of a file name, wherever in it."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside if inside <= modules() else {node.module, *inside & modules()}
    found = {ROOT / name.replace(".", "/") for name in names & modules()}
    return {each / "__init__.py" if each.is_dir() else each.with_suffix(".py") for each in found} - {path}


def test_services_never_import_one_another() -> None:
    for service in SERVICES:
        others = [f"services.{other}" for other in SERVICES if other != service]
        assert offenders(files(f"services/{service}"), *others) == []


def test_shared_modules_import_no_service() -> None:
    shared = (path for path in files("services") if path.relative_to(ROOT).parts[1] not in SERVICES)
    assert offenders(shared, *(f"services.{service}" for service in SERVICES), "kernels") == []


def test_of_the_services_only_the_worker_imports_kernels() -> None:
    assert offenders(files(*(f"services/{each}" for each in SERVICES if each != "worker")), "kernels") == []


@pytest.mark.parametrize("place", ROOMS)
def test_rooms_import_what_the_table_allows(place: str) -> None:
    rooms, package = ROOMS[place], place.replace("/", ".")
    there = {path.stem for path in (ROOT / place).iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert there - {"__init__"} <= rooms.keys(), "a room that is missing in the table"
    assert floors(rooms) > 1  # raises if imports form a circle
    wrong: list[str] = []
    for room, allowed in rooms.items():
        beyond = [f"{package}.{other}" for other in rooms.keys() - allowed - {room}]
        for name in (f"{place}/{room}", f"{place}/{room}.py"):
            if (ROOT / name).exists():
                wrong += offenders(files(name), *beyond)
    assert wrong == []


def test_no_door_imports_another() -> None:
    """Beside what all doors of a protocol share, and a door's own translation: files named after it, or its folder."""
    place = "services/gateway/doors"
    shared = {"grpc_gate", "http", "http_routes", "request_stream"}
    doors = {path.stem for path in (ROOT / place).iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    for door in doors - {"__init__"}:
        others = (
            f"services.gateway.doors.{other}"
            for other in doors - {"__init__", door}
            if other not in shared and not other.startswith(f"{door}_")
        )
        file = f"{place}/{door}.py" if (ROOT / place / f"{door}.py").exists() else f"{place}/{door}"
        assert offenders(files(file), *others) == []


def test_the_worker_service_imports_only_the_engine_interface() -> None:
    for place, (room, interface) in INTERFACES.items():
        seen = {sentence.rpartition(" ")[2] for sentence in offenders(files(place), room)}
        assert {name for name in seen if not f"{name}.".startswith(f"{interface}.") and name != room} == set()


def test_only_build_and_loader_know_the_path_of_a_checkpoint() -> None:
    outside = (path for path in files("services/worker") if not {"build", "loader"} & set(path.relative_to(ROOT).parts))
    assert [str(path) for path in outside if re.search(r"\bmodel_dir\b|\bfolder: Path", path.read_text())] == []


@pytest.mark.parametrize("library", DOORS)
def test_each_library_is_imported_in_one_place(library: str) -> None:
    outside = (path for path in files("services") if not str(path.relative_to(ROOT)).startswith(DOORS[library]))
    assert offenders(outside, library) == []


@pytest.mark.parametrize("place", WITHOUT)
def test_rooms_do_not_import_forbidden_libraries(place: str) -> None:
    assert offenders(files(place), *WITHOUT[place]) == []


def test_folders_of_services_stay_small() -> None:
    folders = [ROOT / "services", *(path for path in (ROOT / "services").rglob("*") if path.is_dir())]
    assert {folder.name: count for folder in folders if (count := len(list(files_in(folder)))) > LARGEST_FOLDER} == {}


def files_in(folder: Path) -> Iterator[Path]:
    """Python files directly in a folder."""
    return folder.glob("*.py")


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import importlib\nimportlib.import_module('services.gateway.main')", "services.gateway.main"),
        ("import runpy\nrunpy.run_module('services.worker')", "services.worker"),
        ("command = ['python', '-m', 'services.cache']", "services.cache"),
        ("def start(service):\n    run(f'services.gateway.{service}')", "services.gateway"),
        ("def late():\n    from services.worker import build", "services.worker.build"),
    ],
)
def test_imports_by_name_are_found(source: str, seen: str) -> None:
    assert seen in imported(ast.walk(ast.parse(source)))


def test_every_file_has_an_opening_docstring() -> None:
    missing = [path for path in files(*TOP, "tests") if path.name != "__init__.py" and not opens_with_string(path)]
    assert [str(path) for path in missing] == []


def opens_with_string(path: Path) -> bool:
    """Whether the first statement of a file begins with a string. The rest of the file is not read."""
    with tokenize.open(path) as lines:
        tokens = tokenize.generate_tokens(lines.readline)
        first = next(token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL))
    return first.type == tokenize.STRING


def test_nothing_unpickles_or_runs_a_checkpoints_code() -> None:
    assert offenders(files("services", "kernels", "weft"), "pickle", "marshal", "shelve", "dill") == []
    for path in files("services", "kernels", "weft"):
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "compile", "torch.load"}, f"{path.name}: {called}"
            assert not (isinstance(node, ast.keyword) and node.arg == "trust_remote_code"), path.name


def test_every_program_of_the_makefile_runs_as_a_script() -> None:
    named = set(re.findall(r"-m ((?:bench|models|tests)\.[\w.]+)", (ROOT / "Makefile").read_text()))
    assert len([name for name in named if name.startswith("bench.")]) >= 5
    for program in sorted(named):
        path = ROOT / program.replace(".", "/")
        last = ast.parse((path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body[-1]
        assert isinstance(last, ast.If), program
        assert ast.unparse(last.test) == "__name__ == '__main__'", program
