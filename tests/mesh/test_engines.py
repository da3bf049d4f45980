"""Engines over the public API: answers of an exported model, and a worker that is killed in the middle of streams."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from protos import inference_pb2 as api
from tests.checkpoints import VOCAB
from tests.mesh.harness import Answer, Mesh, ask, generate
from tests.worker.drive import prompt_of
from weft.cli.terminal import models_table

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("exports")]

STREAMS = 16
TOKENS = 400
TOLERANCE = 2e-4


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, exported_gpt2: Path) -> AsyncIterator[Mesh]:
    """Two workers, which find an export without weights."""
    settings = {
        "ENGINE": "auto",
        "SERVED_MODEL_NAME": "tiny",
        "WEFT_KV_BLOCKS": "1024",
        "MAX_BATCH_SIZE": str(STREAMS),
        "WEFT_STEP_TOKENS": "48",
    }
    async with Mesh(tmp_path_factory.mktemp("mesh-engine"), exported_gpt2, workers=2, worker_env=settings) as running:
        yield running


async def test_auto_takes_the_engine_of_the_export_and_the_model_says_so(mesh: Mesh) -> None:
    (model,) = (await mesh.stub().ListModels(api.ListModelsRequest())).models
    assert (model.engine, model.architecture) == ("onnxruntime", "GPT2LMHeadModel")
    cells = [list(column.cells) for column in models_table([model], 200).columns]
    assert [model.engine] in cells


async def test_answers_are_those_of_transformers(mesh: Mesh, plain_gpt2: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(plain_gpt2, dtype=torch.float32)
    prompts = [prompt_of(length, vocab=VOCAB) for length in (1, 17, 64, 150)]
    stub = mesh.stub()
    asked = [ask(ids, max_tokens=32, ignore_eos=True, logprobs=0) for ids in prompts]
    answers = await asyncio.gather(*(generate(stub, each) for each in asked))
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = torch.tensor([prompt + answer.ids])
        with torch.inference_mode():
            expected = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1).max(-1)
        assert answer.ids == expected.indices.tolist()
        assert max(abs(a - b) for a, b in zip(answer.logprobs[0], expected.values.tolist(), strict=True)) <= TOLERANCE


async def test_a_killed_worker_loses_no_stream(mesh: Mesh) -> None:
    stub = mesh.stub()
    seen = [0] * STREAMS

    def start(number: int) -> "asyncio.Task[Answer]":
        def on_delta(delta: api.Delta) -> None:
            seen[number] += len(delta.token_ids)

        prompt = prompt_of(5 + number, vocab=VOCAB)
        message = ask(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.8, seed=number)
        return asyncio.create_task(generate(stub, message, on_delta=on_delta))

    tasks = [start(number) for number in range(STREAMS)]
    while min(seen) < 4:
        assert not any(task.done() for task in tasks), "a stream ended before all had begun"
        await asyncio.sleep(0)
    (worker, _) = mesh.workers
    worker.kill(signal.SIGKILL)
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        worker.start()  # For a repetition of this test.
        await worker.ready()
    assert [len(answer.ids) for answer in answers] == [TOKENS] * STREAMS
    # More than two where a busy machine had moved a stream before.
    assert max(answer.receipt.attempts for answer in answers) > 1
