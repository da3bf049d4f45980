"""Descriptors, tasks and log lines of a service process: at their baseline after any fault. Knows no faults."""

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import Iterable
from typing import NamedTuple

from tests.mesh.harness import Process

SETTLE_S = 30.0
"""How long a test waits until a process has let everything go."""
_REST_S = 0.3
"""A process that holds the same after this time is at rest."""


class Footprint(NamedTuple):
    """What a process holds."""

    descriptors: int
    tasks: int

    def exceeds(self, before: "Footprint") -> bool:
        """Whether it is more than before."""
        return self.descriptors > before.descriptors or self.tasks > before.tasks


async def footprint(process: Process) -> Footprint:
    """What a process with metrics holds now."""
    page = await asyncio.to_thread(_scraped, f"http://127.0.0.1:{process.env['WEFT_METRICS_PORT']}/metrics")
    [tasks] = [line.split()[1] for line in page.splitlines() if line.startswith("weft_event_loop_tasks ")]
    return Footprint(len(os.listdir(f"/proc/{process.pid}/fd")), int(float(tasks)))


async def settled(process: Process, before: Footprint) -> str:
    """Waits until a process holds no more than before. -> what it holds too much; "" if nothing."""
    end = time.monotonic() + SETTLE_S
    while (now := await footprint(process)).exceeds(before):
        if time.monotonic() > end:
            return f"{process.name} holds {now}, before it was {before}"
        await asyncio.sleep(0.05)
    return ""


class Baseline:
    """The least that each process has held at rest. A process that was restarted begins anew."""

    def __init__(self) -> None:
        self._least: dict[int, Footprint] = {}

    async def leaks(self, processes: Iterable[Process]) -> list[str]:
        """What processes at rest hold more than at any rest before, once they have had time to let it go."""
        found = []
        for process in processes:
            before = self._least.get(process.pid)
            if before is None:
                self._least[process.pid] = await _at_rest(process)
            elif leak := await settled(process, before):
                found.append(leak)
            else:
                now = await footprint(process)
                self._least[process.pid] = Footprint(*map(min, before, now))
        return found


async def _at_rest(process: Process) -> Footprint:
    """What a process holds when nothing changes any more."""
    last = await footprint(process)
    for _ in range(int(SETTLE_S / _REST_S)):
        await asyncio.sleep(_REST_S)
        last, now = await footprint(process), last
        if now == last:
            break
    return last


def noise(process: Process) -> list[str]:
    """Lines of a process's log that are no log entries, such as those of asyncio and of tracebacks, and its errors."""
    lines = process.log.read_text(errors="replace").splitlines()
    return [line for line in lines if not line.startswith("{") or json.loads(line)["level"] in ("error", "critical")]


def _scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
