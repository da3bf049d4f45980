"""Invariants of the real core under random histories, and fairness between tenants under long overload."""

import itertools
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.limits import Limits
from services.scheduler.core.messages import Adapter, Assigned, Joined, Rejected, Submit, WorkerHello, WorkerLost
from tests.scheduler.stage import CARD, Stage, keys

GATEWAYS = ("g1", "g2")
WORKERS = ("w1", "w2", "w3")
POEMS = Adapter("poems", b"p" * 32)


class Histories(RuleBasedStateMachine):
    """Gateways and workers come, go, stall and repeat messages; the dicts below hold what gateways expect."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(Limits(queue_limit=4))
        self.numbers = itertools.count()
        self.pending: dict[tuple[str, str, int], str] = {}  # (gateway, job, attempt) that has no answer yet
        self.seen: dict[str, int] = dict.fromkeys(GATEWAYS, 0)
        self.running: dict[tuple[str, str], int] = {}  # (worker, job): attempt that a gateway sent there
        self.owner: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.identities: dict[str, bytes] = {}
        for gateway in GATEWAYS:
            self.stage.gateway(gateway)

    # -- events of gateways --

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        identity=st.sampled_from([b"", b"", b"x", b"y"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("st"),
        deadline_s=st.sampled_from([None, None, 0.3]),
        blocks=st.lists(st.integers(0, 3), max_size=3),
        adapter=st.sampled_from([b"", b"", POEMS.fingerprint]),
    )
    def submit(
        self,
        gateway: str,
        identity: bytes,
        priority: int,
        tenant: str,
        deadline_s: float | None,
        blocks: list[int],
        adapter: bytes,
    ) -> None:
        job = f"j{next(self.numbers)}"
        self.owner[job] = gateway
        self.attempts[job] = 1
        self.identities[job] = identity
        self.pending[gateway, job, 1] = "submitted"
        self.stage.submit(
            job,
            gateway,
            identity=identity,
            priority=priority,
            tenant=tenant,
            deadline_s=deadline_s,
            block_keys=keys(*blocks),
            adapter=adapter,
            fingerprint=job.encode(),
        )
        self.read_answers()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def resubmit(self, data: st.DataObject) -> None:
        """A job's worker failed it: the next attempt avoids that worker."""
        worker, job = data.draw(st.sampled_from(sorted(self.running)))
        if self.running[worker, job] == self.attempts[job]:
            self.next_attempt(job, worker)
        self.read_answers()

    def next_attempt(self, job: str, worker: str, lost_on: str = "") -> None:
        self.attempts[job] += 1
        self.pending[self.owner[job], job, self.attempts[job]] = "moved"
        self.stage.submit(
            job,
            self.owner[job],
            attempt=self.attempts[job],
            identity=self.identities[job],
            avoid=frozenset({worker}),
            fingerprint=job.encode(),
            lost_on=lost_on,
        )

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        gateway, job, attempt = data.draw(st.sampled_from(sorted(self.pending)))
        del self.pending[gateway, job, attempt]
        self.stage.withdraw(job, gateway)
        self.read_answers()

    @rule(gateway=st.sampled_from(GATEWAYS))
    def gateway_reconnects(self, gateway: str) -> None:
        """The gateway's link breaks and comes back: gateway and scheduler forget its waiting jobs."""
        self.pending = {key: why for key, why in self.pending.items() if key[0] != gateway}
        self.stage.gateway_leaves(gateway)
        self.stage.gateway(gateway)
        self.seen[gateway] = len(self.stage.inbox[gateway])
        self.read_answers()

    # -- events of workers --

    @rule(worker=st.sampled_from(WORKERS), credits=st.integers(1, 3), knows=st.booleans(), poems=st.booleans())
    def attach(self, worker: str, credits: int, knows: bool, poems: bool) -> None:
        running = [job for (at, job), attempt in self.running.items() if at == worker and attempt == 1 and knows]
        if not knows:
            self.running = {(at, job): n for (at, job), n in self.running.items() if at != worker}
        adapters = [POEMS] if poems else []
        self.stage.worker(worker, credits=credits, running=running, stored=keys(0, 1), adapters=adapters)
        self.read_answers()

    @rule(worker=st.sampled_from(WORKERS))
    def detach(self, worker: str) -> None:
        self.stage.worker_leaves(worker)
        self.read_answers()

    @rule(worker=st.sampled_from(WORKERS), draining=st.booleans())
    def report(self, worker: str, draining: bool) -> None:
        self.stage.report(worker, draining=draining, stored_keys=keys(2), evicted_keys=keys(1))
        self.read_answers()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker, job = data.draw(st.sampled_from(sorted(self.running)))
        attempt = self.running.pop((worker, job))
        self.stage.report(worker, job, attempt=attempt, tokens=3)
        self.read_answers()

    @rule(gateway=st.sampled_from(GATEWAYS), workers=st.sets(st.sampled_from(WORKERS)))
    def lose_sight(self, gateway: str, workers: set[str]) -> None:
        self.stage.unreachable(gateway, *(f"{worker}:1" for worker in workers))
        self.read_answers()

    @rule(seconds=st.sampled_from([0.05, 0.5, 2.5]), alive=st.sets(st.sampled_from(WORKERS)))
    def wait(self, seconds: float, alive: set[str]) -> None:
        self.stage.pass_time(seconds, heartbeat=sorted(alive))
        self.read_answers()

    # -- messages to gateways --

    def read_answers(self) -> None:
        """Records each answer; submits next attempts for jobs of a lost worker, as a gateway does."""
        for gateway in GATEWAYS:
            while self.seen[gateway] < len(self.stage.inbox[gateway]):
                message = self.stage.inbox[gateway][self.seen[gateway]]
                self.seen[gateway] += 1
                match message:
                    case Assigned() | Joined() | Rejected():
                        key = (gateway, message.job_id, message.attempt)
                        assert self.pending.pop(key, None), f"an answer to no open submission: {message}"
                        if isinstance(message, Assigned):
                            self.running[message.worker_id, message.job_id] = message.attempt
                    case WorkerLost(worker_id):
                        self.move_jobs_of(worker_id, gateway)

    def move_jobs_of(self, worker: str, gateway: str) -> None:
        moved = [job for at, job in self.running if at == worker and self.owner[job] == gateway]
        for job in moved:
            attempt = self.running.pop((worker, job))
            if attempt == self.attempts[job]:
                self.next_attempt(job, worker, lost_on=worker)

    # -- invariants --

    @invariant()
    def no_worker_has_more_jobs_than_its_credits_or_those_it_registered(self) -> None:
        for worker in self.stage.core.state.workers.values():
            assert len(worker.jobs) <= max(worker.hello.credits, len(worker.hello.running)), worker

    @invariant()
    def no_credit_is_held_by_a_job_that_no_gateway_sent(self) -> None:
        for worker in self.stage.core.state.workers.values():
            if worker.detached_at is None:  # Ends that a detached worker reports are ignored.
                assert {(worker.id, job) for job in worker.jobs} <= self.running.keys(), worker

    @invariant()
    def every_job_that_waits_is_pending_and_every_pending_one_waits(self) -> None:
        core = self.stage.core
        queued = [job for model in core.state.models.values() for job in model.queue]
        waiting = [(job.gateway_id, job.id, job.attempt) for job in queued]
        waiting += [(f.gateway_id, f.id, f.attempt) for job in queued for f in job.followers]
        assert sorted(map(str, waiting)) == sorted(map(str, self.pending))

    @invariant()
    def no_job_waits_beside_a_free_credit(self) -> None:
        core, now = self.stage.core, self.stage.now
        for model in core.state.models.values():
            for job in model.queue:
                free = [w for w in core.state.reach.open_to(job.need, model.healthy(now)) if w.free_credits]
                assert not free or job.submit.avoid, (free, job)

    @invariant()
    def each_running_job_is_charged_once(self) -> None:
        core = self.stage.core
        running = [job for worker in core.state.workers.values() for job in worker.jobs.values()]
        assert all(job.charged == 48 for job in running if job.gateway_id), running


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestHistories = Histories.TestCase


