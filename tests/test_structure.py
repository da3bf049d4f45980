"""Who may import whom, as ARCHITECTURE.md says: read from the code, not promised."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "scheduler", "worker", "cache")
PACKAGES = ("protos", "services", "kernels", "weft", "compress", "verify", "report", "bench", "models")

# Each outside library has one door in the serving path.
DOORS = {
    "redis": {"services/cache/store.py"},
    "tokenizers": {"services/gateway/text/tokenizer.py"},
    "safetensors": {"services/worker/loader/tensors.py"},
    "opentelemetry": {"services/telemetry.py"},
    "prometheus_client": {"services/metrics.py"},
    "triton": set(),
}
# Pure rooms: the clock is an argument, there is no I/O and no tensor.
PURE = (
    "services/scheduler/core/catalog.py",
    "services/scheduler/core/pool.py",
    "services/scheduler/core/routing.py",
    "services/scheduler/core/state.py",
    "services/scheduler/core/jobs.py",
    "services/scheduler/core/commands.py",
    "services/scheduler/core/admission.py",
    "services/scheduler/core/placement.py",
    "services/scheduler/core/fairness.py",
    "services/worker/planner/block_pool.py",
    "services/worker/planner/planner.py",
    "services/worker/planner/sequence.py",
    "services/cache/breaker.py",
    "services/gateway/text/stop_strings.py",
)


def sources(*folders: str) -> Iterator[Path]:
    """Python files that people write, below these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def offenders(paths: Iterator[Path], *forbidden: str) -> list[str]:
    """Files that import one of the forbidden packages, and which."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in sorted(imports(path))
        if any(name == package or name.startswith(f"{package}.") for package in forbidden)
    ]


def test_kernels_import_nothing_of_the_project() -> None:
    others = [package for package in PACKAGES if package != "kernels"]
    assert offenders(sources("kernels"), *others) == []


def test_rooms_never_import_one_another() -> None:
    for room in ROOMS:
        others = [f"services.{other}" for other in ROOMS if other != room]
        assert offenders(sources(f"services/{room}"), *others) == []


def test_the_shared_floor_stands_on_itself() -> None:
    floor = (path for path in (ROOT / "services").glob("*.py"))
    assert offenders(floor, *(f"services.{room}" for room in ROOMS), "kernels", "weft", "bench") == []


def test_tools_stand_beside_the_mesh() -> None:
    """Compression knows the meaning of quantized weights, never who serves them; proof knows the worker."""
    assert offenders(sources("compress"), "services", "verify", "weft", "bench", "models", "protos") == []
    assert offenders(sources("verify"), "models", "services.gateway", "services.scheduler", "services.cache") == []
    assert offenders(sources("report"), *(package for package in PACKAGES if package != "report")) == []
    assert offenders(sources("services", "kernels"), "compress", "verify", "report", "bench", "models") == []


def test_only_the_worker_computes() -> None:
    serving = [f"services/{room}" for room in ROOMS if room != "worker"]
    assert offenders(sources(*serving, "weft"), "torch", "kernels", "transformers", "numpy") == []


def test_the_client_library_needs_protos_alone() -> None:
    library = sources("weft/client")
    assert offenders(library, "services", "kernels", "pydantic", "structlog", "typer", "rich") == []


def test_each_library_has_one_door() -> None:
    for library, doors in DOORS.items():
        inside = (path for path in sources("services") if str(path.relative_to(ROOT)) not in doors)
        assert offenders(inside, library) == []


def test_pure_rooms_are_pure() -> None:
    paths = (ROOT / name for name in PURE)
    assert offenders(paths, "asyncio", "grpc", "torch", "time", "threading", "socket", "random") == []


def test_every_file_says_what_it_owns() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES, "tests")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert [path for path in silent if not path.endswith("__init__.py")] == []


def test_nothing_unpickles_or_runs_a_checkpoints_code() -> None:
    assert offenders(sources("services", "kernels", "weft"), "pickle", "marshal", "shelve", "dill") == []
    for path in sources("services", "kernels", "weft"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "compile", "torch.load"}, f"{path.name}: {called}"
            assert not (isinstance(node, ast.keyword) and node.arg == "trust_remote_code"), path.name


def test_every_program_of_the_makefile_does_something_when_it_is_run() -> None:
    named = set(re.findall(r"-m ((?:bench|models|tests)\.[\w.]+)", (ROOT / "Makefile").read_text()))
    assert {"bench.kernels", "bench.engine", "bench.gpu", "models.train"} <= named
    for program in sorted(named):
        last = ast.parse((ROOT / (program.replace(".", "/") + ".py")).read_text()).body[-1]
        assert isinstance(last, ast.If), program
        assert ast.unparse(last.test) == "__name__ == '__main__'", program
