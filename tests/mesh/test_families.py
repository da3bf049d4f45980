"""Families over the public API: their tokenizers, and the log-probabilities that transformers computes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import sentencepiece
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import CONTEXT, VOCAB, make_checkpoint, sentencepiece_model
from tests.mesh.harness import Answer, Mesh, ask, generate
from tests.mesh.test_models import listing
from tests.oracle import greedy
from tests.worker.drive import prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 64
TOLERANCE = 2e-4
PROMPTS = [prompt_of(length, vocab=VOCAB) for length in (1, 7, 17, 33, 50, 64, 90, 150)]
Expected = tuple[list[int], list[float]]


@pytest.fixture(scope="module", params=["gpt2", "phi3", "gemma2", "gemma3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family with a tokenizer of its kind."""
    made = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    if request.param == "gemma2":  # with a SentencePiece model alone
        (made / "tokenizer.json").unlink()
        plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
        special = {"bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>", "pad_id": 3}
        (made / "tokenizer.model").write_bytes(sentencepiece_model(**plain, **special))
        (made / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "GemmaTokenizer", "add_bos_token": True})
        )
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[list[list[int]]], list[Expected]]:
    """A function from prompts to the greedy answers of transformers with their log-probabilities."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def answers(prompts: list[list[int]]) -> list[Expected]:
        return [(made.tokens, made.logprobs) for made in greedy(model, prompts, TOKENS)]

    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[Mesh]:
    """One worker that prefills prompts in chunks and caches prefixes."""
    settings = {"ENGINE": "torch", "SERVED_MODEL_NAME": "tiny", "WEFT_KV_BLOCKS": "128", "WEFT_STEP_TOKENS": "48"}
    async with Mesh(tmp_path_factory.mktemp("mesh-family"), folder, worker_env=settings) as running:
        yield running


@pytest.fixture(scope="module")
def stored(folder: Path) -> tuple[str, int]:
    """The architecture and the number of parameters of the checkpoint."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    tensors = (tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values())
    return architecture, sum(tensor.numel() for tensor in tensors)


def assert_equal(answer: Answer, expected: Expected) -> None:
    tokens, logprobs = expected
    assert answer.ids == tokens
    assert max(abs(mine - its) for mine, its in zip(answer.logprobs[0], logprobs, strict=True)) <= TOLERANCE


async def test_answers_are_those_of_transformers(
    mesh: Mesh, expected: Callable[[list[list[int]]], list[Expected]]
) -> None:
    stub = mesh.stub()
    requests = [ask(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0) for prompt in PROMPTS]
    wanted = expected(PROMPTS)
    for request, want in reversed(list(zip(requests, wanted, strict=True))):  # An equal one that just ended is joined.
        assert_equal(await generate(stub, request), want)
    together = await asyncio.gather(*(generate(stub, request) for request in requests))
    for answer, want in zip(together, wanted, strict=True):
        assert_equal(answer, want)
    assert together[-1].receipt.cached_tokens == 144


async def test_text_is_tokenized_as_transformers_does(
    mesh: Mesh, folder: Path, expected: Callable[[list[list[int]]], list[Expected]]
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = "the weft is woven through the warp"
    ids = tokenizer(text).input_ids
    answer = await generate(mesh.stub(), ask(text, max_tokens=TOKENS, ignore_eos=True, logprobs=0))
    (want,) = expected([ids])
    assert_equal(answer, want)
    assert answer.receipt.prompt_tokens == len(ids)
    pieces = folder / "tokenizer.model"
    if pieces.exists():  # tokenizers decodes bytes that are no UTF-8 with all bytes before them
        expected_text = sentencepiece.SentencePieceProcessor(model_file=str(pieces)).decode(want[0])
    else:
        expected_text = tokenizer.decode(want[0], skip_special_tokens=True)
    assert answer.text == expected_text


async def test_the_model_card_has_architecture_context_and_parameters(mesh: Mesh, stored: tuple[str, int]) -> None:
    card = (await listing(mesh.stub()))["tiny"]
    architecture, parameters = stored
    assert (card.architecture, card.context_length, card.parameters) == (architecture, CONTEXT, parameters)
