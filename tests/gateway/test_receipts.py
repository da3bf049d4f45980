"""Receipts: every instant is counted once, and the unaccounted time is small."""

import asyncio
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as api
from services.gateway.answers.receipt import AttemptCosts, Phase, Timeline, timings
from tests.gateway.fakes import Answer, FakeMesh, ask, assigned, generate, until
from tests.timing import timely

seconds = st.floats(0, 10)
PARTS = ("tokenize_s", "cache_s", "queue_s", "prefill_s", "decode_s", "detokenize_s", "network_s")


def sum_of(times: api.Timings) -> float:
    """All parts but what is unaccounted for."""
    return float(sum(getattr(times, part) for part in PARTS))


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(Phase), seconds), max_size=20), seconds, seconds, seconds, st.booleans())
def test_every_instant_is_counted_once(
    walk: list[tuple[Phase, float]], queue_s: float, prefill_s: float, decode_s: float, hit: bool
) -> None:
    clock = Clock()
    timeline = Timeline(clock)
    for phase, spent in walk:
        timeline.enter(phase)
        clock.now += spent
    timeline.enter(Phase.OWN)
    costs = AttemptCosts(queue_s, prefill_s, decode_s)
    if hit:
        costs.answered_by_cache()
    times = timings(timeline, costs, 100.5)
    assert times.wall_s == pytest.approx(clock.now - 100.0)
    assert min(getattr(times, part) for part in PARTS) >= 0
    own = sum(spent for phase, spent in walk if phase is Phase.OWN)
    assert times.unaccounted_s == pytest.approx(own)
    assert sum_of(times) + times.unaccounted_s == pytest.approx(times.wall_s, abs=1e-6)
    assert times.first_token_s == 0.5


def test_waiting_time_is_split_by_the_times_that_workers_measured() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    for phase, spent in [(Phase.TOKENIZE, 1), (Phase.REMOTE, 10), (Phase.DETOKENIZE, 2), (Phase.DELIVER, 3)]:
        timeline.enter(phase)
        clock.now += spent
    timeline.enter(Phase.OWN)
    times = timings(timeline, AttemptCosts(queue_s=1, prefill_s=2, decode_s=4), None)
    assert (times.queue_s, times.prefill_s, times.decode_s) == (1, 2, 4)
    assert times.network_s == 10 + 3 - 7
    assert times.detokenize_s == 2
    slow_reader = timings(timeline, AttemptCosts(decode_s=14), None)  # Decoding continued while the client read.
    assert slow_reader.decode_s == 14
    assert (slow_reader.network_s, slow_reader.detokenize_s) == (0, 1)
    joined_late = timings(timeline, AttemptCosts(queue_s=5, prefill_s=50, decode_s=10), None)
    assert (joined_late.queue_s, joined_late.prefill_s, joined_late.decode_s) == (0, 5, 10)


@timely
async def test_little_time_of_each_kind_of_request_is_unaccounted_for() -> None:
    async with FakeMesh(cache=True) as mesh:
        mesh.scheduler.decide = lambda submit: assigned(submit, "worker-0", mesh.address("worker-0"), queue_s=1e-4)
        mesh.workers[0].first_step_s = 0.05  # Slower than the cache, as real workers are.
        answers: list[Answer] = []
        for number in range(50):
            request = ask(f"hello {number}", max_tokens=1 + number % 20, logprobs=number % 3)
            answers.append(await generate(mesh.stub, request))
            answers.append(await generate(mesh.stub, request))
            answers.append(await generate(mesh.stub, ask(f"hello {number}", max_tokens=10**6)))
            answers.append(await generate(mesh.stub, ask(n=2, max_tokens=20, temperature=1.0)))
        excess: list[list[float]] = [[], [], [], []]
        for number, answer in enumerate(answers):
            times = answer.trailing_receipt.timings
            assert sum_of(times) + times.unaccounted_s == pytest.approx(times.wall_s, abs=1e-6)
            excess[number % 4].append(abs(times.unaccounted_s) - max(0.05 * times.wall_s, 1e-3))
        assert sum(answer.error is not None for answer in answers) == 50
        assert sum(answer.receipt.result_hit for answer in answers) >= 20
        # All peers share this process, and others run beside it: slow code raises the median, an interruption does not.
        assert max(map(statistics.median, excess)) <= 0


@timely
async def test_times_are_those_that_scheduler_and_worker_measured() -> None:
    async with FakeMesh(2) as mesh:  # There is no early attempt.
        mesh.scheduler.hold = True
        mesh.scheduler.decide = lambda submit: assigned(submit, "worker-0", mesh.address("worker-0"), queue_s=0.1)
        mesh.workers[0].step_s = 0.02
        answering = asyncio.create_task(generate(mesh.stub, ask(max_tokens=6)))
        await until(lambda: bool(mesh.scheduler.submits))
        await asyncio.sleep(0.12)
        mesh.scheduler.release()
        times = (await answering).receipt.timings
        assert times.queue_s == pytest.approx(0.1)
        assert times.prefill_s > 0.01
        assert times.decode_s == pytest.approx(6 * 0.02, abs=0.05)
        assert 0.1 < times.first_token_s < times.wall_s
        assert times.network_s < 0.06
