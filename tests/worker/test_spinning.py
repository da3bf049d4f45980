"""How long threads of OpenMP spin in a worker, as the library itself reports it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIBRARIES = [
    *Path(torch.__file__).parent.glob("lib/libgomp*.so*"),
    *Path(torch.__file__).parents[1].glob("torch.libs/libgomp*"),
]
_LOAD = """
import ctypes, os, sys
from services.worker.main import spin_briefly
assert "torch" not in sys.modules, "torch has loaded the library already"
spin_briefly(os.environ)
ctypes.CDLL(sys.argv[1])
"""


@pytest.mark.skipif(not LIBRARIES, reason="torch brings no libgomp on this system")
@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")]
)
def test_threads_of_openmp_spin_for_a_moment_unless_the_user_says_otherwise(given: dict[str, str], spins: str) -> None:
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    shown = subprocess.run(
        [sys.executable, "-c", _LOAD, str(LIBRARIES[0])],
        env={**rest, **given, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in shown.stderr
