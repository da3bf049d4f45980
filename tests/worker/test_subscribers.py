"""Subscribers of a worker's jobs: a job ends with its last one, also if that one waited for the job to arrive."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.worker.job import Adapter, Cost, Ended, EndReason, Job, SamplingParams, StepOutput, TokenOut
from services.worker.service.job_record import JobRecord, Subscriber
from services.worker.service.jobs import Jobs
from services.worker.service.metrics import WorkerMetrics


class RecordingEngine:
    """An engine that records its calls."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.cancelled: list[int] = []
        self.announced: list[tuple[str, list[bytes]]] = []

    def submit(self, job: Job) -> None:
        self.submitted.append(job.key)

    def cancel(self, key: int, position: int) -> None:
        self.cancelled.append(key)

    def prefetch(self, source: str, keys: Sequence[bytes]) -> None:
        self.announced.append((source, list(keys)))


CARD = mesh.ModelCard(name="m", context_length=64, vocab_size=100)
ATTACH = mesh.AttachJob(stream_id=9, job_id="j")


def job(stream_id: int, placement: int = 1, tentative: bool = False) -> mesh.Job:
    """A job; a tentative one has no placement."""
    return mesh.Job(
        stream_id=stream_id,
        job_id="j",
        attempt=1,
        token_ids=[5, 6],
        prompt_len=2,
        sampling=api.Sampling(max_tokens=9, seed=1),
        placement=0 if tentative else placement,
        tentative=tentative,
    )


def closed(link: Subscriber) -> Subscriber:
    """Ends the link, so that iterating it ends."""
    link.close()
    return link


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def jobs(engine: RecordingEngine) -> Jobs:
    return Jobs(engine, CARD, 0.0, WorkerMetrics())


@pytest.mark.parametrize("leaves", [False, True], ids=["cancels", "breaks"])
async def test_a_job_does_not_run_for_a_subscriber_that_left_before(
    engine: RecordingEngine, jobs: Jobs, leaves: bool
) -> None:
    early, leader = Subscriber("early"), Subscriber("leader")
    jobs.attach(early, ATTACH)
    if leaves:
        jobs.leave(early)
    else:
        jobs.cancel(early, mesh.CancelJob(stream_id=9))
    jobs.start(leader, job(stream_id=1))
    jobs.cancel(leader, mesh.CancelJob(stream_id=1))
    assert engine.cancelled == engine.submitted


async def test_a_job_runs_on_for_a_subscriber_that_waited_for_it(engine: RecordingEngine, jobs: Jobs) -> None:
    early, leader = Subscriber("early"), Subscriber("leader")
    jobs.attach(early, mesh.AttachJob(stream_id=8, job_id="j"))
    jobs.attach(early, ATTACH)
    jobs.cancel(early, mesh.CancelJob(stream_id=9))
    jobs.start(leader, job(stream_id=1))
    jobs.cancel(leader, mesh.CancelJob(stream_id=1))
    assert engine.cancelled == []
    jobs.cancel(early, mesh.CancelJob(stream_id=8))
    assert engine.cancelled == engine.submitted


async def test_the_ends_of_two_jobs_with_one_id_carry_their_placements(engine: RecordingEngine, jobs: Jobs) -> None:
    gateway = Subscriber("gateway")
    jobs.start(gateway, job(stream_id=1, placement=4))
    jobs.cancel(gateway, mesh.CancelJob(stream_id=1))
    jobs.start(gateway, job(stream_id=2, placement=5))
    ends = [Ended(key, EndReason.CANCELLED, 0, Cost()) for key in engine.submitted]
    jobs.deliver(StepOutput([], ends))
    assert [end.placement for end in jobs.take_ended()] == [4, 5]


