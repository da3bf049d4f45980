"""The end of a worker's process: with an error when its engine fails, and at once after SIGTERM."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The real process with an engine that fails at its first step.
_FAILS = """
from services.worker import main
from services.worker.engine import generation

def run(self, *_):
    raise RuntimeError("the words of a client")

generation.GenerationEngine.run = run
main.run()
"""
# The real process with a model that takes a minute to load.
_LOADS = """
import time
from services.worker import main

def load(*_):
    print("loading", flush=True)
    time.sleep(60)

main.load_model = load
main.run()
"""


def start(entry: str) -> "subprocess.Popen[str]":
    """Starts a worker with this entry point."""
    env = {
        **os.environ,
        "ENGINE": "paced",
        "MODEL_NAME": str(ROOT / "models" / "weft-story-2m"),
        "WEFT_LISTEN": "127.0.0.1:0",
        "WEFT_SCHEDULER_ADDRESS": "127.0.0.1:1",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", entry], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def test_a_worker_whose_engine_failed_ends_and_may_be_started_again() -> None:
    worker = start(_FAILS)
    _, log = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "the engine failed" in log
    assert "the words of a client" not in log


def test_sigterm_during_loading_ends_the_worker_at_once() -> None:
    worker = start(_LOADS)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "loading\n"
    worker.terminate()
    worker.communicate(timeout=30)
    assert worker.returncode == 0
