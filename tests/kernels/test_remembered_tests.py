"""Tests that passed with the same content are remembered: those of a changed line, of any file they import, run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.remembered_tests import PASSED
from tests.kernels.sources import Sources

HERE = Path(__file__).parent
FILES = {
    "kernels/__init__.py": "",
    "kernels/double.py": "from kernels.factor import FACTOR\n\n\ndef double(x):\n    return FACTOR * x\n",
    "kernels/factor.py": "FACTOR = 2\n",
    "kernels/halve.py": "def halve(x):\n    return x / 2\n",
    "tests/__init__.py": "",
    "tests/kernels/__init__.py": "",
    "tests/kernels/helper.py": "def twice(x):\n    return x + x\n",
    "checks/doubles.py": """\
import pytest
from tests.kernels import helper


@pytest.mark.parametrize("x", [1, 2, 3], ids=["one", "the number two", "three"])
def test_double(x):
    from kernels.double import double
    assert double(x) == helper.twice(x)
""",
    "checks/halves.py": """\
import kernels.halve as halves


def test_half():
    assert halves.halve(2) == 1


def test_nothing():
    assert halves.halve(0) == 0
""",
}
RUN = """\
import sys
from pathlib import Path
import pytest
from tests.kernels.content_record import ContentRecord
from tests.kernels.remembered_tests import RememberedTests
plugin = RememberedTests(ContentRecord(Path("passed.txt"), "fresh" in sys.argv), Path.cwd())
sys.exit(pytest.main(["-qq", "-rA", "checks/doubles.py", "checks/halves.py"], plugins=[plugin]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with two files of tests, run by the plugin: five tests pass."""
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    for name in ("content_record", "sources", "remembered_tests"):
        shutil.copy(HERE / f"{name}.py", tmp_path / "tests/kernels")
    return tmp_path


def ran(tree: Path, *arguments: str) -> tuple[list[str], str]:
    """The tests that ran in a process of their own, each with what became of it; what the process wrote."""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line.partition(" - ")[0] for line in done.stdout.splitlines()]
    return sorted(line for line in lines if line.startswith(("PASSED", "FAILED"))), done.stdout + done.stderr


def change(tree: Path, name: str, old: str, new: str) -> None:
    source = (tree / name).read_text()
    assert old in source
    (tree / name).write_text(source.replace(old, new))


def test_one_test_runs_again_where_nothing_changed(tree: Path) -> None:
    first, _ = ran(tree, "fresh")
    lines = (tree / "passed.txt").read_text().splitlines()
    assert len(first) == len(lines) == 5
    assert all(line.endswith(f" {PASSED}") for line in lines)
    again, _ = ran(tree)
    assert len(again) == 1
    assert set(again) < set(first)


def test_the_tests_of_a_changed_kernel_run(tree: Path) -> None:
    ran(tree, "fresh")
    change(tree, "kernels/factor.py", "2", "3")
    lines, _ = ran(tree)
    assert [line.partition("[")[0] for line in lines[:3]] == ["FAILED checks/doubles.py::test_double"] * 3
    assert len(lines) == 4, "one test of the other file"


def test_a_failing_run_writes_no_record(tree: Path) -> None:
    change(tree, "kernels/halve.py", "x / 2", "x // 2 + 1")
    lines, _ = ran(tree, "fresh")
    assert len(lines) == 5
    assert not (tree / "passed.txt").exists()
    change(tree, "kernels/halve.py", "x // 2 + 1", "x / 2")
    ran(tree, "fresh")
    before = (tree / "passed.txt").read_text()
    change(tree, "checks/halves.py", "== 0", "== 5")
    lines, _ = ran(tree, "fresh")
    assert "FAILED checks/halves.py::test_nothing" in lines
    assert (tree / "passed.txt").read_text() == before


def test_code_that_no_import_names_is_found(tree: Path) -> None:
    loads = 'import importlib\n\nhalves = importlib.import_module("kernels.halve")'
    change(tree, "checks/halves.py", "import kernels.halve as halves", loads)
    _, written = ran(tree, "fresh")
    assert "the content of the tests lacks" in written
    assert not (tree / "passed.txt").exists()


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("kernels/halve.py", "checks/halves.py")])
def test_the_content_of_a_test_is_all_that_it_imports(tree: Path, name: str) -> None:
    def contents() -> list[str]:
        return [Sources(tree).content(tree / f"checks/{file}.py") for file in ("doubles", "halves")]

    doubles, halves = contents()
    (tree / name).write_text(FILES[name] + "\n")
    changed, same = contents()
    assert changed != doubles
    assert (same == halves) == (name != "kernels/__init__.py")


def test_other_versions_are_other_contents(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tree / "checks/doubles.py"
    versions = dict.fromkeys(("triton", "torch", "numpy"), "3.1")
    monkeypatch.setattr("tests.kernels.sources.version", lambda library: versions[library])
    before = Sources(tree).content(file)
    versions["torch"] = "3.1+cpu"
    assert Sources(tree).content(file) == before
    versions["torch"] = "3.2"
    assert Sources(tree).content(file) != before
    versions |= {"torch": "3.1", "triton": "3.2"}
    assert Sources(tree).content(file) != before
    versions |= {"triton": "3.1"}
    monkeypatch.setattr(sys, "version_info", (3, 99))
    assert Sources(tree).content(file) != before


def test_relative_imports_are_followed_and_packages_run_first(tree: Path) -> None:
    (tree / "kernels/double.py").write_text("from . import halve\nfrom .factor import FACTOR\n")
    found = Sources(tree).closure(tree / "kernels/double.py")
    assert {file.stem for file in found} == {"__init__", "double", "halve", "factor"}
    found = Sources(tree).closure(tree / "tests/kernels/helper.py")
    assert found == {tree / "tests/__init__.py", tree / "tests/kernels/__init__.py", tree / "tests/kernels/helper.py"}
