"""Keeps cores busy with work that gives way to all other work, so that each load finds the machine equally fast.

    python -m bench.mesh.busy_cores CORE

The cores of a machine share power, memory and, where they are threads of one physical core, units. So processes on some
of them run slower while others are busy: at a higher rate clients use more of their cores, which slows a mesh beside
them down, though a mesh whose clients have machines of their own would not notice.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator

from weft.launch.supervisor import PARENT_DEATH


@contextlib.contextmanager
def busy(cores: Collection[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keeps each of these cores busy within the block, by the processes that it yields. Linux only."""
    before = [sys.executable, "-I", "-S", str(PARENT_DEATH), str(os.getpid()), str(int(signal.SIGKILL))]
    commands = [[*before, sys.executable, "-m", "bench.mesh.busy_cores", str(core)] for core in cores]
    running = [subprocess.Popen(command) for command in commands]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def compute(core: int) -> None:
    """Computes on this core for ever whenever nothing else would."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        sum(number * number for number in range(100_000))


if __name__ == "__main__":
    compute(int(sys.argv[1]))
