"""The waiting line of one model: who is next. Knows priorities, tenants and tokens, never workers.

Within a priority, tenants take turns by tokens served: the virtual token counter of Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024), charged with a job's prompt and longest answer when it starts and corrected to the
actual answer when it ends.
"""

import heapq
from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the line needs to know of a job. None of it may change while the job waits."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def priority(self) -> int:
        """Higher is sooner."""

    @property
    def order(self) -> int:
        """Place among its tenant's jobs: lower is sooner, unique."""

    @property
    def resumed(self) -> bool:
        """It ran before: it goes ahead of its whole priority class."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens to compute before its first new one."""


J = TypeVar("J", bound=Waiting)


class Tally:
    """Tokens served to each tenant, as the line counts them."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._floor = 0
        self._sweep_at = 4096

    def served(self, tenant: str) -> int:
        """The tenant's counter."""
        return self._served.get(tenant, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        """Counts tokens for a tenant; negative tokens give back what was charged too much."""
        self._served[tenant] = self.served(tenant) + tokens

    def lift(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant without waiting jobs comes (back): its idle time earns it nothing.

        It starts no lower than the least served of those who wait or, with nobody waiting, than the last who was next.
        """
        self._sweep(waiting)
        least = min(map(self.served, waiting), default=self._floor)
        if least > self.served(tenant):
            self._served[tenant] = least

    def mark(self, tenant: str) -> None:
        """A tenant was next: remembers its counter for the next lift into an empty line."""
        self._floor = max(self._floor, self.served(tenant))

    def _sweep(self, waiting: Collection[str]) -> None:
        """Keeps memory bounded by the tenants that matter: who is below the floor would be lifted anyway."""
        if len(self._served) < self._sweep_at:
            return
        self._served = {t: n for t, n in self._served.items() if n > self._floor or t in waiting}
        self._sweep_at = max(4096, 2 * len(self._served))


class _PriorityClass(Generic[J]):
    """Waiting jobs of one priority: those resumed first, then each tenant's in their order."""

    def __init__(self) -> None:
        self.resumed: list[tuple[int, J]] = []
        self.tenants: dict[str, list[tuple[int, J]]] = {}

    def __bool__(self) -> bool:
        return bool(self.resumed or self.tenants)

    def __len__(self) -> int:
        return len(self.resumed) + sum(map(len, self.tenants.values()))

    def push(self, job: J) -> None:
        heap = self.resumed if job.resumed else self.tenants.setdefault(job.tenant, [])
        heapq.heappush(heap, (job.order, job))

    def pop(self, tally: Tally) -> J:
        if self.resumed:
            return heapq.heappop(self.resumed)[1]
        tenant = min(self.tenants, key=lambda t: (tally.served(t), self.tenants[t][0][0]))
        heap = self.tenants[tenant]
        job = heapq.heappop(heap)[1]
        if not heap:
            del self.tenants[tenant]
        return job

    def remove(self, job: J) -> None:
        heap = self.resumed if job.resumed else self.tenants[job.tenant]
        heap.remove((job.order, job))
        heapq.heapify(heap)
        if not heap and not job.resumed:
            del self.tenants[job.tenant]


class WaitingQueue(Generic[J]):
    """Jobs that wait for a worker, next one first."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.prompt_tokens = 0
        self._classes: dict[int, _PriorityClass[J]] = {}
        self._waiting: dict[int, J] = {}
        self._active: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[J]:
        """The waiting jobs, in the order of their arrival in this line."""
        return iter(self._waiting.values())

    def push(self, job: J) -> None:
        """A job begins to wait."""
        if job.tenant not in self._active:
            self.tally.lift(job.tenant, self._active.keys())
        self._classes.setdefault(job.priority, _PriorityClass()).push(job)
        self._waiting[job.order] = job
        self._active[job.tenant] = self._active.get(job.tenant, 0) + 1
        self.prompt_tokens += job.prompt_tokens

    def pop(self) -> J:
        """Takes out the job whose turn it is: highest priority, then resumed jobs, then the least served tenant's."""
        priority = max(self._classes)
        job = self._classes[priority].pop(self.tally)
        self.tally.mark(job.tenant)
        self._left(job)
        return job

    def remove(self, job: J) -> None:
        """A job waits no more."""
        self._classes[job.priority].remove(job)
        self._left(job)

    def ahead(self, tenant: str, priority: int) -> int:
        """About how many of the waiting jobs would be served before a new one of this tenant.

        Within the priority each tenant gets a turn for each of ours; never more than all of them.
        """
        higher = sum(len(jobs) for p, jobs in self._classes.items() if p > priority)
        same = self._classes.get(priority)
        if same is None:
            return higher
        tenants = same.tenants.keys() | {tenant}
        turns = (len(same.tenants.get(tenant, ())) + 1) * len(tenants) - 1
        return higher + min(len(same), len(same.resumed) + turns)

    def waiting(self, tenant: str) -> int:
        """How many jobs of a tenant wait."""
        return self._active.get(tenant, 0)

    def sharers(self, tenant: str) -> int:
        """How many tenants have jobs that wait, with this one."""
        return len(self._active) + (tenant not in self._active)

    def _left(self, job: J) -> None:
        if not self._classes[job.priority]:
            del self._classes[job.priority]
        del self._waiting[job.order]
        self.prompt_tokens -= job.prompt_tokens
        self._active[job.tenant] -= 1
        if not self._active[job.tenant]:
            del self._active[job.tenant]
