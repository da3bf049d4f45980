"""The openvino engine with rounded weights, over the public API: the numbers of these weights, computed in torch."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from protos import inference_pb2 as api
from services.worker.build.export import load_network
from services.worker.options import EngineOptions
from services.worker.runners.runtime.network import NetworkSession
from services.worker.runners.runtime.past import PastShape
from services.worker.runners.runtime.runner import RuntimeInspection
from tests.checkpoints import SHAPES, VOCAB, make_checkpoint
from tests.mesh.harness import Mesh, ask, generate
from tests.worker.drive import prompt_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("exports")]

PROMPTS = [prompt_of(length, vocab=VOCAB) for length in (1, 17, 40, 64, 3, 90, 150, 33)]
TOKENS = 64
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=["int8", "int4"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rounded") / "tiny", SHAPES["llama"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(folder: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    pytest.importorskip("openvino")
    settings = {
        "ENGINE": "openvino",
        "QUANTIZE": kind,
        "WEFT_QUANTIZE_HEAD": "int8",
        "WEFT_EXACT_INPUTS": "true",
        "WEFT_KV_BLOCKS": "128",
        "MAX_BATCH_SIZE": str(len(PROMPTS)),
        "WEFT_STEP_TOKENS": "48",
    }
    async with Mesh(tmp_path_factory.mktemp("mesh-rounded"), folder, worker_env=settings) as running:
        yield running


async def test_answers_are_those_of_the_rounded_weights(mesh: Mesh, folder: Path, kind: str) -> None:
    stub = mesh.stub()
    (model,) = (await stub.ListModels(api.ListModelsRequest())).models
    assert model.engine == "openvino"
    asked = [ask(ids, max_tokens=TOKENS, ignore_eos=True, logprobs=0) for ids in PROMPTS]
    answers = await asyncio.gather(*(generate(stub, each) for each in asked))
    options = EngineOptions(engine="torch", quantize=kind, quantize_head="int8")
    network, config = load_network(folder, lambda *_: None, options)
    shape = PastShape(config.layers, config.kv_heads, config.head_dim, torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = RuntimeInspection(NetworkSession(network), shape, prompt + answer.ids).logits()
        expected = torch.from_numpy(logits)[len(prompt) - 1 : -1].log_softmax(-1).max(-1)
        assert answer.ids == expected.indices.tolist()
        assert max(abs(a - b) for a, b in zip(answer.logprobs[0], expected.values.tolist(), strict=True)) <= TOLERANCE
