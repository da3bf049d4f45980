"""How long threads of OpenMP spin in a worker's process, as the library itself reports it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIBRARIES = [
    *Path(torch.__file__).parent.glob("lib/libgomp*.so*"),
    *Path(torch.__file__).parents[1].glob("torch.libs/libgomp*"),
]
# The real process. Instead of a model it loads the library that torch would load with it.
_WORKER = """
import ctypes, sys
from services.worker import main
from services.worker.errors import CheckpointError

def load(*_):
    assert "torch" not in sys.modules, "torch has loaded the library already"
    ctypes.CDLL(sys.argv[1])
    raise CheckpointError("the library is loaded")

main.load_model = load
main.run()
"""


@pytest.mark.skipif(not LIBRARIES, reason="torch has no libgomp on this system")
@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")]
)
def test_threads_of_openmp_spin_for_a_moment_unless_the_user_says_otherwise(given: dict[str, str], spins: str) -> None:
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    worker = subprocess.run(
        [sys.executable, "-c", _WORKER, str(LIBRARIES[0])],
        cwd=ROOT,
        env={
            **rest,
            **given,
            "OMP_DISPLAY_ENV": "VERBOSE",
            "MODEL_NAME": str(ROOT / "models" / "weft-story-2m"),
            "WEFT_LISTEN": "127.0.0.1:0",
            "WEFT_SCHEDULER_ADDRESS": "127.0.0.1:1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the library is loaded" in worker.stdout + worker.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in worker.stderr
