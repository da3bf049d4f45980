"""Processes are killed in the middle of streams, and the clients receive complete answers."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2, mesh_pb2_grpc
from tests.mesh.harness import Answer, Mesh, ask, generate
from tests.timing import timely

pytestmark = pytest.mark.asyncio(loop_scope="function")

STREAMS = 64
TOKENS = 72
OPENINGS = [
    "Once upon a time",
    "The old man said",
    "In the dark wood",
    "The little princess",
    "A ship came in",
    "My dear",
]
DETERMINISTIC = {"WEFT_DETERMINISTIC": "true"}


def request(number: int) -> api.GenerateRequest:
    """The request of stream `number`: every second one is sampled; prompts differ in text and length."""
    text = f"{OPENINGS[number % len(OPENINGS)]} number {number} and" + " and then" * (number % 11)
    temperature = 0.9 if number % 2 else 0.0
    message = ask(text, max_tokens=TOKENS, temperature=temperature, seed=number, ignore_eos=True, logprobs=0)
    message.cache = api.CACHE_POLICY_BYPASS
    return message


async def undisturbed(mesh: Mesh) -> list[Answer]:
    """The answers of all streams when no process is killed."""
    stub = mesh.stub()
    return list(await asyncio.gather(*(generate(stub, request(i), deadline_s=110) for i in range(STREAMS))))


async def test_a_killed_worker_costs_the_clients_nothing(tmp_path: Path, model: Path) -> None:
    async with Mesh(tmp_path, model, workers=2, worker_env=DETERMINISTIC) as mesh:
        expected = await undisturbed(mesh)
        stub = mesh.stub()
        seen = [0] * STREAMS

        def counting(number: int) -> "asyncio.Task[Answer]":
            def on_delta(delta: api.Delta) -> None:
                seen[number] += len(delta.token_ids)

            return asyncio.create_task(generate(stub, request(number), deadline_s=110, on_delta=on_delta))

        tasks = [counting(number) for number in range(STREAMS)]
        while sum(8 <= count <= TOKENS - 32 for count in seen) < 56:
            assert not any(task.done() for task in tasks), "a stream ended before enough were in flight"
            await asyncio.sleep(0.005)
        at_kill = list(seen)
        assert mesh.workers[0].kill(signal.SIGKILL) == -signal.SIGKILL
        answers = await asyncio.gather(*tasks)

        moved = [number for number, answer in enumerate(answers) if len(answer.attempts) > 1]
        in_flight = [number for number in moved if 8 <= at_kill[number] <= TOKENS - 32]
        assert len(in_flight) >= 24, f"only {len(in_flight)} streams were in flight on the killed worker"
        for number, (answer, calm) in enumerate(zip(answers, expected, strict=True)):
            assert answer.ids == calm.ids, number
            assert answer.logprobs == calm.logprobs, number
            assert answer.text == calm.text
            assert len(answer.receipt.workers) == 2 or number not in moved
            # An attempt that a busy machine ended before its first token counts, too.
            assert answer.receipt.attempts >= len(answer.attempts)


async def test_a_killed_scheduler_interrupts_no_running_stream(tmp_path: Path, model: Path) -> None:
    async with Mesh(tmp_path, model) as mesh:
        stub = mesh.stub()
        started = asyncio.Event()
        tasks = [asyncio.create_task(generate(stub, request(i), on_delta=lambda _: started.set())) for i in range(8)]
        await started.wait()
        assert mesh.scheduler.kill(signal.SIGKILL) == -signal.SIGKILL
        answers = await asyncio.gather(*tasks)
        assert [len(answer.ids) for answer in answers] == [TOKENS] * 8
        assert {answer.receipt.attempts for answer in answers} == {1}

        late = asyncio.create_task(generate(stub, ask("After the fall", max_tokens=4)))
        mesh.scheduler.start()
        assert len((await late).ids) == 4, "an admission waits for the new scheduler"


async def blocks_of(mesh: Mesh) -> mesh_pb2.WorkerReport:
    """The report of the first worker, with its counts of blocks."""
    async with aio.insecure_channel(mesh.workers[0].address) as channel:
        return (await mesh_pb2_grpc.WorkerStub(channel).Status(mesh_pb2.StatusRequest())).report


async def all_blocks_back(mesh: Mesh, within_s: float) -> mesh_pb2.WorkerReport:
    """Waits until no job holds a block."""
    async with asyncio.timeout(within_s):
        while (report := await blocks_of(mesh)).active_blocks:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)
        return report


async def test_cancelled_streams_give_every_block_back(tmp_path: Path, model: Path) -> None:
    async with Mesh(tmp_path, model) as mesh:
        stub = mesh.stub()
        calls = [stub.Generate(request(i)) for i in range(STREAMS)]
        await asyncio.gather(*(call.read() for call in calls))
        before = await blocks_of(mesh)
        total = before.free_blocks + before.cached_blocks + before.active_blocks
        assert before.active_blocks >= STREAMS
        for call in calls:
            call.cancel()
        after = await all_blocks_back(mesh, within_s=2)
        assert after.free_blocks + after.cached_blocks == total
        assert len((await generate(stub, ask("Afterwards", max_tokens=4))).ids) == 4


@timely
async def test_a_deadline_ends_the_work(tmp_path: Path, model: Path) -> None:
    async with Mesh(tmp_path, model) as mesh:
        stub = mesh.stub()
        long = ask("A long tale", max_tokens=1500, ignore_eos=True)
        started = time.monotonic()
        with pytest.raises(aio.AioRpcError) as caught:
            await generate(stub, long, deadline_s=0.5)
        assert caught.value.code().name == "DEADLINE_EXCEEDED"
        assert time.monotonic() - started < 1.0
        await all_blocks_back(mesh, within_s=1)
