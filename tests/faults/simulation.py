"""A seeded simulation of the gateway's recovery: one answer among crashes, late messages, cache hits and joins.

Real: Continuation, Attempt, EarlyAttempt, RetryPolicy, Journal, JobStream and the bookkeeping of WorkerLink. Simulated:
the network, workers, scheduler and result cache. The clock is virtual, and every delay is one of a few values, so that
messages often meet in one turn of the event loop. A seed always gives the same history:

    python -m tests.faults.simulation --seeds 10000          all of them
    python -m tests.faults.simulation --first 4711 --seeds 1  one of them again
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from protos import cache_pb2
from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError, unavailable
from services.gateway.access.tenants import Tenant
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.attempt import Answer
from services.gateway.answers.continuation import Continuation
from services.gateway.answers.job_messages import JobMessages
from services.gateway.links.adapters import Served
from services.gateway.links.arrivals import Arrivals
from services.gateway.links.link_health import LinkHealth
from services.gateway.links.result_cache import ResultKey
from services.gateway.links.worker_link import WorkerLink
from services.gateway.text.journal import Journal
from services.gateway.traffic import ModelCounts

TOKENS = 12
REFERENCE = [100 + 7 * position % 50 for position in range(TOKENS)]
"""The answer: a token follows from its position alone."""
PROMPT = [1, 2, 3]
DELAYS = (0.0, 0.0, 0.001, 0.002, 0.003, 0.02)
CARD = mesh.ModelCard(name="m", fingerprint=b"f" * 32, block_size=4, vocab_size=1000, context_length=100)
PATIENCE_S = 1000.0
"""Virtual seconds after which an answer counts as stuck."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer where a real loop would sleep."""

    _now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = 1e-6  # Timers this close to each other run in one turn of the loop.

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        scheduled: Any = self._scheduled  # type: ignore[attr-defined]
        if not ready and scheduled:
            # A cancelled timer that comes first is dropped without being waited for.
            self._now = max(self._now, min((timer.when() for timer in scheduled if not timer.cancelled()), default=0.0))
        super()._run_once()  # type: ignore[misc]


