"""The links to all workers, by address, and the watch over them: which to give up, and which to report as unreachable.

Knows neither models nor jobs.
"""

import asyncio
from collections.abc import Callable, Iterable

from services.gateway.links.link_health import MigrationBudget
from services.gateway.links.worker_link import WorkerLink, clock

WATCH_S, IDLE_S = 0.1, 0.5
"""Time between two looks at all links, while there are jobs and while there are none."""
PAUSE_S = 0.25
"""A look that is this late means that this process was stopped or did not read its links."""
PROBE_S = 1.0
"""Time between two attempts to reach a worker whose link is broken."""


class WorkerLinks:
    """The links to all workers. `watch` must run for workers to be given up and found again."""

    def __init__(self, gateway_id: str, mesh_id: str = "", connect_s: float = 0.5) -> None:
        self._gateway_id = gateway_id
        self._mesh_id = mesh_id
        self._connect_s = connect_s
        self._links: dict[str, WorkerLink] = {}
        self._unreachable: frozenset[str] = frozenset()
        self._broken: set[str] = set()
        """Workers whose last link broke, until a new one is connected."""
        self._probed_at: dict[str, float] = {}
        self._served: frozenset[str] = frozenset()
        self._budget = MigrationBudget()
        self.on_unreachable: Callable[[frozenset[str]], None] = lambda addresses: None
        """Called when the set of unreachable workers has changed, by host:port."""

    def to(self, address: str) -> WorkerLink:
        """The link to this worker; a new one if there is none or if the last one broke."""
        link = self._links.get(address)
        if link is None or not link.alive:
            if link is not None:
                self._broken.add(address)
            link = self._links[address] = WorkerLink(address, self._gateway_id, self._mesh_id, self._connect_s)
        return link

    def find(self, address: str) -> WorkerLink | None:
        """The link to this worker if there is one that is not broken."""
        link = self._links.get(address)
        return link if link is not None and link.alive else None

    def lose_worker(self, worker_id: str) -> None:
        """The scheduler reported the loss of a worker: a hint, which each link weighs."""
        for link in self._links.values():
            link.lose_worker(worker_id)

    async def keep(self, addresses: Iterable[str]) -> None:
        """Closes idle links to workers that are no longer served."""
        self._served = frozenset(addresses)
        gone = [address for address in self._links.keys() - self._served if self._links[address].idle]
        for address in gone:
            self._probed_at.pop(address, None)
        await asyncio.gather(*(self._links.pop(address).close() for address in gone))

    async def close(self) -> None:
        """Closes all links."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def watch(self) -> None:
        """Looks at all links until cancelled: ten times a second, twice while no link has jobs."""
        last = clock()
        while True:
            wait_s = IDLE_S if all(link.idle and link.usable for link in self._links.values()) else WATCH_S
            await asyncio.sleep(wait_s)
            now = clock()
            if (pause_s := now - last - wait_s) > PAUSE_S:
                for link in self._links.values():
                    link.health.excuse(pause_s)
            last = now
            self.look(now)

    def look(self, now: float) -> None:
        """Gives up workers, tries broken links again, reports which workers are out of reach."""
        for address, link in list(self._links.items()):
            if link.alive:
                if link.watch(now, self._patient(address, now)):
                    self._budget.spend(now)
            elif address in self._served and now - self._probed_at.get(address, 0.0) > PROBE_S:
                self._probed_at[address] = now
                self.to(address)
        self._broken = {each for each in self._broken if each in self._links and not self._links[each].connected}
        unreachable = frozenset(each for each in self._links if self._is_unreachable(each))
        if unreachable != self._unreachable:
            self._unreachable = unreachable
            self.on_unreachable(unreachable)

    def _patient(self, address: str, now: float) -> bool:
        """Whether to wait longer for a silent worker: no other one is left, or too many are silent already."""
        others = [each for each in self._served if each != address and not self._is_unreachable(each)]
        return not others or not self._budget.allows(len(self._served), now)

    def reaches(self, address: str) -> bool:
        """Whether new jobs may go to this worker, as far as is known."""
        return not self._is_unreachable(address)

    def _is_unreachable(self, address: str) -> bool:
        """Whether new jobs must not go to this worker. A broken link counts until a new one is connected."""
        link = self._links.get(address)
        if link is None:
            return False
        if not link.connected:
            return address in self._broken or not link.alive
        return not link.usable
