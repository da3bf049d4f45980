"""The end of a gateway's process, one of whose tasks has failed: a supervisor sees an error, and starts it again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
from services import process
process.prepare_grpc()
from services.gateway import main
from services.gateway.links.{module} import {name}

async def fail(self):
    raise KeyError("a secret")

{name}.{method} = fail
main.run()
"""
TASKS = [
    ("scheduler_link", "SchedulerLink", "_run"),
    ("scheduler_link", "SchedulerLink", "_watch"),
    ("worker_links", "WorkerLinks", "watch"),
]


@pytest.mark.parametrize(("module", "name", "method"), TASKS)
def test_a_task_that_fails_ends_the_process_with_an_error(module: str, name: str, method: str) -> None:
    program = PROGRAM.format(module=module, name=name, method=method)
    environment = {"WEFT_LISTEN": "127.0.0.1:0", "WEFT_GATEWAY_HTTP_PORT": "0", "WEFT_SCHEDULER_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 1, log
    assert "a task of the gateway failed" in log
    assert "KeyError" in log
    assert "a secret" not in log
