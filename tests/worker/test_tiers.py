"""Jobs that wait for blocks of their prefix, and block stores that return, lose, damage or never return them."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.hashing import block_keys, chain_root
from services.worker.engine.base import BlockLoan, LentBlocks
from services.worker.engine.generation import GenerationEngine
from services.worker.engine.step_times import StepTimes
from services.worker.job import EndReason, Job, StepOutput
from services.worker.kvcache.tiers import BlockRequest, Contents, HostStore
from tests.worker.conftest import EngineMaker
from tests.worker.drive import Answer, Recorded, decoder_of, job, prompt_of, run, solo

BLOCK = 16


@dataclass
class FakeRemote:
    """A block store in this process. It answers at once, or when a test calls `answer`."""

    contents: dict[bytes, bytes] = field(default_factory=dict)
    at_once: bool = True
    cheap: bool = True
    room: int = 1 << 30
    requests: list[BlockRequest] = field(default_factory=list)
    most: int = 1 << 30
    """Blocks that it answers with at most."""

    def is_faster(self, blocks: int, recompute_s: float) -> bool:
        return self.cheap and recompute_s > 0

    def fetch(self, request: BlockRequest) -> None:
        self.requests.append(request)
        if self.at_once:
            self.answer(request)

    def answer(self, request: BlockRequest) -> None:
        for key in request.keys[: self.most]:
            if key not in self.contents:
                break
            request.answer(request, [self.contents[key]])
        request.answer(request, None)

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        return [key for key in keys if key not in self.contents]

    def offer(self, key: bytes, payload: bytes) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.contents[key] = payload
        return True


def slow_prefill(engine: GenerationEngine, rate: float = 100.0) -> None:
    """Sets a low prefill rate, so that no fetch of a test takes too long."""
    pace = StepTimes()
    pace.prefill_rate, pace.decode_s = rate, 0.01
    pace.observe = lambda *_: None  # type: ignore[method-assign]
    engine.step_times = pace


Sharing = Callable[..., tuple[GenerationEngine, FakeRemote]]


@pytest.fixture
def sharing(engine: EngineMaker) -> Sharing:
    """A function sharing(remote?, **options) that opens an engine with a fake block store."""

    def make(remote: FakeRemote | None = None, **options: object) -> tuple[GenerationEngine, FakeRemote]:
        made, remote = engine(**{"deterministic": True, **options}), remote or FakeRemote()
        made.use_remote(remote)
        slow_prefill(made)
        return made, remote

    return make


def offer_all(engine: GenerationEngine) -> None:
    while engine.prefixes.offer_some():
        pass


def output_of(answer: Answer) -> tuple[list[int], list[float | None]]:
    return answer.tokens, answer.logprobs


def asked(key: int, length: int = 150, **more: Any) -> Job:
    return job(key, prompt_of(length), **{"temperature": 0.9, "seed": 3, "logprobs": 0, **more})


def answer_of(engine: GenerationEngine, key: int = 1, length: int = 150, **more: Any) -> Answer:
    return solo(engine, asked(key, length, **more))


def filled(sharing: Sharing, length: int = 150) -> tuple[FakeRemote, Answer]:
    """A block store with the prefix of a prompt, and the computed answer to the prompt."""
    engine, remote = sharing()
    cold = answer_of(engine, length=length)
    assert cold.ended.cost.prefill_tokens == length
    offer_all(engine)
    assert len(remote.contents) == length // BLOCK
    remote.requests.clear()
    return remote, cold


# ---- blocks that are fetched ----


def test_blocks_that_are_fetched_in_advance_hold_nothing_of_a_draft_model(
    sharing: Sharing, checkpoint: Callable[[str], Path]
) -> None:
    """Also where it had computed what they held before: it computes the prefix, and is right as the model itself."""
    remote, cold = filled(sharing)
    settings: dict[str, Any] = {"speculate": f"draft:{checkpoint('llama')}", "speculate_depth": 3, "kv_blocks": 16}
    engine, _ = sharing(remote, **settings)
    engine.use_peers(lambda source: remote)
    speculation = engine.speculation
    assert speculation is not None
    draft = speculation._draft_model
    assert draft is not None
    draft._blocks.update(range(1, 17))
    engine.prefetch("there", list(block_keys(prompt_of(150), BLOCK, chain_root(b"", b""))))
    engine.step()
    again = answer_of(engine)
    assert again.tokens == cold.tokens
    assert again.ended.cost.fetched_tokens == 144
    assert again.ended.cost.accepted_tokens == again.ended.cost.drafted_tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_contents_are_read_as_they_were_written(engine: EngineMaker, dtype: str) -> None:
    one, two = engine(dtype=dtype), engine(dtype=dtype)
    run(one, job(1, prompt_of(100)))
    payloads = decoder_of(one).kv.read([3, 1, 2])
    assert {len(payload) for payload in payloads} == {one.block_bytes}
    assert any(any(payload) for payload in payloads)
    decoder_of(two).kv.write([7, 9, 8], payloads)
    assert decoder_of(two).kv.read([7, 9, 8]) == payloads
    for pool, other in zip(decoder_of(one).kv.layers, decoder_of(two).kv.layers, strict=True):
        assert pool[3].equal(other[7])


def test_another_engine_fetches_the_prefix_and_answers_bit_for_bit(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    engine, _ = sharing(remote)
    warm = answer_of(engine)
    assert output_of(warm) == output_of(cold)
    cost = warm.ended.cost
    assert (cost.fetched_tokens, cost.cached_tokens, cost.prefill_tokens) == (144, 0, 6)
    stored, _ = engine.take_block_events()
    assert len(stored) == 9 + len([key for key in stored if key not in remote.contents])
    again = answer_of(engine, key=2)
    assert output_of(again) == output_of(cold)
    cost = again.ended.cost
    assert (cost.fetched_tokens, cost.cached_tokens, cost.prefill_tokens) == (0, 144, 6)


def test_the_device_part_is_not_fetched_again(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    engine, _ = sharing(remote)
    solo(engine, job(5, prompt_of(150)[:80], bypass_cache=False, max_tokens=1))
    remote.requests.clear()
    warm = answer_of(engine)
    assert output_of(warm) == output_of(cold)
    cost = warm.ended.cost
    assert cost.fetched_tokens + cost.cached_tokens == 144
    assert cost.cached_tokens == 80
    assert [len(request.keys) for request in remote.requests] == [4]


def test_bypassing_jobs_neither_fetch_nor_fill(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    engine, _ = sharing(remote)
    bypass = answer_of(engine, bypass_cache=True)
    assert output_of(bypass) == output_of(cold)
    assert bypass.ended.cost.prefill_tokens == 150
    before = len(remote.contents)
    solo(engine, job(9, prompt_of(150, seed=9), bypass_cache=True))
    offer_all(engine)
    assert (len(remote.contents), remote.requests) == (before, [])


def test_jobs_with_different_salts_share_no_block(sharing: Sharing) -> None:
    remote, _ = filled(sharing)
    engine, _ = sharing(remote)
    assert answer_of(engine, salt=b"another tenant").ended.cost.fetched_tokens == 0


def test_short_prompts_are_not_fetched(sharing: Sharing) -> None:
    engine, remote = sharing()
    solo(engine, job(1, prompt_of(4 * BLOCK - 1)))
    offer_all(engine)
    assert not remote.contents
    assert not remote.requests
    solo(engine, job(2, prompt_of(4 * BLOCK)))
    offer_all(engine)
    assert len(remote.contents) == 4


def test_the_same_blocks_are_fetched_once(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    remote.at_once = False
    engine, _ = sharing(remote)
    for key in range(1, 6):
        engine.submit(asked(key))
    engine.step()
    assert len(remote.requests) == 1
    assert (engine.stats().waiting, engine.stats().running) == (5, 0)
    remote.answer(remote.requests[0])
    answers = run(engine)
    assert len(remote.requests) == 1
    for answer in answers.values():
        assert output_of(answer) == output_of(cold)
        cost = answer.ended.cost
        assert cost.fetched_tokens + cost.cached_tokens + cost.prefill_tokens == 150


# ---- blocks that are not fetched ----


def test_a_prefix_is_computed_if_that_is_faster_than_fetching(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    remote.cheap = False
    engine, _ = sharing(remote)
    answer = answer_of(engine)
    assert output_of(answer) == output_of(cold)
    assert answer.ended.cost.prefill_tokens == 150
    assert not remote.requests
    assert engine.prefixes.counts.declined == 1


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_fetch_that_ends_early_is_completed_by_computing(sharing: Sharing, most: int) -> None:
    remote, cold = filled(sharing)
    remote.most = most
    engine, _ = sharing(remote)
    answer = answer_of(engine)
    assert output_of(answer) == output_of(cold)
    assert answer.ended.cost.fetched_tokens == most * BLOCK
    assert answer.ended.cost.prefill_tokens == 150 - most * BLOCK


def test_contents_of_another_size_are_dropped(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    keys = list(remote.contents)
    remote.contents[keys[3]] = remote.contents[keys[3]][:-1]
    engine, _ = sharing(remote)
    answer = answer_of(engine)
    assert output_of(answer) == output_of(cold)
    assert answer.ended.cost.fetched_tokens == 3 * BLOCK


def test_a_late_fetch_is_abandoned(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    remote.at_once = False
    engine, _ = sharing(remote)
    slow_prefill(engine, rate=3000.0)  # 144 tokens: 48 ms
    began = time.monotonic()
    answer = answer_of(engine)
    assert output_of(answer) == output_of(cold)
    assert answer.ended.cost.prefill_tokens == 150
    assert answer.ended.cost.queue_s >= 0.04
    assert time.monotonic() - began < 5
    assert engine.prefixes.counts.late == 1
    assert remote.requests[0].abandoned
    remote.answer(remote.requests[0])
    engine.step()
    assert engine.prefixes.counts.fetched == 0, "later contents are dropped"


def ends_while_waiting(engine: GenerationEngine, remote: FakeRemote, end: Callable[[], None]) -> StepOutput:
    engine.step()
    assert len(remote.requests) == 1
    assert engine.prefixes.waiting == engine.stats().waiting == 1
    end()
    output = engine.step()
    engine.check_integrity()
    assert engine.prefixes.waiting == 0
    assert remote.requests[0].abandoned
    assert not engine.has_work()
    return output


def test_a_job_that_waits_for_blocks_can_be_cancelled(sharing: Sharing) -> None:
    engine, remote = sharing(FakeRemote(at_once=False))
    engine.submit(job(1, prompt_of(150)))
    output = ends_while_waiting(engine, remote, lambda: engine.cancel(1))
    assert [ended.reason for ended in output.ended] == [EndReason.CANCELLED]


def test_a_job_that_waits_for_blocks_has_a_deadline(sharing: Sharing) -> None:
    engine, remote = sharing(FakeRemote(at_once=False))
    engine.submit(job(1, prompt_of(150), deadline=time.monotonic() + 0.2))
    output = ends_while_waiting(engine, remote, lambda: time.sleep(0.25))
    assert [ended.reason for ended in output.ended] == [EndReason.DEADLINE]


def test_one_of_two_waiting_jobs_may_be_cancelled(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    remote.at_once = False
    engine, _ = sharing(remote)
    for key in (1, 2):
        engine.submit(asked(key))
    engine.step()
    engine.cancel(1)
    engine.step()
    assert not remote.requests[0].abandoned
    remote.answer(remote.requests[0])
    answers = run(engine)
    assert output_of(answers[2]) == output_of(cold)
    assert answers[2].ended.cost.fetched_tokens == 144


def test_other_jobs_run_while_one_waits_for_blocks(sharing: Sharing) -> None:
    engine, _ = sharing(FakeRemote(at_once=False))
    engine.submit(job(1, prompt_of(150)))
    answers = run(engine, job(2, prompt_of(20), max_tokens=8), steps=12)
    assert len(answers[2].tokens) == 8
    assert engine.prefixes.waiting == 1


def test_an_engine_sleeps_while_all_jobs_wait_for_blocks(sharing: Sharing) -> None:
    remote, cold = filled(sharing)
    remote.at_once = False
    engine, _ = sharing(remote)
    stop = threading.Event()
    events = Recorded()
    thread = threading.Thread(target=engine.run, args=(events, stop))
    thread.start()
    engine.submit(asked(1))
    time.sleep(0.3)
    waited = len(events.outputs)
    assert 1 <= waited < 60, f"{waited} steps in 0.3 s"
    remote.answer(remote.requests[0])
    assert events.ended.wait(10)
    stop.set()
    engine.wake()
    thread.join(5)
    assert [token.token_id for output in events.outputs for token in output.tokens] == cold.tokens


# ---- offers ----


def test_offers_wait_for_room_and_are_made_once(sharing: Sharing) -> None:
    engine, remote = sharing(FakeRemote(room=3))
    answer_of(engine)
    offer_all(engine)
    assert len(remote.contents) == 3
    remote.room = 100
    offer_all(engine)
    assert len(remote.contents) == 9
    assert engine.prefixes.counts.offered == 9
    answer_of(engine, key=2)
    offer_all(engine)
    assert engine.prefixes.counts.offered == 9


def test_blocks_are_lent_before_any_is_offered(sharing: Sharing) -> None:
    """The answer of the worker that borrows them waits for it."""
    keys = list(filled(sharing)[0].contents)
    engine, remote = sharing()
    offered: list[int] = []

    def lent(part: LentBlocks | None) -> None:
        assert part is not None
        offered.extend(len(remote.contents) for _ in part.blocks)

    engine.lend_blocks(BlockLoan(keys, True, lent))
    answer_of(engine)
    assert remote.contents
    assert offered == [0] * (150 // BLOCK)


def test_blocks_that_came_from_another_worker_are_not_offered(sharing: Sharing) -> None:
    peer, cold = filled(sharing)
    engine, remote = sharing()
    engine.use_peers(lambda address: peer)
    warm = answer_of(engine, source="another worker")
    offer_all(engine)
    assert output_of(warm) == output_of(cold)
    assert (warm.ended.cost.fetched_tokens, len(remote.contents)) == (144, 0)
    longer = solo(engine, job(2, [*prompt_of(150), *prompt_of(90, seed=7)], source="another worker"))
    offer_all(engine)
    assert longer.ended.cost.prefill_tokens == 240 - 144
    assert len(remote.contents) == 240 // BLOCK - 9, "what it has computed itself"


def test_blocks_evicted_before_their_offer_are_not_offered(sharing: Sharing) -> None:
    engine, remote = sharing(FakeRemote(room=0), kv_blocks=12, max_batch_size=2)
    solo(engine, job(1, prompt_of(150), max_tokens=1))
    solo(engine, job(2, prompt_of(150, seed=1), max_tokens=1))
    there = engine.stats().cached_blocks
    remote.room = 100
    offer_all(engine)
    engine.check_integrity()
    assert 9 <= len(remote.contents) == there < 18


# ---- small pools ----


def test_a_small_pool_keeps_its_integrity(sharing: Sharing) -> None:
    remote, _ = filled(sharing)
    engine, _ = sharing(remote, kv_blocks=14, max_batch_size=4)
    jobs = [job(key, prompt_of(150, seed=key % 2 * 7), max_tokens=20) for key in range(6)]
    answers = run(engine, *jobs)
    assert all(len(answer.tokens) == 20 for answer in answers.values())
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 14


def test_evicted_blocks_are_fetched_from_host_memory(engine: EngineMaker) -> None:
    small = engine(deterministic=True, kv_blocks=12, max_batch_size=2, host_kv_bytes=64 << 20)
    slow_prefill(small)
    cold = answer_of(small, max_tokens=8)
    solo(small, job(2, prompt_of(170, seed=1), max_tokens=8))
    assert small.prefixes.counts.spilled >= 9
    warm = answer_of(small, key=3, max_tokens=8)
    assert output_of(warm) == output_of(cold)
    cost = warm.ended.cost
    assert cost.fetched_tokens + cost.cached_tokens == 144
    assert cost.fetched_tokens > 0
    small.check_integrity()


# ---- host memory ----


def fetched(store: HostStore, keys: list[bytes]) -> list[Contents]:
    came: list[Contents] = []
    ends: list[bool] = []

    def answer(request: BlockRequest, payloads: Sequence[Contents] | None) -> None:
        assert not ends
        came.extend(payloads or ())
        if payloads is None:
            ends.append(True)

    store.fetch(BlockRequest(keys, 1.0, answer))
    assert ends
    return came


def test_host_memory_returns_a_prefix_up_to_the_first_gap() -> None:
    store = HostStore(1000)
    for number in (0, 1, 2, 4):
        assert store.offer(bytes([number]), bytes([number]) * 10)
    assert fetched(store, [bytes([i]) for i in range(6)]) == [bytes([i]) * 10 for i in range(3)]
    assert store.lacks([b"\2", b"\3"], 1.0) == [b"\3"]
    assert not store.offer(b"large", bytes(1001))


def test_host_memory_is_used_if_its_transfer_is_faster_than_computing() -> None:
    far = HostStore(1000, block_s=0.01)
    assert far.lacks([b"1", b"2"], 0.1) == [b"1", b"2"]
    assert far.lacks([b"1", b"2"], 0.0) == [b"1", b"2"], "the prefill rate is not measured yet"
    assert far.lacks([b"1", b"2"], 0.019) == []
    assert far.offer(b"1", b"contents")
    assert far.is_faster(4, 0.051)
    assert not far.is_faster(4, 0.049)
    assert HostStore(1000, 0.0).is_faster(4, 0.1) is False, "the store is empty"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), max_size=60), st.integers(1, 200))
def test_host_memory_keeps_its_bound(offers: list[tuple[int, int]], bound: int) -> None:
    store = HostStore(bound)
    sizes: dict[int, int] = {}
    for number, size in offers:
        store.offer(bytes([number]), bytes(sizes.setdefault(number, size)))
        held = [n for n in sizes if not store.lacks([bytes([n])], 1.0)]
        assert store.bytes == sum(sizes[n] for n in held) <= bound
        assert len(store) == len(held)


def test_random_answers_never_change_a_token(sharing: Sharing) -> None:
    """Whatever part of a prefix a store returns, and whenever: answers equal those of an engine that computes all."""
    plain, _ = sharing(FakeRemote(cheap=False), prefix_cache=False)
    prompts = [prompt_of(length, seed=5)[:length] for length in (70, 100, 130, 130)]
    prompts += [prompts[2][:90] + prompt_of(40, seed=8), prompts[3][:64] + prompt_of(80, seed=9)]
    jobs = [job(i, p, max_tokens=8, temperature=0.9, seed=i, logprobs=0) for i, p in enumerate(prompts)]
    expected = {one.key: output_of(solo(plain, one)) for one in jobs}
    source = random.Random(1)
    remote = FakeRemote()
    for _ in range(12):
        remote.most = source.randrange(12)
        remote.contents = {key: value for key, value in remote.contents.items() if source.random() < 0.9}
        engine, _ = sharing(remote, kv_blocks=source.choice([16, 40, 256]), max_batch_size=4)
        mixed = source.sample(jobs, len(jobs))
        answers = run(engine, *mixed[:3])
        answers |= run(engine, *mixed[3:])
        offer_all(engine)
        assert {key: output_of(answer) for key, answer in answers.items()} == expected
