"""A worker needs only the packages of its extra in pyproject.toml."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

WITHOUT_TRANSFORMERS = """
import importlib, pkgutil, sys
sys.modules["transformers"] = None  # its import fails
import kernels, services.worker
names = [module.name for package in (kernels, services.worker)
         for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


def test_the_worker_imports_no_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


def test_a_worker_imports_torch_with_its_engine() -> None:
    check = "import sys, services.worker.main, services.worker.build.paced; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False)
    assert done.returncode == 0, "a paced worker imports torch: its start takes seconds longer"


def test_the_packages_of_the_tests_are_in_their_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: {line.partition("=")[0].partition(">")[0] for line in lines} for extra, lines in extras.items()}
    assert "transformers" not in named["worker"]
    assert "transformers" in named["dev"]
    assert named["worker"] >= {"huggingface_hub", "tokenizers", "jinja2"}, "for hub ids and tokenizer checks"
