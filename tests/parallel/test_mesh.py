"""A worker of several ranks through the public door: guesses, and adapters that are loaded while it serves."""

from pathlib import Path

from protos import inference_pb2 as api
from tests.adapters import Recipe, make_adapters, peft_answers
from tests.checkpoints import make_checkpoint
from tests.mesh.harness import Answer, Mesh, Stub, ask, generate
from tests.worker.drive import prompt_of
from weft.launch.adapters import load

TOKENS = 24
PROMPT = prompt_of(12) * 3
"""What follows is often what followed before."""


async def answer_of(stub: Stub, model: str, guesses: int) -> Answer:
    """A greedy answer; each of its steps has at most this number of guesses."""
    request = ask(PROMPT, max_tokens=TOKENS, model=model, ignore_eos=True)
    request.cache, request.speculation = api.CACHE_POLICY_BYPASS, guesses
    return await generate(stub, request)


async def test_ranks_guess_and_have_adapters(tmp_path: Path) -> None:
    """The answers are those of transformers and PEFT."""
    base = make_checkpoint(tmp_path / "base")
    folders = make_adapters(base, tmp_path, {name: Recipe(seed=len(name)) for name in ("poems", "code")})
    settings = {
        "WEFT_TENSOR_PARALLEL": "2",
        "WEFT_SPECULATE": "ngram",
        "WEFT_SPECULATE_DEPTH": "4",
        "WEFT_ADAPTERS": f'["poems={folders["poems"]}"]',
    }
    drafted = 0
    async with Mesh(tmp_path, base, workers=1, worker_env=settings) as mesh:
        stub = mesh.stub()
        await load(mesh.scheduler.address, "", "code", folders["code"])
        for model, folder in {"base": None, **{f"base:{name}": place for name, place in folders.items()}}.items():
            expected = peft_answers(base, folder, [PROMPT], TOKENS)[0][0]
            plain, guessed = await answer_of(stub, model, 0), await answer_of(stub, model, 4)
            assert (plain.ids, guessed.ids) == (expected, expected), model
            assert plain.receipt.drafted_tokens == 0
            drafted += guessed.receipt.drafted_tokens
    assert drafted > 0