@pytest.mark.parametrize(("reason", "handed_off"), [(EndReason.LENGTH, True), (EndReason.STOP, False)])
async def test_a_job_for_another_worker_is_handed_off_unless_its_answer_has_ended(
    engine: RecordingEngine, jobs: Jobs, reason: EndReason, handed_off: bool
) -> None:
    gateway, late = Subscriber("gateway"), Subscriber("late")
    message = job(stream_id=1)
    message.handoff = True
    jobs.start(gateway, message)
    key = engine.submitted[0]
    jobs.deliver(StepOutput([TokenOut(key, 0, 7)], [Ended(key, reason, 1, Cost())]))
    jobs.attach(late, ATTACH)
    for link in (gateway, late):
        ends = [end for columns in [message async for message in closed(link)] for end in columns.ends]
        assert [end.handed_off for end in ends] == [handed_off]
    assert [end.handed_off for end in jobs.take_ended()] == [handed_off]


def test_blocks_that_will_be_needed_are_announced_to_the_engine(engine: RecordingEngine, jobs: Jobs) -> None:
    jobs.prefetch(mesh.Prefetch(source="there:1", block_keys=b"a" * 32 + b"b" * 32))
    assert engine.announced == [("there:1", [b"a" * 32, b"b" * 32])]
    with pytest.raises(WeftError, match="block_keys"):
        jobs.prefetch(mesh.Prefetch(source="there:1", block_keys=b"short"))


async def test_a_tentative_job_replaces_no_job_and_is_not_reported(engine: RecordingEngine, jobs: Jobs) -> None:
    owner, early, follower = Subscriber("owner"), Subscriber("early"), Subscriber("follower")
    jobs.start(owner, job(stream_id=1, placement=4))
    jobs.start(early, job(stream_id=1, tentative=True))
    assert engine.cancelled == []  # The confirmed job with the same id runs on,
    assert [running.job_id for running in jobs.running()] == ["j"]  # and is the one reported to the scheduler.
    jobs.attach(follower, ATTACH)
    first, second = engine.submitted
    jobs.deliver(StepOutput([TokenOut(first, 0, 50), TokenOut(second, 0, 60)], []))
    jobs.cancel(early, mesh.CancelJob(stream_id=1))
    assert engine.cancelled == [second]
    jobs.deliver(StepOutput([], [Ended(second, EndReason.CANCELLED, 1, Cost())]))
    assert jobs.take_ended() == []  # It held no credit.
    jobs.deliver(StepOutput([], [Ended(first, EndReason.LENGTH, 1, Cost())]))
    assert [end.placement for end in jobs.take_ended()] == [4]
    assert [list(message.token_ids) async for message in closed(follower)] == [[50]]


async def test_a_job_that_is_confirmed_is_joined_by_waiting_subscribers(engine: RecordingEngine, jobs: Jobs) -> None:
    owner, early, follower = Subscriber("owner"), Subscriber("early"), Subscriber("follower")
    jobs.start(early, job(stream_id=1, tentative=True))
    first = engine.submitted[0]
    jobs.deliver(StepOutput([TokenOut(first, 0, 50)], []))
    jobs.attach(follower, ATTACH)
    assert jobs.running() == []
    jobs.confirm(early, mesh.ConfirmJob(stream_id=1, placement=5))
    assert len(jobs.running()) == 1
    jobs.start(owner, job(stream_id=1, placement=6))
    assert engine.cancelled == [first]
    [message] = [message async for message in closed(follower)]
    assert (list(message.token_ids), message.ends[0].failure.reason) == ([50], "ATTEMPT_REPLACED")


async def test_a_job_that_ended_before_it_was_confirmed_is_retired(engine: RecordingEngine, jobs: Jobs) -> None:
    early, follower = Subscriber("early"), Subscriber("follower")
    jobs.start(early, job(stream_id=1, tentative=True))
    [key] = engine.submitted
    jobs.deliver(StepOutput([TokenOut(key, 0, 50)], [Ended(key, EndReason.LENGTH, 1, Cost())]))
    assert jobs.take_ended() == []
    jobs.confirm(early, mesh.ConfirmJob(stream_id=1, placement=5))
    assert [(end.placement, end.tokens) for end in jobs.take_ended()] == [(5, 1)]
    jobs.attach(follower, ATTACH)
    [message] = [message async for message in closed(follower)]
    assert (list(message.token_ids), message.ends[0].reason) == ([50], api.FINISH_REASON_LENGTH)
    assert not early.streams