class Characters:
    """A detokenizer: each token is one character."""

    def feed(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


class SimulatedWorker:
    """One worker behind one link. Messages arrive in order, each after a delay."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.link = SimulatedLink(self)
        self.jobs: dict[int, int] = {}
        """Position of each stream's next token."""
        self.held: set[int] = set()
        """Tentative jobs."""
        self._arrives = {True: 0.0, False: 0.0}
        self._hops = world.dice.randrange(5)

    def later(self, to_worker: bool, act: Callable[[], None]) -> None:
        """Delivers a message after those before it."""
        loop = asyncio.get_running_loop()
        at = max(self._arrives[to_worker] + 1e-9, loop.time() + self.world.dice.choice(DELAYS))
        self._arrives[to_worker] = at
        loop.call_at(at, in_turns, self._hops, act)

    def receive(self, message: mesh.RunRequest) -> None:
        """A message of the gateway."""
        kind = message.WhichOneof("message")
        if kind == "job":
            self.jobs[message.job.stream_id] = len(message.job.token_ids) - message.job.prompt_len
            self.step(message.job.stream_id, message.job.handoff)
        elif kind == "attach":
            self.attach(message.attach)
        elif kind == "cancel" and self.jobs.pop(message.cancel.stream_id, None) is not None:
            self.send(mesh.RunResponse(ends=[mesh.JobEnd(stream_id=message.cancel.stream_id, reason=CANCELLED)]))

    def attach(self, attach: mesh.AttachJob) -> None:
        """The leader may be gone, may be cancelled soon, or has some tokens already, which are sent at once."""
        if self.world.dice.random() < 0.3:
            gone = unavailable("JOB_NOT_FOUND", "gone").failure()
            end = mesh.JobEnd(stream_id=attach.stream_id, reason=api.FINISH_REASON_ERROR, failure=gone)
            self.send(mesh.RunResponse(ends=[end]))
            return
        if self.world.divides and self.world.dice.random() < 0.2:  # The leader is handed off, or was.
            message = tokens_of(attach.stream_id, range(attach.position, max(attach.position, 1)))
            message.ends.add(stream_id=attach.stream_id, reason=api.FINISH_REASON_LENGTH, handed_off=True)
            self.send(message)
            return
        ahead = self.world.dice.randrange(attach.position, TOKENS)
        self.jobs[attach.stream_id] = ahead
        positions = range(attach.position, ahead)
        self.send(tokens_of(attach.stream_id, positions))
        if self.world.dice.random() < 0.3:
            asyncio.get_running_loop().call_later(self.world.dice.choice(DELAYS), self.cancel_leader, attach.stream_id)
        self.step(attach.stream_id)

    def cancel_leader(self, stream_id: int) -> None:
        """The last client of the leader has left."""
        if self.jobs.pop(stream_id, None) is not None:
            self.send(mesh.RunResponse(ends=[mesh.JobEnd(stream_id=stream_id, reason=CANCELLED)]))

    def step(self, stream_id: int, handoff: bool = False) -> None:
        """Computes the next tokens of a stream, and its end behind the last. With `handoff` that is after one token."""
        if stream_id not in self.jobs:
            return
        position = self.jobs[stream_id]
        count = 1 if handoff else min(self.world.dice.choice((1, 1, 2, 5)), TOKENS - position)
        message = tokens_of(stream_id, range(position, position + count))
        self.jobs[stream_id] += count
        if position + count == TOKENS:
            del self.jobs[stream_id]
            message.ends.add(stream_id=stream_id, reason=api.FINISH_REASON_LENGTH)
        elif handoff:
            del self.jobs[stream_id]
            message.ends.add(stream_id=stream_id, reason=api.FINISH_REASON_LENGTH, handed_off=True)
        else:
            asyncio.get_running_loop().call_later(self.world.dice.choice(DELAYS), self.step, stream_id)
        self.send(message)

    def send(self, message: mesh.RunResponse) -> None:
        """Sends a message, unless the link breaks before it arrives."""
        link = self.link
        self.later(False, lambda: link.deliver(message))

    def crash(self) -> None:
        """The worker dies, and another process takes its place."""
        self.jobs.clear()
        self.link.crash()
        self.link = SimulatedLink(self)


class SimulatedArrivals(Arrivals):
    """Of a gateway that is behind at random, and whose deliveries take as long as they like."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(lambda: asyncio.get_running_loop().time() + dice.choice(DELAYS))
        self._dice = dice

    def received(self, now: float) -> None:
        """A message has been read; it arrived before the last delivery ended, or long after."""
        super().received(self._dice.choice((-math.inf, math.inf)))


class SimulatedLink(WorkerLink):
    """The real bookkeeping over a simulated connection."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker = worker
        self.address, self.alive, self.connected = worker.name, True, True
        self.health = LinkHealth.begin(0.0)
        self.arrivals = SimulatedArrivals(worker.world.dice)
        self._streams, self._stream_ids, self._sent = {}, worker.world.stream_ids, 0

    def _put(self, message: mesh.RunRequest) -> int:
        worker, link = self.worker, self
        worker.later(True, lambda: worker.receive(message) if link.alive else None)
        return 1

    def deliver(self, message: mesh.RunResponse) -> None:
        """A message of the worker arrives."""
        if self.alive:
            self._receive(message)

    def crash(self) -> None:
        """The connection ends."""
        self._break()


class World:
    """Everything around one continuation, with its own dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.stream_ids = itertools.count(1)
        self.suspects: frozenset[bytes] = frozenset()
        self.workers = {f"w{number}": SimulatedWorker(self, f"w{number}") for number in range(self.dice.choice((1, 2)))}
        self.hit = self.dice.random() < 0.5
        self.enabled = True
        self.divides = seed % 2 == 0
        """Some answers continue at another worker after their first token."""
        self.handoffs = 0
        """Assigned handoffs that were not withdrawn."""

    async def pause(self) -> None:
        """A delay, in turns of the loop or in time."""
        if self.dice.random() < 0.5:
            for _ in range(self.dice.randrange(5)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.dice.choice(DELAYS))

    # ---- as scheduler, result cache and worker links ----

    async def submit(self, submit: mesh.Submit) -> mesh.Assigned | mesh.Joined:
        """The placement of a job."""
        await self.pause()
        name = self.dice.choice(sorted(self.workers))
        where: dict[str, Any] = {
            "job_id": submit.job_id,
            "attempt": submit.attempt,
            "worker_id": name,
            "address": name,
        }
        if self.divides and self.dice.random() < 0.5:
            to = self.dice.choice(sorted(self.workers))
            where["handoff"] = mesh.Handoff(worker_id=to, address=to, placement=2)
        if submit.identity and self.dice.random() < 0.3:
            return mesh.Joined(**where, leader_job_id="another")
        self.handoffs += "handoff" in where
        return mesh.Assigned(**where, placement=1)

    def withdraw(self, job_id: str) -> None:
        """A credit that is given back."""
        self.handoffs -= 1
        assert self.handoffs >= 0, "a credit was given back twice"

    def report_survived(self, job_id: str) -> None:
        """Nothing is on probation here."""

    async def get(self, key: ResultKey, traceparent: str) -> cache_pb2.CachedResult | None:
        """The cached result: the whole answer, or none."""
        await self.pause()
        return cache_pb2.CachedResult(token_ids=REFERENCE, finish_reason=LENGTH) if self.hit else None

    def put(self, key: ResultKey, result: cache_pb2.CachedResult) -> None:
        """A stored result must be the whole answer."""
        assert list(result.token_ids) == REFERENCE, "a wrong answer was cached"

    def to(self, address: str) -> WorkerLink:
        """The link to a worker."""
        return self.workers[address].link

    def looked_up(self, model: str, hit: bool) -> None:
        """A metric."""

    def attempt_lost(self, loss: WeftError) -> None:
        """A metric."""


class Client:
    """Follows the journal as a subscriber does, and checks whatever it can see."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.notified = asyncio.Event()

    async def follow(self, continuation: Continuation) -> None:
        """Takes tokens whenever it is notified, until cancelled."""
        while True:
            await self.notified.wait()
            self.notified.clear()
            continuation.advance()
            self.check(continuation.journal.tokens)

    def check(self, tokens: list[int]) -> None:
        """What was seen stays, and is a prefix of the reference."""
        assert tokens[: len(self.seen)] == self.seen, "tokens that were delivered have changed"
        assert tokens == REFERENCE[: len(tokens)], f"wrong tokens: {tokens}"
        self.seen = list(tokens)


async def history(seed: int, make: Callable[..., Continuation] = Continuation) -> str:
    """Simulates one answer. -> how it ended: cached, generated, lost (too many attempts) or cancelled."""
    world, client = World(seed), Client()
    dice = world.dice
    sampling = api.Sampling(max_tokens=TOKENS, temperature=0.0)
    request = api.GenerateRequest(sampling=sampling)
    admitted = AdmittedRequest(request, "r", Tenant("t", b"s" * 8, "t"), Served(CARD, tuple(world.workers)), "")
    journal = Journal(PROMPT, Characters(), None)  # type: ignore[arg-type]
    answer = Answer(journal, lambda: math.inf, client.notified.set, ModelCounts, 0.0, 0.0)
    key = ResultKey(admitted.tenant.salt, CARD, PROMPT, sampling, 0)
    settings = types.SimpleNamespace(gateway_max_attempts=5)
    backend: Any = types.SimpleNamespace(
        settings=settings, scheduler=world, workers=world, results=world, metrics=world, catalog=None
    )
    continuation = make(backend, admitted, answer, JobMessages(admitted, 0, sampling, PROMPT, key), key)
    following = asyncio.create_task(client.follow(continuation))
    running = asyncio.create_task(continuation.run())
    for _ in range(dice.randrange(4)):
        worker = dice.choice(list(world.workers.values()))
        asyncio.get_running_loop().call_later(dice.choice(DELAYS) + dice.choice(DELAYS), worker.crash)
    for _ in range(dice.randrange(8)):  # Other continuations of the same request wake the same clients.
        asyncio.get_running_loop().call_later(dice.choice(DELAYS), in_turns, dice.randrange(5), client.notified.set)
    if dice.random() < 0.1:
        asyncio.get_running_loop().call_later(dice.choice(DELAYS) * 2, running.cancel)
    try:
        await asyncio.wait({running, following}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert running.done() or following.done(), "the answer never ends"
        if following.done():
            following.result()
        with contextlib.suppress(asyncio.CancelledError, WeftError):
            await running
        client.check(journal.tokens)
        if running.cancelled():
            return "cancelled"
        if running.exception() is not None:
            return "lost"
        assert journal.tokens == REFERENCE, f"the answer is {journal.tokens}"
        assert journal.ending is not None
        await asyncio.sleep(0.1)
        assert not any(worker.jobs for worker in world.workers.values()), "a job runs for nobody"
        return "cached" if continuation.costs.hit else "generated"
    finally:
        for task in (running, following):
            task.cancel()
        await asyncio.gather(running, following, return_exceptions=True)


def simulate(seed: int, make: Callable[..., Continuation] = Continuation) -> str:
    """Runs one history on a loop of its own. Raises AssertionError, whose text begins with the seed."""
    loop = VirtualLoop()
    work: Coroutine[Any, Any, str] = history(seed, make)
    try:
        return loop.run_until_complete(work)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        loop.close()


def in_turns(turns: int, act: Callable[[], None]) -> None:
    """Acts some turns of the loop later, as a message passes from the socket through the tasks of gRPC."""
    if turns:
        asyncio.get_running_loop().call_soon(in_turns, turns - 1, act)
    else:
        act()


def tokens_of(stream_id: int, positions: range) -> mesh.RunResponse:
    """The tokens of one stream at these positions."""
    ids = [REFERENCE[position] for position in positions]
    return mesh.RunResponse(stream_ids=[stream_id] * len(ids), positions=positions, token_ids=ids)


CANCELLED, LENGTH = api.FINISH_REASON_CANCELLED, api.FINISH_REASON_LENGTH


def main(arguments: list[str]) -> int:
    """Runs the seeds, prints how they ended. -> 1 if any of them broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10_000)
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    ends: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        try:
            ends[simulate(seed)] += 1
        except AssertionError as error:
            ends["broken"] += 1
            print(error, flush=True)
    print(dict(ends))
    return 1 if ends["broken"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
