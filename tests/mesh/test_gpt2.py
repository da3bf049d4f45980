"""A GPT-2 model over the public API: its own tokenizer, and the log-probabilities that transformers computes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import CONTEXT, VOCAB, Shape, make_checkpoint
from tests.mesh.harness import Answer, Mesh, ask, generate
from tests.mesh.test_models import listing
from tests.worker.drive import prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 32
TOLERANCE = 2e-4
PROMPTS = [prompt_of(length, vocab=VOCAB) for length in (1, 17, 64, 150)]
Expected = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a GPT-2 tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("gpt2"), Shape("gpt2"))


@pytest.fixture(scope="module")
def expected(gpt2: Path) -> Callable[[list[int]], Expected]:
    """A function from a prompt to the greedy answer of transformers with its log-probabilities."""
    model: Any = AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float32)

    def answer(prompt: list[int]) -> Expected:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = torch.log_softmax(torch.stack(made.logits)[:, 0], -1).max(-1).values
        return made.sequences[0, len(prompt) :].tolist(), logprobs.tolist()

    return answer


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, gpt2: Path) -> AsyncIterator[Mesh]:
    """One worker that prefills prompts in chunks and caches prefixes."""
    settings = {"ENGINE": "torch", "SERVED_MODEL_NAME": "gpt2", "WEFT_KV_BLOCKS": "128", "WEFT_STEP_TOKENS": "48"}
    async with Mesh(tmp_path_factory.mktemp("mesh-gpt2"), gpt2, worker_env=settings) as running:
        yield running


def assert_equal(answer: Answer, expected: Expected) -> None:
    tokens, logprobs = expected
    assert answer.ids == tokens
    assert max(abs(mine - its) for mine, its in zip(answer.logprobs[0], logprobs, strict=True)) <= TOLERANCE


async def test_answers_are_those_of_transformers(mesh: Mesh, expected: Callable[[list[int]], Expected]) -> None:
    stub = mesh.stub()
    requests = [ask(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0) for prompt in PROMPTS]
    wanted = [expected(prompt) for prompt in PROMPTS]
    for request, want in zip(requests, wanted, strict=True):
        assert_equal(await generate(stub, request), want)
    together = await asyncio.gather(*(generate(stub, request) for request in requests))
    for answer, want in zip(together, wanted, strict=True):
        assert_equal(answer, want)
    assert together[-1].receipt.cached_tokens == 144


async def test_text_is_tokenized_as_transformers_does(
    mesh: Mesh, gpt2: Path, expected: Callable[[list[int]], Expected]
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(gpt2)
    text = "the weft is woven through the warp"
    ids = tokenizer(text).input_ids
    answer = await generate(mesh.stub(), ask(text, max_tokens=TOKENS, ignore_eos=True, logprobs=0))
    want = expected(ids)
    assert_equal(answer, want)
    assert answer.receipt.prompt_tokens == len(ids)
    assert answer.text == tokenizer.decode(want[0], skip_special_tokens=True)


async def test_the_model_card_has_architecture_context_and_parameters(mesh: Mesh, gpt2: Path) -> None:
    card = (await listing(mesh.stub()))["gpt2"]
    assert (card.architecture, card.context_length) == ("GPT2LMHeadModel", CONTEXT)
    assert card.parameters == sum(tensor.numel() for tensor in load_file(gpt2 / "model.safetensors").values())
