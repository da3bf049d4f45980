"""The gateway's recovery under simulated histories, and seeded bugs that the simulation must find.

`python -m tests.faults.simulation --seeds 10000` runs more; a seed that fails there is replayed by its number.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest

from protos import cache_pb2, mesh_pb2
from protos import inference_pb2 as api
from services.gateway.answers.attempt import Attempt
from services.gateway.answers.continuation import Continuation
from services.gateway.answers.job_messages import JobMessages
from services.gateway.links.worker_link import JobStream
from services.gateway.text.journal import Ending, Journal
from tests.faults.simulation import simulate

SEEDS = 600


def test_no_history_loses_repeats_or_changes_a_token() -> None:
    ends = Counter(simulate(seed) for seed in range(SEEDS))
    assert sum(ends.values()) == SEEDS
    assert ends["generated"] > 100
    assert ends["cached"] > 100
    assert ends["cancelled"] > 10


def test_histories_that_found_a_fault_hold() -> None:
    """Seed 5591: tokens that arrived in the turn of the loop in which a cached result was chosen."""
    for seed in range(5580, 5600):
        simulate(seed)


def test_a_seed_always_gives_the_same_history() -> None:
    assert [simulate(seed) for seed in range(60)] == [simulate(seed) for seed in range(60)]


def first_failure(seeds: range = range(3000)) -> str:
    """The message of the first of these seeds that finds a bug."""
    for seed in seeds:
        try:
            simulate(seed)
        except AssertionError as error:
            return str(error)
    raise AssertionError(f"{seeds} found nothing")


async def race_without_detaching(self: Any, key: Any, early: Any) -> cache_pb2.CachedResult | None:
    """The code before U1 was found: tokens may reach the journal after the result was chosen."""
    work, look_up = asyncio.create_task(self._generate(early)), asyncio.create_task(self._look_up(key))
    try:
        await asyncio.wait({work, look_up}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() or work.exception() is not None:
            result: cache_pb2.CachedResult | None = await look_up
            self.advance()
            if result is not None and not self.journal.tokens and self.journal.ending is None:
                return result
        await work
        return None
    finally:
        work.cancel()
        look_up.cancel()
        await asyncio.gather(work, look_up, return_exceptions=True)


def test_it_finds_tokens_that_arrive_after_a_result_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Continuation, "_race", race_without_detaching)
    assert "seed 5591: a result replaces no tokens" in first_failure(range(5580, 5600))


def test_it_finds_a_next_attempt_that_forgets_the_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = JobMessages.job

    def forgetful(self: JobMessages, journal: Journal, *rest: Any) -> mesh_pb2.Job:
        job = whole(self, journal, *rest)
        del job.token_ids[job.prompt_len :]
        return job

    monkeypatch.setattr(JobMessages, "job", forgetful)
    assert "wrong tokens" in first_failure()


def test_it_finds_a_handoff_that_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    conclude = Attempt._conclude

    def ended(self: Attempt) -> Any:
        end = self.stream.end
        if end is not None and end.handed_off:
            self._answer.end(Ending(end.reason))
            return None
        return conclude(self)

    monkeypatch.setattr(Attempt, "_conclude", ended)
    assert "the answer is" in first_failure() or "a wrong answer was cached" in first_failure()


def test_it_finds_streams_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of earlier positions, such as those that a joined leader repeats, are taken again."""
    joined = JobMessages.attach

    def from_the_start(self: JobMessages, journal: Journal, *rest: Any) -> mesh_pb2.AttachJob:
        message = joined(self, journal, *rest)
        message.position = 0
        return message

    def unfenced(self: JobStream, position: int, token: int, now: float, detail: Any = None) -> None:
        self.tokens.append(token)
        self.first_at = self.last_at = now
        self.notify()

    monkeypatch.setattr(JobMessages, "attach", from_the_start)
    monkeypatch.setattr(JobStream, "add", unfenced)
    assert "wrong tokens" in first_failure()


def test_it_finds_a_cancelled_leader_that_ends_its_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    conclude = Attempt._conclude

    def trusting(self: Attempt) -> Any:
        end = self.stream.end
        if end is not None and end.reason == api.FINISH_REASON_CANCELLED:
            self._answer.end(Ending(api.FINISH_REASON_LENGTH))
            return None
        return conclude(self)

    monkeypatch.setattr(Attempt, "_conclude", trusting)
    assert "the answer is" in first_failure() or "a wrong answer was cached" in first_failure()