def test_two_tenants_that_offer_ten_to_one_are_served_one_to_one() -> None:
    """Two tenants offer 10:1; each gets half of the tokens (+- 10%), at any length of prompt and answer."""
    dice = random.Random(5)
    stage = Stage(Limits(queue_limit=10_000), check=False)
    stage.gateway("g1")
    for worker in ("w1", "w2"):
        stage.worker(worker, credits=4)
    served = {"loud": 0, "quiet": 0}
    sizes: dict[str, tuple[str, int, int]] = {}
    numbers = itertools.count()
    done = 0
    for _ in range(600):
        stage.now += 0.05
        for tenant in ["loud"] * 10 + ["quiet"]:
            job = f"{tenant}{next(numbers)}"
            sizes[job] = (tenant, dice.randint(1, 400), dice.randint(1, 200))
            stage.submit(job, tenant=tenant, prompt_tokens=sizes[job][1], max_tokens=200)
        for name in ("w1", "w2"):
            ended = dice.choice(sorted(stage.core.state.workers[name].jobs))
            tenant, prompt, answer = sizes[ended]
            stage.report(name, ended, tokens=answer)
            done += 1
            served[tenant] += prompt + answer
    share = served["quiet"] / sum(served.values())
    left = sum(job.tenant == "quiet" for job in stage.core.state.models["story"].queue)
    assert done == 1200
    assert left > 0, "the quiet tenant must offer more than half of the capacity"
    assert 0.45 <= share <= 0.55, share


def test_one_core_serves_a_thousand_workers() -> None:
    stage = Stage()
    stage.gateway("g1")
    for number in range(1000):
        stage.core.on_worker_attached(WorkerHello(f"w{number}", f"h{number}:1", CARD, credits=2), stage.now)
    for number in range(300):
        stage.core.on_submit("g1", Submit(f"j{number}", model="story", prompt_tokens=64, max_tokens=8), stage.now)
    stage.core.check_integrity()
    assert stage.core.state.counters.assigned == 300
    assert max(len(worker.jobs) for worker in stage.core.state.workers.values()) == 1
