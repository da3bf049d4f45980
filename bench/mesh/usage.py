"""Processor time and memory of the processes of a mesh while a load runs, and whether all of them live on."""

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.mesh import processes

SAMPLE_S = 0.5


class Died(Exception):
    """A process of the mesh ended during a measurement; the message is one line."""


@dataclass(slots=True)
class Usage:
    """What the processes have used since `follow` began."""

    up: processes.Up
    began: float = field(default_factory=time.monotonic)
    pids: dict[str, list[int]] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)
    memory: int = 0
    """Most bytes that all gateway processes had resident at once."""

    async def follow(self) -> None:
        """Samples until cancelled. Raises Died."""
        self.pids = self.up.running()
        self.start, self.began = self._processor_s(), time.monotonic()
        while True:
            now = self.up.running()
            for name, pids in self.pids.items():
                if not set(pids) <= set(now.get(name, [])):
                    raise Died(f"a process of the mesh ended: {name} {pids} before, {now.get(name)} now")
            self.memory = max(self.memory, self.resident())
            await asyncio.sleep(SAMPLE_S)

    def resident(self) -> int:
        """Bytes that all gateway processes have resident."""
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.up.running()["gateway"])
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def used_s(self) -> dict[str, float]:
        """Processor time that each service has used since the start."""
        return {name: used - self.start[name] for name, used in self._processor_s().items()}

    def cores(self) -> dict[str, float]:
        """Cores that each service has used since the start."""
        elapsed = time.monotonic() - self.began
        return {name: used / elapsed for name, used in self.used_s().items()}

    def _processor_s(self) -> dict[str, float]:
        return {name: sum(map(processes.processor_s, pids)) for name, pids in self.up.running().items()}
