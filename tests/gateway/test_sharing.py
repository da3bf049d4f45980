"""Work that is done once: cached results, joined generations, and retries that join their own generation."""

import asyncio

import grpc
import pytest

from protos import cache_pb2, mesh_pb2
from protos import inference_pb2 as api
from services.errors import WeftError
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.generation import Generation, Observer
from services.gateway.answers.registry import Registry
from services.gateway.links.result_cache import result_key
from tests.gateway.fakes import Answer, FakeMesh, FakeWorker, ask, assigned, generate, rejected, until
from tests.gateway.model import ANSWER, LOREM, ids_of, make_card

LATE = WeftError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline passed")


async def stored(mesh: FakeMesh, request: api.GenerateRequest) -> Answer:
    """Answers a request and waits until its result is stored."""
    assert mesh.cache is not None
    before = len(mesh.cache.results)
    answer = await generate(mesh.stub, request)
    await until(lambda: mesh.cache is not None and len(mesh.cache.results) > before)
    return answer


def slow(worker: FakeWorker, step_s: float = 2.0) -> None:
    """Makes a worker slower than the cache of a busy machine."""
    worker.step_s = step_s


async def test_a_result_hit_costs_no_worker() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        request = ask("hello", logprobs=1)
        miss = await stored(mesh, request)
        slow(mesh.workers[0])
        await asyncio.sleep(0.05)
        hit = await generate(mesh.stub, request)
        assert (hit.text(), hit.ids()) == (miss.text(), miss.ids())
        assert hit.last().stop_token_id == miss.last().stop_token_id
        assert [place for delta in hit.deltas for place in delta.logprobs] == [
            place for delta in miss.deltas for place in delta.logprobs
        ]
        receipt = hit.receipt
        assert receipt.result_hit
        assert (receipt.prefill_tokens, receipt.cached_tokens, receipt.attempts) == (0, 0, 0)
        assert list(receipt.workers) == []
        assert receipt.timings.cache_s > 0
        assert receipt.timings.prefill_s == receipt.timings.decode_s == 0
        assert receipt.completion_tokens == len(ANSWER)
        assert not miss.receipt.result_hit
        await until(lambda: not mesh.workers[0].running)  # The job that the worker received meanwhile is cancelled.


async def test_every_input_that_determines_the_tokens_is_in_the_key() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0, script=lambda job: ANSWER[:4]) as mesh:
        assert mesh.cache is not None
        requests = [
            ask("hello"),
            ask("hello world"),
            ask("hello", max_tokens=5),
            ask("hello", temperature=1.0, seed=1),
            ask("hello", temperature=1.0, seed=2),
            ask("hello", stop=["x"]),
            ask("hello", logprobs=0),
            ask("hello", logit_bias={3: 1.0}),
        ]
        for request in requests:
            await stored(mesh, request)
        assert len(mesh.cache.results) == len(requests)
        await stored(mesh, ask("hello", max_tokens=6, n=2))
        slow(mesh.workers[0])
        await asyncio.sleep(0.01)
        for same in (ask("hello", seed=9), ask("hello", top_p=1.0), ask("hello", request_id="other", priority=3)):
            assert (await generate(mesh.stub, same)).receipt.result_hit


async def test_random_draws_are_neither_stored_nor_looked_up() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        assert mesh.cache is not None
        await generate(mesh.stub, ask(temperature=1.0))
        await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS))
        assert mesh.cache.lookups == 0
        assert mesh.scheduler.submits[-1].identity == b""
        assert mesh.scheduler.submits[-1].block_keys == b""
        assert mesh.workers[0].jobs[-1].bypass_cache
        await generate(mesh.stub, ask(cache=api.CACHE_POLICY_READ_ONLY))
        assert mesh.cache.lookups == 1
        await asyncio.sleep(0.05)
        assert not mesh.cache.results


async def test_a_hit_ends_at_the_same_stop_string() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        request = ask(stop=["lazy"])
        miss = await stored(mesh, request)
        slow(mesh.workers[0])
        await asyncio.sleep(0.05)
        hit = await generate(mesh.stub, request)
        assert hit.receipt.result_hit
        assert hit.text() == miss.text() == LOREM.partition("lazy")[0]
        assert hit.ids() == miss.ids()
        assert hit.last().stop_string == "lazy"


async def test_a_slow_cache_delays_nothing() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=2) as mesh:
        assert mesh.cache is not None
        mesh.cache.delay_s = 10
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER
        assert not answer.receipt.result_hit
        assert answer.receipt.timings.first_token_s < 1


