"""Service processes forked from one that has imported the services: torch alone takes two seconds to import.

Everything else is as in a process of its own: its environment, its log, its signals, its end with its parent.
"""

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

from services import failpoints

_PR_SET_PDEATHSIG = 1
_READ_AT_START = ("WEFT_", "MODEL_NAME", "SERVED_MODEL_NAME", "ENGINE", "MAX_", "QUANTIZE", "KV_")
"""Variables that a service reads when it starts."""
_CONTEXT = multiprocessing.get_context("forkserver")


def forkable(env: Mapping[str, str]) -> bool:
    """Whether a service with these variables behaves as if it had imported everything itself."""
    return all(name.startswith(_READ_AT_START) for name in env)


class Forked:
    """A forked service, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, env: Mapping[str, str], folder: Path, log: Path) -> None:
        """module: is run as by `python -m`. env: its whole environment. folder: its working directory."""
        _CONTEXT.set_forkserver_preload(["tests.mesh.preloaded"])
        self._process = _CONTEXT.Process(target=_run, args=(module, dict(env), str(folder), str(log)))
        self._process.start()
        self._lock = threading.Lock()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended it, or None while it runs."""
        with self._lock:
            return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        wait([self._process.sentinel], timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(module: str, env: dict[str, str], folder: str, log: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(out, standard)
    os.close(out)
    failpoints.ARMED.update(failpoints.parse(env.get("WEFT_FAILPOINTS", "")))  # Read when it was imported.
    sys.argv = [module]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
