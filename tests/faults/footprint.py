"""Descriptors, tasks and log lines of a service process: at their baseline after any fault. Knows no faults."""

import asyncio
import json
import os
import time
import urllib.request
from typing import NamedTuple

from tests.mesh.harness import Process

SETTLE_S = 30.0
"""How long a test waits until a process has let everything go."""
_SPARE = 4
"""Descriptors and tasks more than before that are no leak: connections and their watchers come and go."""


class Footprint(NamedTuple):
    """What a process holds."""

    descriptors: int
    tasks: int

    def exceeds(self, before: "Footprint", spare: int) -> bool:
        """Whether it is more than before."""
        return self.descriptors > before.descriptors + spare or self.tasks > before.tasks + spare


async def footprint(process: Process) -> Footprint:
    """What a process with metrics holds now."""
    page = await asyncio.to_thread(_scraped, f"http://127.0.0.1:{process.env['WEFT_METRICS_PORT']}/metrics")
    [tasks] = [line.split()[1] for line in page.splitlines() if line.startswith("weft_event_loop_tasks ")]
    return Footprint(len(os.listdir(f"/proc/{process.pid}/fd")), int(float(tasks)))


async def settled(process: Process, before: Footprint, connections: int = 0) -> str:
    """Waits until a process holds no more than before, but for `connections`. -> what it holds too much; "" if none."""
    end = time.monotonic() + SETTLE_S
    while (now := await footprint(process)).exceeds(before, _SPARE + 2 * connections):
        if time.monotonic() > end:
            return f"{process.name} holds {now}, before it was {before}"
        await asyncio.sleep(0.1)
    return ""


def noise(process: Process) -> list[str]:
    """Lines of a process's log that are no log entries, such as those of asyncio and of tracebacks, and its errors."""
    lines = process.log.read_text(errors="replace").splitlines()
    return [line for line in lines if not line.startswith("{") or json.loads(line)["level"] in ("error", "critical")]


def _scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