@pytest.mark.parametrize("ended", [False, True])
async def test_a_tentative_job_ends_with_its_link(engine: RecordingEngine, jobs: Jobs, ended: bool) -> None:
    early = Subscriber("early")
    jobs.start(early, job(stream_id=1, tentative=True))
    [key] = engine.submitted
    if ended:
        jobs.deliver(StepOutput([], [Ended(key, EndReason.LENGTH, 0, Cost())]))
    jobs.leave(early)
    assert engine.cancelled == ([] if ended else [key])
    assert jobs.take_ended() == []


async def test_a_tentative_job_that_ended_and_is_cancelled_is_forgotten(engine: RecordingEngine, jobs: Jobs) -> None:
    early = Subscriber("early")
    jobs.start(early, job(stream_id=1, tentative=True))
    [key] = engine.submitted
    jobs.deliver(StepOutput([], [Ended(key, EndReason.LENGTH, 0, Cost())]))
    jobs.cancel(early, mesh.CancelJob(stream_id=1, position=0))
    assert (engine.cancelled, early.streams, jobs.take_ended()) == ([], {}, [])


async def test_the_refusal_of_a_tentative_job_is_not_reported(engine: RecordingEngine, jobs: Jobs) -> None:
    early = Subscriber("early")
    jobs.draining = True
    jobs.start(early, job(stream_id=1, tentative=True))
    assert (engine.submitted, jobs.take_ended()) == ([], [])
    jobs.start(early, job(stream_id=2, placement=3))
    assert [end.placement for end in jobs.take_ended()] == [3]


# ---- jobs that no scheduler placed: it is away, and two gateways have the same request ----


def local(stream_id: int, seed: int = 1, prior: tuple[int, ...] = (), tentative: bool = False) -> mesh.Job:
    """A job that its gateway placed itself."""
    message = job(stream_id, placement=0, tentative=tentative)
    message.sampling.seed = seed
    message.token_ids.extend(prior)
    return message


async def tokens_and_failures(link: Subscriber) -> tuple[list[int], list[str]]:
    """All that a link received."""
    messages = [message async for message in closed(link)]
    tokens = [token for message in messages for token in message.token_ids]
    return tokens, [end.failure.reason for message in messages for end in message.ends]


@pytest.mark.parametrize("placement", [0, 4])
@pytest.mark.parametrize("prior", [(), (50,)])
async def test_a_request_that_another_gateway_placed_itself_joins_the_running_one(
    engine: RecordingEngine, jobs: Jobs, placement: int, prior: tuple[int, ...]
) -> None:
    first, second = Subscriber("first"), Subscriber("second")
    jobs.start(first, job(stream_id=1, placement=placement))
    [key] = engine.submitted
    jobs.deliver(StepOutput([TokenOut(key, 0, 50)], []))
    jobs.start(second, local(stream_id=7, prior=prior))
    jobs.deliver(StepOutput([TokenOut(key, 1, 51)], [Ended(key, EndReason.LENGTH, 2, Cost())]))
    assert (engine.submitted, engine.cancelled) == ([key], [])
    assert await tokens_and_failures(second) == ([50, 51][len(prior) :], [""])
    assert await tokens_and_failures(first) == ([50, 51], [""])


async def test_another_request_with_the_id_of_a_running_one_is_refused(engine: RecordingEngine, jobs: Jobs) -> None:
    first, second = Subscriber("first"), Subscriber("second")
    jobs.start(first, local(stream_id=1))
    jobs.start(second, local(stream_id=7, seed=2))
    jobs.start(second, local(stream_id=8, seed=2, tentative=True))
    jobs.confirm(second, mesh.ConfirmJob(stream_id=8))
    key, tentative = engine.submitted
    assert engine.cancelled == [tentative]
    assert jobs.take_ended() == []  # The scheduler did not place it.
    assert await tokens_and_failures(second) == ([], ["REQUEST_ID_IN_USE"] * 2)
    assert not second.streams
    jobs.deliver(StepOutput([TokenOut(key, 0, 50)], []))
    assert await tokens_and_failures(first) == ([50], [])


