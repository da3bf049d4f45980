"""Layers of blocks that leave a GPU while it computes the others: equal bit for bit, and before their step is over.

The other process, which copies blocks of a loan, shares the GPU with this one.
"""

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch
from grpc import aio

from bench.engine.pool_process import BLOCK_SIZE, SHAPE, PoolProcess, held
from bench.mesh import processes
from bench.mesh.disaggregated import LAST_WORKER, fetched, free_ports
from protos import inference_pb2_grpc as stubs
from services.worker.engine.base import BlockLoan, BlockPart, LentBlocks
from services.worker.engine.generation import GenerationEngine
from services.worker.loader import presets
from services.worker.runners.cuda.gpu_step import GpuStep
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.sharing.pool import SharedGpuPool
from tests.gpu.test_handoff import MODEL, SETTINGS, answer, request
from tests.worker.drive import job, open_engine, prompt_of
from tests.worker.test_parts import Asked, finish, prompt_job
from tests.worker.test_slow_links import FINGERPRINT, keys_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, STEP_TOKENS = 2000, 4096
BLOCKS = TOKENS // BLOCK_SIZE


@pytest.fixture(scope="module")
def engine() -> GenerationEngine:
    """An engine of the 8B shape that launches all steps kernel by kernel."""
    options = {"engine": "gpu", "dtype": "bfloat16", "kv_blocks": 1024, "max_batch_size": 8, "max_seq_length": 16384}
    return open_engine(
        presets.folder_of(presets.PREFIX + SHAPE), fingerprint=FINGERPRINT, graphs=False, step_tokens=STEP_TOKENS,
        **options,
    )  # fmt: skip


def runner_of(engine: GenerationEngine) -> GpuRunner:
    assert isinstance(engine.runner, GpuRunner)
    return engine.runner


