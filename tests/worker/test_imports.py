"""A worker needs only the packages of its extra in pyproject.toml."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

IMPORTS = """
import importlib, json, pkgutil, sys
sys.modules["transformers"] = None  # its import fails
import services.worker.main, services.worker.build.paced
paced_imports_torch = "torch" in sys.modules
import kernels, services.worker
names = [module.name for package in (kernels, services.worker)
         for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps([paced_imports_torch, len(names)]))
"""


def test_the_worker_imports_no_transformers_and_torch_only_with_an_engine_that_needs_it() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paced_imports_torch, modules = json.loads(done.stdout)
    assert not paced_imports_torch, "a paced worker imports torch: its start takes seconds longer"
    assert modules > 60


START = """
import json, sys
from pathlib import Path
from services.worker.build.choose import build_engine, resolve_engine
from services.worker.options import EngineOptions
folder = Path("models/weft-story-2m")
build_engine(folder, resolve_engine(EngineOptions(), folder), lambda *_: None)
print(json.dumps([name for name in ("torch", "triton", "services.worker.build.runtimes") if name in sys.modules]))
"""


def test_a_start_on_a_cpu_imports_nothing_that_only_other_engines_need() -> None:
    command = [sys.executable, "-c", START]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["torch"], "each import takes a start hundreds of milliseconds"


def test_the_packages_of_the_tests_are_in_their_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: {line.partition("=")[0].partition(">")[0] for line in lines} for extra, lines in extras.items()}
    assert "transformers" not in named["worker"]
    assert "transformers" in named["dev"]
    assert named["worker"] >= {"huggingface_hub", "tokenizers", "jinja2"}, "for hub ids and tokenizer checks"