async def test_a_dead_cache_is_a_miss() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        await mesh.stop("cache")
        for _ in range(2):
            answer = await generate(mesh.stub, ask())
            assert answer.ids() == ANSWER


async def test_a_hit_after_the_first_token_is_ignored() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        assert mesh.cache is not None
        await stored(mesh, ask())
        for result in mesh.cache.results.values():
            result.CopyFrom(cache_pb2.CachedResult(token_ids=[9], finish_reason=api.FINISH_REASON_STOP))
        mesh.cache.delay_s = 0.1
        mesh.workers[0].step_s = 0.02
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER
        assert not answer.receipt.result_hit


async def test_a_hit_answers_a_request_that_was_rejected() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        await stored(mesh, ask())
        mesh.scheduler.workers = []
        answer = await generate(mesh.stub, ask())
        assert answer.receipt.result_hit


async def test_a_failed_answer_is_not_stored() -> None:
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        assert mesh.cache is not None
        mesh.workers[0].hold_at = 3
        await generate(mesh.stub, ask(), timeout=0.2)
        await asyncio.sleep(0.05)
        assert not mesh.cache.results


async def test_an_identical_job_is_joined_at_its_worker() -> None:
    def join(submit: mesh_pb2.Submit) -> mesh_pb2.DispatchResponse | None:
        leader = mesh.scheduler.submits[0]
        if submit is leader or not submit.identity:
            return None
        assert submit.identity == leader.identity
        joined = mesh_pb2.Joined(
            job_id=submit.job_id,
            attempt=submit.attempt,
            worker_id="worker-0",
            address=mesh.address("worker-0"),
            leader_job_id=leader.job_id,
        )
        return mesh_pb2.DispatchResponse(joined=joined)

    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 10
        mesh.scheduler.decide = join
        leading = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: worker.sent == 10)
        following = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: len(worker.attached) == 1)
        worker.hold_at = None
        leader, follower = await asyncio.gather(leading, following)
        assert leader.ids() == follower.ids() == ANSWER
        assert len(worker.jobs) == 1
        assert follower.receipt.joined
        assert not leader.receipt.joined
        assert follower.receipt.prefill_tokens == 0
        # The generation to join is gone: after the second failed join the job runs on its own, without an identity.
        lonely = await generate(mesh.stub, ask())
        assert lonely.ids() == ANSWER
        assert lonely.receipt.attempts == 3
        assert not lonely.receipt.joined
        assert [submit.attempt for submit in mesh.scheduler.submits] == [1, 1, 1, 2, 3]
        assert [bool(submit.identity) for submit in mesh.scheduler.submits] == [True, True, True, True, False]


async def test_a_retry_joins_its_own_generation_from_the_start() -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 10
        request = ask(request_id="mine")
        leaving = mesh.stub.Generate(request)
        await leaving.read()
        await until(lambda: worker.sent == 10)
        retrying = asyncio.create_task(generate(mesh.stub, request))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.sleep(0.05)
        assert not worker.cancelled  # One subscriber is left.
        worker.hold_at = None
        answer = await retrying
        assert answer.ids() == ANSWER
        assert answer.text() == LOREM
        assert answer.receipt.joined
        assert answer.receipt.request_id == "mine"
        assert len(worker.jobs) == 1
        again = await generate(mesh.stub, request)  # The first generation has ended.
        assert again.ids() == ANSWER
        assert not again.receipt.joined


@pytest.fixture
def subscribers(monkeypatch: pytest.MonkeyPatch) -> list[Observer]:
    """The subscribers of all generations, in the order in which they subscribed."""
    subscribers: list[Observer] = []
    enter = Registry.enter

    def enter_and_note(self: Registry, admitted: AdmittedRequest, subscriber: Observer) -> tuple[Generation, bool]:
        subscribers.append(subscriber)
        return enter(self, admitted, subscriber)

    monkeypatch.setattr(Registry, "enter", enter_and_note)
    return subscribers