async def test_a_tentative_job_is_given_up_for_the_one_that_another_gateway_has(
    engine: RecordingEngine, jobs: Jobs
) -> None:
    first, second = Subscriber("first"), Subscriber("second")
    jobs.start(first, local(stream_id=1))
    jobs.start(second, local(stream_id=7, tentative=True))
    running, tentative = engine.submitted
    jobs.deliver(StepOutput([TokenOut(running, 0, 50), TokenOut(tentative, 0, 50)], []))
    jobs.deliver(StepOutput([TokenOut(running, 1, 51)], []))
    jobs.confirm(second, mesh.ConfirmJob(stream_id=7))
    assert engine.cancelled == [tentative]
    jobs.deliver(StepOutput([TokenOut(running, 2, 52)], [Ended(tentative, EndReason.CANCELLED, 1, Cost())]))
    assert await tokens_and_failures(second) == ([50, 51, 52], [])
    assert [each.job_id for each in jobs.running()] == ["j"]
    jobs.cancel(first, mesh.CancelJob(stream_id=1))
    assert engine.cancelled == [tentative]  # The second gateway still needs the running one.


async def test_a_gateways_later_attempt_replaces_its_own_and_one_that_has_other_tokens(
    engine: RecordingEngine, jobs: Jobs
) -> None:
    first, second = Subscriber("first"), Subscriber("second")
    jobs.start(first, local(stream_id=1))
    jobs.start(first, local(stream_id=2))
    assert engine.cancelled == engine.submitted[:1]
    jobs.start(second, local(stream_id=7, prior=(60,)))  # Tokens that the running job did not produce.
    assert engine.cancelled == engine.submitted[:2]
    assert await tokens_and_failures(first) == ([], ["ATTEMPT_REPLACED"] * 2)


def test_the_same_request_has_the_same_answer_whatever_its_deadline() -> None:
    def adapter(name: str) -> Adapter:
        return Adapter(name, name.encode(), 8, 0, object())  # Each loading has weights of its own.

    first = Job(1, [5, 6, 50], 2, SamplingParams(9, seed=1), deadline=3.0, adapter=adapter("a"))
    record = JobRecord(1, "j", 1, request=first)
    again = replace(first, key=2, token_ids=[5, 6], deadline=None, priority=4, speculation=0, adapter=adapter("a"))
    assert record.same_request(again)
    for changed in (
        replace(again, token_ids=[5, 7]),
        replace(again, params=SamplingParams(9, seed=2)),
        replace(again, sample_index=1),
        replace(again, salt=b"other"),
        replace(again, adapter=adapter("b")),
        replace(again, adapter=None),
    ):
        assert not record.same_request(changed)


async def test_several_tokens_of_a_step_are_sent_in_order(engine: RecordingEngine, jobs: Jobs) -> None:
    link = Subscriber("owner")
    jobs.start(link, job(stream_id=1))
    (key,) = engine.submitted
    jobs.deliver(StepOutput([TokenOut(key, position, 50 + position) for position in range(3)], [], extra=[2]))
    messages = [message async for message in closed(link)]
    assert [token for message in messages for token in message.token_ids] == [50, 51, 52]


async def test_tokens_of_a_step_are_sent_in_its_order(engine: RecordingEngine, jobs: Jobs) -> None:
    """The engine's thread puts first tokens first; nothing turns their order round."""
    subscriber = Subscriber("both")
    for number in (1, 2):
        message = job(stream_id=number)
        message.job_id = f"j{number}"
        jobs.start(subscriber, message)
    early, late = engine.submitted
    jobs.deliver(StepOutput([TokenOut(late, 0, 60), TokenOut(early, 0, 50)], []))
    for key in (early, late):
        jobs.deliver(StepOutput([], [Ended(key, EndReason.LENGTH, 1, Cost())]))
    tokens = [token async for message in closed(subscriber) for token in message.token_ids]
    assert tokens == [60, 50]
