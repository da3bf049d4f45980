"""The receipt accounts for the time of a request: the unaccounted part stays small, hits and errors included."""

import statistics
import uuid

import pytest
from grpc import aio

from protos import inference_pb2 as api
from tests.mesh.harness import Stub, ask, generate, receipt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def receipt_of_a_hit(stub: Stub, request: api.GenerateRequest) -> api.Receipt:
    """The receipt of a request that was answered before: of a hit, unless the worker is the faster one five times."""
    for _ in range(5):
        receipt = (await generate(stub, request)).receipt
        if receipt.result_hit:
            break
    return receipt


async def receipts_of_200(stub: Stub) -> list[api.Receipt]:
    """Receipts of misses and hits, sampled and greedy answers, streams and single replies, and errors."""
    receipts = []
    for number in range(40):
        fresh = ask(f"Tale {uuid.uuid4().hex} {number}", max_tokens=1 + number % 24)
        sampled = ask("A tale", max_tokens=8, temperature=1.0)
        receipts.append((await generate(stub, fresh)).receipt)
        receipts.append((await generate(stub, sampled)).receipt)
        receipts.append(await receipt_of_a_hit(stub, fresh))
        receipts.append((await stub.Complete(sampled)).receipt)
        with pytest.raises(aio.AioRpcError) as caught:
            await generate(stub, ask("x" * 100, max_tokens=10**6))
        receipt = receipt_of(caught.value.trailing_metadata())
        assert receipt is not None
        receipts.append(receipt)
    return receipts


async def test_little_time_is_unaccounted_for(stub: Stub) -> None:
    receipts = await receipts_of_200(stub)
    assert len(receipts) == 200
    assert sum(receipt.result_hit for receipt in receipts) >= 20, "a worker that answers before the cache makes a miss"
    excess = []
    for receipt in receipts:
        times = receipt.timings
        parts = [times.tokenize_s, times.cache_s, times.queue_s, times.prefill_s, times.decode_s]
        parts += [times.detokenize_s, times.network_s, times.unaccounted_s]
        assert min(parts[:-1]) >= 0
        assert sum(parts) == pytest.approx(times.wall_s, abs=1e-6)
        excess.append(abs(times.unaccounted_s) - max(0.05 * times.wall_s, 0.001))
    # Of each of the five kinds of requests the median: a busy machine delays some of any kind.
    medians_ms = [statistics.median(excess[kind::5]) * 1e3 for kind in range(5)]
    assert max(medians_ms) <= 0, medians_ms


async def test_the_receipt_counts_tokens_by_their_source(stub: Stub) -> None:
    prompt = f"Tale {uuid.uuid4().hex} and what came of it"
    answer = await generate(stub, ask(prompt, max_tokens=12))
    receipt = answer.receipt
    assert receipt == answer.trailing
    assert receipt.completion_tokens == len(answer.ids) == 12
    assert receipt.prefill_tokens + receipt.cached_tokens == receipt.prompt_tokens
    assert receipt.attempts == 1
    assert len(receipt.workers) == 1
    assert receipt.finish_reason == api.FINISH_REASON_LENGTH
    assert receipt.timings.prefill_s > 0
    assert receipt.timings.decode_s > 0
    assert 0 < receipt.timings.first_token_s < receipt.timings.wall_s


async def test_an_answer_ended_by_a_stop_string_has_its_costs(stub: Stub) -> None:
    prompt = f"Tale {uuid.uuid4().hex} and what came of it"
    free = await generate(stub, ask(prompt, max_tokens=40))
    stopped = await generate(stub, ask(prompt, max_tokens=40, stop=[free.text[20:26]]))
    receipt = stopped.receipt
    assert receipt.prefill_tokens + receipt.cached_tokens == receipt.prompt_tokens
    assert receipt.timings.decode_s > 0
    assert receipt.timings.wall_s < free.receipt.timings.wall_s + 0.1, "the worker reported the costs in time"


async def test_the_callers_trace_is_the_parent(stub: Stub) -> None:
    trace = uuid.uuid4().hex
    traceparent = f"00-{trace}-00f067aa0ba902b7-01"
    answer = await generate(stub, ask("A tale", max_tokens=2), metadata=(("traceparent", traceparent),))
    assert answer.receipt.trace_id == trace
    other = await generate(stub, ask("A tale", max_tokens=2))
    assert other.receipt.trace_id != trace
    assert len(other.receipt.trace_id) == 32
