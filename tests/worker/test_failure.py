"""What a worker does when its engine's thread ends by a bug: the process ends, and another can take its place."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The real process with an engine that fails at its first step.
_ENTRY = """
from services.worker import main, paced

def run_forever(self, *_):
    raise RuntimeError("the words of a client")

paced.PacedEngine.run_forever = run_forever
main.run()
"""


def test_a_worker_whose_engine_failed_ends_and_may_be_started_again() -> None:
    env = {
        **os.environ,
        "ENGINE": "paced",
        "MODEL_NAME": str(ROOT / "models" / "weft-story-2m"),
        "WEFT_LISTEN": "127.0.0.1:0",
        "WEFT_SCHEDULER_ADDRESS": "127.0.0.1:1",
    }
    done = subprocess.run([sys.executable, "-c", _ENTRY], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the engine failed" in done.stderr
    assert "the words of a client" not in done.stderr