@pytest.fixture
def running(engine: GenerationEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A function that tells whether the device computes the step for which the engine waits."""
    runner, steps = runner_of(engine), list[GpuStep]()
    collect = runner.collect

    def noting(step: GpuStep) -> object:
        steps.append(step)
        return collect(step)

    monkeypatch.setattr(runner, "collect", noting)
    return lambda: bool(steps) and not runner.done(steps[-1])


def watched(engine: GenerationEngine, prompt: list[int], running: Callable[[], bool]) -> tuple[Asked, list[BlockPart]]:
    """A request for the blocks of a prompt. -> it, and the parts that were read beside the blocks' own step."""
    asked, beside = Asked(engine, prompt), list[BlockPart]()
    take = asked.read.answer

    def note(parts: Sequence[BlockPart] | None) -> None:
        take(parts)
        if running():
            beside.extend(parts or ())

    asked.read.answer = note
    return asked, beside


def test_blocks_are_read_in_parts_while_their_step_runs(engine: GenerationEngine, running: Callable[[], bool]) -> None:
    for seed in range(3):  # The first reads load kernels.
        prompt = prompt_of(TOKENS, seed=seed)
        asked, beside = watched(engine, prompt, running)
        asked.add()
        engine.submit(prompt_job(prompt, key=seed))
        own = finish(engine, asked)
        assert asked.contents == own
        assert len(own) == BLOCKS
        print(f"parts {len(asked.begun)}, of these before the step's end {len(beside)}")
    assert len(beside) >= 4
    assert not any(part.ends for part in beside)
    engine.check_integrity()


def test_a_request_that_comes_within_a_step_gets_its_layers(
    engine: GenerationEngine, running: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS, seed=10)
    asked, beside = watched(engine, prompt, running)
    call, calls = runner_of(engine).kv.call, list[int]()
    assert call is not None

    def late(computed: int, layers: int) -> bool:
        calls.append(computed)
        if len(calls) == 2:
            asked.add()
        return call(computed, layers)

    monkeypatch.setattr(runner_of(engine).kv, "call", late)
    engine.submit(prompt_job(prompt))
    assert finish(engine, asked) == asked.contents
    assert beside


def test_whole_blocks_and_parts_come_while_the_next_step_is_in_flight(
    engine: GenerationEngine, running: Callable[[], bool]
) -> None:
    prompt = prompt_of(3 * STEP_TOKENS - 100, seed=11)
    asked, beside = watched(engine, prompt, running)
    asked.add()
    engine.submit(prompt_job(prompt))
    own = finish(engine, asked)
    assert asked.contents == own
    assert len(own) == len(prompt) // BLOCK_SIZE
    assert {part.ends for part in beside} == {True, False}


def test_the_last_part_of_a_step_that_failed_is_not_sent(
    engine: GenerationEngine, running: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS, seed=12)
    asked, beside = watched(engine, prompt, running)
    asked.add()
    runner = runner_of(engine)
    collect = runner.collect
    with monkeypatch.context() as failing:
        failing.setattr(runner, "collect", lambda step: collect(step)._replace(finite=[False]))
        engine.submit(prompt_job(prompt))
        assert engine.step().ended[0].error is not None
    assert beside
    assert not any(part.ends for part in asked.parts)
    engine.submit(prompt_job(prompt, key=2))
    assert finish(engine, asked) == asked.contents


def test_a_step_without_parts_computes_the_same_blocks(engine: GenerationEngine, running: Callable[[], bool]) -> None:
    prompt, kv = prompt_of(TOKENS, seed=13), runner_of(engine).kv
    asked, beside = watched(engine, prompt, running)
    asked.add()
    engine.submit(prompt_job(prompt))
    finish(engine, asked)
    assert beside
    engine.planner.pool.take(engine.planner.pool.available)  # Forgets the blocks, which stay where they are.
    engine.planner.pool.release(list(range(1, engine.planner.pool.total + 1)))
    engine.submit(job(2, prompt, max_tokens=1))
    while engine.has_work():
        engine.step()
    assert kv.read(engine.planner.pool.match(asked.read.keys)) == asked.contents


# ---- out of the memory of the GPU ----


def lend(engine: GenerationEngine, process: PoolProcess, prompt: list[int], running: Callable[[], bool]) -> list[bool]:
    """Computes a prompt whose blocks the other process copies: they are equal there. -> for each part but the last one,
    whether it was copied before the step was over."""
    beside, contents, own = list[bool](), list[bytes](), list(range(1, 129))

    def lent(part: LentBlocks | None) -> None:
        if part is None:
            return
        if part.end is not None:
            process.ask("begin", list(part.blocks), part.begin, part.end)
            beside.append(running())
        else:
            contents.extend(process.ask("finish", list(part.blocks), part.begin, own[: len(part.blocks)]))

    loan = BlockLoan(keys_of(prompt), True, lent, in_parts=True)
    engine.lend_blocks(loan)
    engine.submit(prompt_job(prompt))
    while engine.has_work():
        engine.step()
    assert loan.lent == BLOCKS
    assert engine.runner.kv is not None
    assert contents == engine.runner.kv.read(engine.planner.pool.match(loan.keys))
    loan.cancelled = True
    engine._move_blocks()
    engine.check_integrity()
    return beside


def test_blocks_are_copied_in_parts_while_their_step_runs(
    engine: GenerationEngine, running: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(128, None, {"CUDA_VISIBLE_DEVICES": "0"}) as process:
        process.ask("borrow", SharedGpuPool(runner_of(engine).kv).describe())
        for seed in range(20, 23):
            beside = lend(engine, process, prompt_of(TOKENS, seed=seed), running)
            print(f"parts {len(beside) + 1}, copied before the step's end {sum(beside)}")
        assert len(beside) >= 2
        assert beside[0]


@pytest.mark.parametrize("way", ["memory", "grpc"])
def test_answers_on_blocks_that_came_in_parts_are_those_of_one_worker(way: str) -> None:
    asyncio.run(_divided(way))


async def _divided(way: str) -> None:
    """Prompts so long that their steps are not captured."""
    first_port = free_ports(2 + LAST_WORKER)
    settings = {
        **SETTINGS, "WEFT_STEP_TOKENS": "8192", "MAX_SEQ_LENGTH": "8192", "WEFT_METRICS_PORT": str(first_port),
        "WEFT_DEVICE_FETCH": str(way == "memory").lower(), "HANDOFFS": "patient",
    }  # fmt: skip
    async with (
        processes.up(
            settings, model=MODEL, workers=2, roles=("prefill", "decode"), tls=True,
            worker="bench.mesh.servers.handoffs",
        ) as up,
        aio.insecure_channel(up.gateways[0]) as channel,
    ):  # fmt: skip
        stub: stubs.InferenceAsyncStub = stubs.InferenceStub(channel)
        for seed in range(3):  # The first fetch maps the memory.
            await answer(stub, request(prompt_of(600, seed=100 + seed, vocab=6000)))
        asked = [prompt_of(4500 + 300 * seed, seed=seed, vocab=6000) for seed in range(8)]
        divided = [await answer(stub, request(prompt)) for prompt in asked]
        alone = [await answer(stub, request(prompt, alone=True)) for prompt in asked]
        assert [tokens for tokens, _ in divided] == [tokens for tokens, _ in alone]
        ways = fetched(first_port + LAST_WORKER)
        print(ways)
        assert ways.get(way, 0) > 0.8 * sum(len(prompt) // BLOCK_SIZE for prompt in asked)
