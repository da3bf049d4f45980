"""The waiting queue of one model, in the order in which jobs are served. Knows priorities, tenants and tokens, never
workers: what jobs need of these is a key here.

A queue has two lanes. While both have jobs, three of the express lane are served for each one of the normal lane. The
express lane is kept short (lanes.py): so a new job is served soon after a burst, and an old one is never starved.

Within a priority, tenants take turns by tokens served: the virtual token counter of Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024). A job is charged with its prompt and its longest possible answer when it starts; the
charge is corrected to the actual answer when the job ends.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import Generic, Protocol, TypeVar

from services.scheduler.core.records import Need

EXPRESS_TURNS = 3
"""Jobs of the express lane that are served for each one of the normal lane."""


class QueueItem(Protocol):
    """What the queue reads of a job. No value may change while the job waits."""

    @property
    def tenant(self) -> str:
        """The tenant that is charged."""

    @property
    def priority(self) -> int:
        """Higher is sooner."""

    @property
    def order(self) -> int:
        """Position among the tenant's jobs: lower is sooner, unique."""

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt ran: such jobs precede all others of their priority."""

    @property
    def express(self) -> bool:
        """Whether it waits in the express lane."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens to compute before the first new one."""

    @property
    def need(self) -> Need:
        """What it needs of a worker."""


J = TypeVar("J", bound=QueueItem)
K = TypeVar("K")


