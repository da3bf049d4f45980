"""The distribution of tests over processes, and their repetition."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_tests_of_a_file_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist appends the group to a test's name; a version of pytest that it does not know makes it omit that."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests run in one process, or are not grouped")
    assert request.node.nodeid.endswith("@tests/test_groups.py")


def test_a_repeated_test_that_hangs_ends(tmp_path: Path) -> None:
    """The run as a whole ends, with both failures."""
    (tmp_path / "test_hanging.py").write_text("import time\n\n\ndef test_it() -> None:\n    time.sleep(1000)\n")
    options = [
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "--reruns",
        "1",
        "--timeout",
        "1",
        "--rootdir",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *options, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 rerun" in done.stdout
