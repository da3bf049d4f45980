"""Hostile checkpoints are refused in one line, within 10 s of processor time and 1 GiB: see `checkpoints.py`."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import checkpoint
from tests.mesh.harness import ROOT
from tests.security.checkpoints import HOSTILE, SHORT

__all__ = ["checkpoint"]


def test_there_are_enough_checkpoints() -> None:
    assert len(HOSTILE) >= 60
    assert set(SHORT) <= HOSTILE.keys()


@pytest.mark.timeout(900)
def test_hostile_checkpoints_are_refused_in_one_line(checkpoint: Callable[[str], Path]) -> None:
    names = () if os.environ.get("WEFT_TEST_ALL") else SHORT
    command = [sys.executable, "-m", "tests.security.checkpoints", "--good", str(checkpoint("llama")), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line[:4] in ("ok  ", "FAIL")]
    assert len(lines) == len(names or HOSTILE), done.stderr
    assert [line for line in lines if line.startswith("FAIL")] == []
    assert done.returncode == 0