class TokenCounters:
    """The virtual token counter of each tenant."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._floor = 0
        self._sweep_at = 4096

    def served(self, tenant: str) -> int:
        """The tenant's counter."""
        return self._served.get(tenant, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        """Adds tokens to a tenant's counter; a negative number gives back an excess charge."""
        self._served[tenant] = self.served(tenant) + tokens

    def lift(self, tenant: str, waiting: Collection[str]) -> None:
        """Raises the counter of a tenant that had no waiting jobs, so that idle time earns no advantage.

        The counter starts no lower than the lowest of the tenants in `waiting` or, if there are none, than that of the
        tenant served last.
        """
        self._sweep(waiting)
        least = min(map(self.served, waiting), default=self._floor)
        if least > self.served(tenant):
            self._served[tenant] = least

    def raise_floor(self, tenant: str) -> None:
        """Stores the counter of the tenant that is served now, for the next lift into an empty queue."""
        self._floor = max(self._floor, self.served(tenant))

    def _sweep(self, waiting: Collection[str]) -> None:
        """Bounds the memory: a tenant below the floor without waiting jobs would be lifted to the floor anyway."""
        if len(self._served) < self._sweep_at:
            return
        self._served = {t: n for t, n in self._served.items() if n > self._floor or t in waiting}
        self._sweep_at = max(4096, 2 * len(self._served))


class _Lane(Generic[J]):
    """Waiting jobs by need and tenant, those of each tenant in their order."""

    def __init__(self) -> None:
        self._groups: dict[Need, dict[str, list[tuple[int, J]]]] = {}
        self.jobs = 0
        self.jobs_of: dict[str, int] = {}
        """Jobs by tenant."""

    def push(self, job: J) -> None:
        heapq.heappush(self._groups.setdefault(job.need, {}).setdefault(job.tenant, []), (job.order, job))
        self.jobs += 1
        self.jobs_of[job.tenant] = self.jobs_of.get(job.tenant, 0) + 1

    def pop(self, needs: Collection[Need], served: Callable[[str], int]) -> J | None:
        """Removes and returns the next of the jobs with these needs, that of the tenant least served; None for none."""
        groups = [self._groups[need] for need in needs if need in self._groups] if self.jobs else []
        if not groups:
            return None
        _, _, heap = min([(served(tenant), heap[0][0], heap) for group in groups for tenant, heap in group.items()])
        job = heapq.heappop(heap)[1]
        self._popped(job)
        return job

    def remove(self, job: J) -> None:
        heap = self._groups[job.need][job.tenant]
        heap.remove((job.order, job))
        heapq.heapify(heap)
        self._popped(job)

    def _popped(self, job: J) -> None:
        self.jobs -= 1
        _uncount(self.jobs_of, job.tenant)
        tenants = self._groups[job.need]
        if not tenants[job.tenant]:
            del tenants[job.tenant]
        if not tenants:
            del self._groups[job.need]


class _PriorityClass(Generic[J]):
    """Waiting jobs of one priority: resumed jobs first, in their order, then the two lanes in turns."""

    def __init__(self) -> None:
        self.resumed: _Lane[J] = _Lane()
        self.normal: _Lane[J] = _Lane()
        self.express: _Lane[J] = _Lane()
        self._express_served = 0  # Since the last job of the normal lane.

    def __len__(self) -> int:
        return self.resumed.jobs + self.normal.jobs + self.express.jobs

    def lane(self, job: J) -> _Lane[J]:
        """Where a job waits."""
        return self.resumed if job.resumed else self.express if job.express else self.normal

    def pop(self, needs: Collection[Need], served: Callable[[str], int]) -> J | None:
        job = self.resumed.pop(needs, served=lambda tenant: 0)
        if job is not None:
            return job
        lanes = (self.express, self.normal) if self._express_served < EXPRESS_TURNS else (self.normal, self.express)
        for lane in lanes:
            job = lane.pop(needs, served)
            if job is not None:
                self._express_served = self._express_served + 1 if lane is self.express else 0
                return job
        return None


class WaitingQueue(Generic[J]):
    """Jobs that wait for a worker. `pop` returns them by priority, then resumed jobs, then the least served tenant.

    Jobs with equal needs are one group, and `pop` looks only at the groups that it is given: those that cannot run
    cost nothing, and keep their places.
    """

    def __init__(self, counters: TokenCounters) -> None:
        self.counters = counters
        self.prompt_tokens = 0
        self._classes: dict[int, _PriorityClass[J]] = {}
        self._by_order: dict[int, J] = {}
        self._jobs_of: dict[str, int] = {}
        self._jobs_with: dict[Need, int] = {}

    def __len__(self) -> int:
        return len(self._by_order)

    def __iter__(self) -> Iterator[J]:
        """The waiting jobs in the order in which they were pushed."""
        return iter(self._by_order.values())

    @property
    def needs(self) -> Collection[Need]:
        """What the waiting jobs need, each need once."""
        return self._jobs_with.keys()

    def push(self, job: J) -> None:
        """Adds a job."""
        if job.tenant not in self._jobs_of:
            self.counters.lift(job.tenant, self._jobs_of.keys())
        self.put_back(job)

    def put_back(self, job: J) -> None:
        """Adds a job that was just taken out: its tenant has not been idle."""
        self._classes.setdefault(job.priority, _PriorityClass()).lane(job).push(job)
        self._by_order[job.order] = job
        self._jobs_of[job.tenant] = self._jobs_of.get(job.tenant, 0) + 1
        self._jobs_with[job.need] = self._jobs_with.get(job.need, 0) + 1
        self.prompt_tokens += job.prompt_tokens

    def pop(self, needs: Collection[Need]) -> J | None:
        """Removes and returns the next of the jobs with these needs; None if there is none."""
        for priority in sorted(self._classes, reverse=True):
            job = self._classes[priority].pop(needs, self.counters.served)
            if job is not None:
                self.counters.raise_floor(job.tenant)
                self._popped(job)
                return job
        return None

    def remove(self, job: J) -> None:
        """Removes a job that waits."""
        self._classes[job.priority].lane(job).remove(job)
        self._popped(job)

    def jobs_before(self, tenant: str, priority: int) -> int:
        """An estimate of how many waiting jobs would be served before a new job of this tenant.

        Within the priority, each tenant is served once for each job of this tenant; the estimate never exceeds the
        number of waiting jobs.
        """
        higher = sum(len(jobs) for p, jobs in self._classes.items() if p > priority)
        same = self._classes.get(priority)
        if same is None:
            return higher
        tenants = same.normal.jobs_of.keys() | same.express.jobs_of.keys() | {tenant}
        own = same.normal.jobs_of.get(tenant, 0) + same.express.jobs_of.get(tenant, 0)
        turns = (own + 1) * len(tenants) - 1
        return higher + min(len(same), same.resumed.jobs + turns)

    def jobs_before_express(self, priority: int) -> int:
        """How many waiting jobs would be served before a new job in the express lane of this priority.

        For every three jobs before it in the lane, it waits for one of the normal lane, too.
        """
        higher = sum(len(jobs) for p, jobs in self._classes.items() if p > priority)
        same = self._classes.get(priority)
        return (
            higher
            if same is None
            else (
                higher
                + same.resumed.jobs
                + min(len(same), same.express.jobs * (EXPRESS_TURNS + 1) // EXPRESS_TURNS + 1)
            )
        )

    def waiting_of(self, tenant: str) -> int:
        """The number of waiting jobs of a tenant."""
        return self._jobs_of.get(tenant, 0)

    def tenants_with(self, tenant: str) -> int:
        """The number of tenants with waiting jobs, counting `tenant` in any case."""
        return len(self._jobs_of) + (tenant not in self._jobs_of)

    def _popped(self, job: J) -> None:
        if not self._classes[job.priority]:
            del self._classes[job.priority]
        del self._by_order[job.order]
        self.prompt_tokens -= job.prompt_tokens
        _uncount(self._jobs_of, job.tenant)
        _uncount(self._jobs_with, job.need)


def _uncount(counts: dict[K, int], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