@pytest.mark.parametrize("timeouts", [(60, 600), (600, 60)])
async def test_calls_that_share_a_generation_keep_their_own_deadlines(
    timeouts: tuple[int, int], subscribers: list[Observer]
) -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 10
        calls = []
        for timeout_s in timeouts:
            calls.append(asyncio.create_task(generate(mesh.stub, ask(request_id="mine"), timeout=timeout_s)))
            await until(lambda: len(subscribers) == len(calls) and worker.sent == 10)
        [job] = worker.jobs
        worker.running.clear()
        worker.hold_at = None
        end = mesh_pb2.JobEnd(stream_id=job.stream_id, reason=api.FINISH_REASON_ERROR, failure=LATE.failure())
        worker.send(mesh_pb2.RunResponse(ends=[end]))
        answers = await asyncio.gather(*calls)
        if timeouts == (600, 60):  # The job had the latest of the deadlines.
            assert [answer.error and answer.error.code() for answer in answers] == [LATE.code] * 2
            return
        assert [answer.ids() for answer in answers] == [ANSWER] * 2
        again = worker.jobs[1]
        assert job.deadline_s < 300 < again.deadline_s  # gRPC rounds timeouts up
        assert list(again.token_ids[again.prompt_len :]) == ANSWER[:10]
        assert list(mesh.scheduler.submits[1].avoid) == []  # The worker did not fail, so it is not avoided.


async def test_a_deadline_that_passed_in_the_queue_does_not_end_a_later_subscriber(subscribers: list[Observer]) -> None:
    async with FakeMesh() as mesh:
        mesh.scheduler.hold = True
        sooner = asyncio.create_task(generate(mesh.stub, ask(request_id="mine"), timeout=60))
        await until(lambda: len(mesh.scheduler.submits) == 1)
        later = asyncio.create_task(generate(mesh.stub, ask(request_id="mine"), timeout=600))
        await until(lambda: len(subscribers) == 2)
        mesh.scheduler.hold = False
        first = mesh.scheduler.submits[0]
        mesh.scheduler.send(rejected(first, LATE))
        assert [answer.ids() for answer in await asyncio.gather(sooner, later)] == [ANSWER] * 2
        assert first.deadline_s < 300 < mesh.scheduler.submits[1].deadline_s  # gRPC rounds timeouts up


async def test_a_late_subscriber_receives_the_past_in_messages_of_bounded_size() -> None:
    async with FakeMesh(script=lambda job: [5] * 1000, card=make_card(context_length=2000)) as mesh:
        worker = mesh.workers[0]
        worker.hold_at, worker.tokens_per_step = 900, 100
        request = ask(request_id="mine", max_tokens=1500)
        leading = asyncio.create_task(generate(mesh.stub, request))
        await until(lambda: worker.sent == 900)
        following = asyncio.create_task(generate(mesh.stub, request))
        await asyncio.sleep(0.05)
        worker.hold_at = None
        for answer in await asyncio.gather(leading, following):
            assert answer.ids() == [5] * 1000
            assert max(len(delta.token_ids) for delta in answer.deltas) <= 256


def test_results_are_shared_only_within_a_tenant_and_a_model() -> None:
    sampling = api.Sampling(temperature=0.0, max_tokens=5)
    keys = {
        result_key(b"a", make_card(), [1, 2], sampling, 0),
        result_key(b"b", make_card(), [1, 2], sampling, 0),
        result_key(b"a", make_card(fingerprint=b"g" * 32), [1, 2], sampling, 0),
        result_key(b"a", make_card(), [1, 3], sampling, 0),
        result_key(b"a", make_card(), [1, 2], sampling, 1),
    }
    assert len(keys) == 5


async def test_a_generation_ends_with_its_last_subscriber() -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 10
        calls = [mesh.stub.Generate(ask(request_id="mine")) for _ in range(2)]
        for call in calls:
            await call.read()
        for call in calls:
            assert not worker.cancelled
            call.cancel()
            await asyncio.sleep(0.05)
        await until(lambda: not worker.running)


async def test_the_same_id_with_another_body_is_refused() -> None:
    async with FakeMesh() as mesh:
        mesh.workers[0].hold_at = 3
        running = mesh.stub.Generate(ask("hello", request_id="mine"))
        await running.read()
        other = await generate(mesh.stub, ask("other", request_id="mine"))
        assert other.error is not None
        assert other.error.code() is grpc.StatusCode.ALREADY_EXISTS
        running.cancel()


async def test_each_of_many_clients_receives_its_own_answer() -> None:
    texts = [f"{number} bottles of ale" for number in range(40)]

    def script(job: mesh_pb2.Job) -> list[int]:
        return list(job.token_ids[1 : job.prompt_len])  # The answer repeats the prompt.

    async with FakeMesh(script=script) as mesh:
        mesh.scheduler.decide = lambda submit: assigned(submit, "worker-0", mesh.address("worker-0"))
        answers = await asyncio.gather(*(generate(mesh.stub, ask(text)) for text in texts))
        assert [answer.text() for answer in answers] == texts
        assert ids_of(texts[0]) == answers[0].ids()
