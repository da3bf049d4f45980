"""A mesh that guesses tokens gives the answers that it gives without guesses: through the public door."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from protos import inference_pb2 as api
from tests.mesh.harness import Answer, Mesh, Stub, ask, cached, generate
from tests.parallel_drafts import with_mask
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.telemetry.scraping import scrape
from weft.launch.demo_model import model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPECULATES = {"WEFT_SPECULATE": "ngram", "WEFT_SPECULATE_DEPTH": "4", "WEFT_DETERMINISTIC": "true"}
LOOP = "the cat and the dog and the cat and the dog and the cat and the"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("speculation")
    with RedisServer(folder / "redis") as redis:
        made = Mesh(folder, model, workers=2, redis_url=redis.url, worker_env=SPECULATES)
        for worker in made.workers:
            worker.env["WEFT_METRICS_PORT"] = str(free_port())
        async with made:
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(mesh: Mesh) -> Stub:
    return mesh.stub()


def request(number: int, speculation: int | None, **sampling: Any) -> api.GenerateRequest:
    fields = {"max_tokens": 48, "temperature": 0.7 * (number % 2), "seed": number, "ignore_eos": True, **sampling}
    made = ask(f"{LOOP} {'dog' if number % 3 else 'cat'}", **fields)
    made.cache = api.CACHE_POLICY_BYPASS
    if speculation is not None:
        made.speculation = speculation
    return made


async def pair(stub: Stub, number: int, n: int = 1, **sampling: Any) -> tuple[Answer, Answer]:
    """The answers without and with guesses."""
    requests = [request(number, speculation, **sampling) for speculation in (0, None)]
    for each in requests:
        each.n = n
    plain, guessed = await asyncio.gather(*(generate(stub, each) for each in requests))
    return plain, guessed


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 2},
    "n": {"n": 3},
    "stop strings": {"stop": ["g and the c", "zebra"]},
    "min_tokens": {"min_tokens": 20, "stop": ["and"]},
    "bias": {"logit_bias": {20: 2.0}},
}


@pytest.mark.parametrize("case", CASES)
async def test_answers_are_equal_with_and_without_guesses(case: str, stub: Stub) -> None:
    for plain, guessed in await asyncio.gather(*(pair(stub, number, **CASES[case]) for number in range(4))):
        assert guessed.tokens == plain.tokens
        assert guessed.texts == plain.texts
        assert (guessed.finish, guessed.stop, guessed.logprobs) == (plain.finish, plain.stop, plain.logprobs)
        assert (plain.receipt.drafted_tokens, plain.receipt.accepted_tokens) == (0, 0)


async def test_answers_are_equal_with_a_parallel_draft_model(tmp_path: Path, model: Path) -> None:
    settings = {**SPECULATES, "WEFT_SPECULATE": f"draft:{with_mask(model, tmp_path / 'draft')}"}
    async with Mesh(tmp_path, model, workers=1, worker_env=settings) as mesh:
        for plain, guessed in await asyncio.gather(*(pair(mesh.stub(), number, logprobs=1) for number in range(4))):
            assert (guessed.tokens, guessed.logprobs) == (plain.tokens, plain.logprobs)
            assert 0 < guessed.receipt.accepted_tokens < guessed.receipt.drafted_tokens


async def test_receipt_and_metrics_count_guesses(mesh: Mesh, stub: Stub) -> None:
    answers = [await generate(stub, request(0, None)) for _ in range(3)]
    receipts = [answer.receipt for answer in answers]
    assert all(0 < receipt.accepted_tokens <= receipt.drafted_tokens for receipt in receipts)
    scraped = [await scrape(worker) for worker in mesh.workers]
    name = receipts[0].model
    drafted = sum(each.value("vllm:spec_decode_num_draft_tokens_total", model_name=name) for each in scraped)
    accepted = sum(each.value("vllm:spec_decode_num_accepted_tokens_total", model_name=name) for each in scraped)
    assert drafted >= sum(receipt.drafted_tokens for receipt in receipts)
    assert accepted >= sum(receipt.accepted_tokens for receipt in receipts)
    wasted = sum(each.value("weft_worker_wasted_tokens_total", model=name) for each in scraped)
    assert wasted == drafted - accepted


async def test_a_request_chooses_its_depth(stub: Stub) -> None:
    one = await generate(stub, request(0, 1))
    four = await generate(stub, request(0, 8))
    assert one.ids == four.ids
    assert one.receipt.drafted_tokens > 0
    assert one.receipt.accepted_tokens < four.receipt.accepted_tokens
    with pytest.raises(aio.AioRpcError) as refused:
        await generate(stub, request(0, 9))
    assert refused.value.code() is StatusCode.INVALID_ARGUMENT
    assert "speculation" in (refused.value.details() or "")


async def test_results_are_shared_whoever_guessed(stub: Stub) -> None:
    requests = [request(20, None), request(20, 0)]
    for each in requests:
        each.cache = api.CACHE_POLICY_READ_WRITE
    first = await generate(stub, requests[0])
    second = await cached(stub, requests[1])
    assert second.ids == first.ids
    assert second.receipt.drafted_tokens == 0
    joint = [request(22, None), request(22, 0)]
    for each in joint:
        each.cache = api.CACHE_POLICY_READ_WRITE
        each.sampling.max_tokens = 200
    answers = await asyncio.gather(*(generate(stub, each) for each in joint))
    assert answers[0].ids == answers[1].ids
    assert any(answer.receipt.joined or answer.receipt.result_hit for answer in answers)


async def test_a_worker_killed_amid_guesses_changes_no_token(mesh: Mesh, stub: Stub) -> None:
    await mesh.revive()
    streams = 16
    calm = await asyncio.gather(*(generate(stub, request(i, 0, max_tokens=96)) for i in range(streams)))
    seen = [0] * streams

    def follow(number: int) -> "asyncio.Task[Answer]":
        def on_delta(delta: api.Delta) -> None:
            seen[number] += len(delta.token_ids)

        return asyncio.create_task(generate(stub, request(number, None, max_tokens=96), on_delta=on_delta))

    tasks = [follow(number) for number in range(streams)]
    while sum(count >= 8 for count in seen) < streams // 2:
        assert not all(task.done() for task in tasks)
        await asyncio.sleep(0.005)
    mesh.workers[0].kill(signal.SIGKILL)
    answers = await asyncio.gather(*tasks)
    assert any(answer.receipt.attempts > 1 for answer in answers)
    assert [answer.ids for answer in answers] == [answer.ids for answer in calm]
    assert sum(answer.receipt.accepted_tokens for answer in answers) > 0


@pytest.mark.parametrize("hold_s", ["", "0"])
async def test_tokens_of_a_step_come_one_by_one_unless_they_are_not_held(tmp_path: Path, hold_s: str) -> None:
    guesses = {"WEFT_SPECULATE": "draft:any", "WEFT_SPECULATE_DEPTH": "4", "WEFT_PACED_ACCEPTANCE": "0.7"}
    paced = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "30", **guesses}
    gateway = {"WEFT_GATEWAY_HOLD_S": hold_s} if hold_s else {}
    async with Mesh(tmp_path, model_folder(), workers=1, worker_env=paced, gateway_env=gateway) as mesh:
        for sampling in ({}, {"stop": ["no such text"]}, {"logprobs": 1}):
            messages = list[int]()

            def count(delta: api.Delta, messages: list[int] = messages) -> None:
                messages.append(len(delta.token_ids))

            answer = await generate(mesh.stub(), request(0, None, max_tokens=60, **sampling), on_delta=count)
            steps = 60 - answer.receipt.accepted_tokens
            assert len(answer.ids) == sum(messages) == 60
            assert answer.receipt.accepted_tokens > 15
            held = not hold_s and "stop" not in sampling
            assert (len([tokens for tokens in messages if tokens]) > steps) == held
