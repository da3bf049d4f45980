"""Grids of ranks answer as one process does. Ranks are threads here; `make check-parallel` runs every shape."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.build.encoders.assemble import build_encoder
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.topology import Grid
from services.worker.runners.base import Top
from services.worker.runners.cpu.drafts.draft_model import CpuDraftModel
from services.worker.structured.compiler import GuidanceForms
from tests.checkpoints import DEMO, SMALL_DEMO, checkpoint
from tests.parallel import scenes
from tests.parallel.threads import RankFailed, grid_engine
from tests.parallel_drafts import with_mask
from tests.served import GOLDEN
from tests.worker.drive import Answer, job, open_engine, prompt_of, run
from tests.worker.test_speculation import PARAMS, Replay, guessing, varied_jobs
from tests.worker.test_structured import DATE, WORDS, shaped

__all__ = ["checkpoint"]

Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    ("shape", "tensor", "pipeline", "scene"),
    [
        ("llama", 2, 1, scenes.cached),
        ("llama", 2, 1, scenes.preempted),
        ("gpt2", 2, 1, scenes.chunked),
        ("qwen3-moe", 2, 2, scenes.chunked),
        ("gemma3", 4, 1, scenes.chunked),
        ("phi3", 2, 1, scenes.chunked),
        ("qwen2", 1, 3, scenes.preempted),
    ],
)
def test_a_grid_answers_as_one_process(
    checkpoint: Folder, shape: str, tensor: int, pipeline: int, scene: scenes.Scene
) -> None:
    folder = checkpoint(shape)
    assert scenes.compare(folder, tensor, pipeline, scenes.one_process(folder), [scene]) == []


@pytest.mark.parametrize(
    ("golden", "tolerance"),
    [("awq", 0.05), ("gptq", 0.05), ("llm-compressor-fp8-heads", 1e-4), ("llm-compressor-w8a8", 1e-4)],
)
def test_quantized_weights_are_cut_between_groups(golden: str, tolerance: float) -> None:
    """And scales of keys and values by head. A CPU multiplies INT4 in bfloat16, whose sums differ in their parts."""
    folder = GOLDEN / golden
    jobs = [job(i, prompt_of(length, vocab=32), max_tokens=6, logprobs=0) for i, length in enumerate((1, 17))]
    expected = run(open_engine(folder, kv_blocks=32, max_batch_size=4, threads=1), *jobs)
    with grid_engine(folder, 2, 2) as engine:
        found = run(engine, *jobs)
    for one, other in zip(expected.values(), found.values(), strict=True):
        assert other.logprobs[0] == pytest.approx(one.logprobs[0], abs=tolerance)
        assert tolerance > scenes.TOLERANCE or other.tokens == one.tokens


def test_groups_in_another_order_are_refused_where_ranks_share_inputs() -> None:
    reason = "rank 0, from layer 0 on: model.layers.0.self_attn.o_proj: g_idx does not give every group 32 inputs"
    with pytest.raises(CheckpointError, match=reason), grid_engine(GOLDEN / "gptq-act-order", 2):
        pass


def bits(answers: dict[int, Answer]) -> list[tuple[list[int], list[float | None]]]:
    return [(answer.tokens, answer.logprobs) for answer in answers.values()]


def test_a_deterministic_grid_repeats_every_bit(checkpoint: Folder) -> None:
    """After a restart, in other chunks; and stages change no bit of one process."""
    folder = checkpoint("llama")
    found = []
    for options in ({"step_tokens": 19, "max_batch_size": 16}, {}):
        with grid_engine(folder, 2, 2, deterministic=True, **options) as engine:
            found.append(bits(run(engine, *scenes.jobs())))
    assert found[0] == found[1]
    with grid_engine(folder, 1, 3, deterministic=True) as engine:
        assert bits(run(engine, *scenes.jobs())) == bits(scenes.one_process(folder, deterministic=True))


def test_blocks_have_the_contents_of_all_ranks(checkpoint: Folder) -> None:
    """What is read is what was written; stages alone have the layout of one process."""
    prompt = prompt_of(49)
    one = job(1, prompt, max_tokens=8, logprobs=0)
    single = open_engine(checkpoint("llama"), kv_blocks=16, max_batch_size=4)
    expected = run(single, one)[1]
    assert single.runner.kv is not None
    with grid_engine(checkpoint("llama"), 2, 2) as engine, grid_engine(checkpoint("llama"), 1, 2) as staged:
        run(engine, one)
        kv, other = engine.runner.kv, staged.runner.kv
        assert kv is not None
        assert other is not None
        contents = kv.read([1, 2, 3])
        assert [len(each) for each in contents] == [kv.block_bytes] * 3
        assert kv.block_bytes == single.runner.kv.block_bytes
        kv.scrub([1, 2, 3])
        assert not any(np.frombuffer(b"".join(kv.read([1, 2, 3])), np.uint8))
        kv.write([1, 2, 3], contents)
        assert kv.read([1, 2, 3]) == contents
        other.write([1, 2, 3], single.runner.kv.read([1, 2, 3]))
        assert other.read([1, 2, 3]) == single.runner.kv.read([1, 2, 3])
    assert len(expected.tokens) == 8


@pytest.mark.parametrize(
    ("tensor", "pipeline", "folder", "options"),
    [
        (3, 1, SMALL_DEMO, {"speculate": "suffix", "speculate_depth": 4}),
        (1, 2, SMALL_DEMO, {}),
        (1, 3, DEMO, {}),
    ],
)
def test_answers_with_a_form_and_scores_of_prompts(
    tensor: int, pipeline: int, folder: Path, options: dict[str, Any]
) -> None:
    """Masks reach the ranks that draw, and log-probabilities of prompts come back from them; with guesses, too."""
    forms = GuidanceForms((folder / "tokenizer.json").read_bytes(), 6144, [0])
    jobs = [shaped(1, DATE), shaped(2, WORDS, seed=4), job(3, prompt_of(30), max_tokens=6, prompt_logprobs=2)]
    # Of three steps in flight the one with a form is the last.
    jobs += [job(key, prompt_of(9 + key), max_tokens=12) for key in (4, 5)]

    def answers(engine: GenerationEngine) -> tuple[list[tuple[int, int, int]], list[Top], list[float]]:
        engine.use_forms(forms)
        for one in jobs:
            engine.submit(one)
        tokens, tops, logprobs = [], list[Top](), list[float]()
        while engine.has_work():
            output = engine.step()
            tokens += [(token.key, token.position, token.token_id) for token in output.tokens]
            for part in output.scores:
                tops += [[(token, 0.0) for token, _ in top] for top in part.tops]
                logprobs += part.logprobs
        return sorted(tokens), tops, logprobs

    expected = answers(open_engine(folder, kv_blocks=64, max_batch_size=8, threads=1))
    with grid_engine(folder, tensor, pipeline, **options) as engine:
        found = answers(engine)
        assert ("speculate" in options) == (engine.stats().guesses.accepted > 0)
    forms.close()
    assert found[:2] == expected[:2]
    assert {key for key, *_ in found[0]} == {1, 2, 3, 4, 5}
    assert found[2] == pytest.approx(expected[2], abs=scenes.TOLERANCE)
    assert len(found[2]) == 29


def test_sums_and_columns_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """In bfloat16 too, in the order of the ranks, with columns of several widths."""
    parts = [torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(3)]

    def exchange(rank: int) -> tuple[Tensor, Tensor, int]:
        others = Collectives(Grid(tensor=3), rank, tmp_path / "meeting")
        total, columns = others.sum(parts[rank]), others.gather_columns(parts[rank][:, : rank + 1], [1, 2, 3])
        return total, columns, others.least(7 - rank)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(exchange, range(3)))
    total = (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16()
    columns = torch.cat([part[:, : rank + 1] for rank, part in enumerate(parts)], 1)
    for its_total, its_columns, least in found:
        assert torch.equal(its_total, total)
        assert torch.equal(its_columns, columns)
        assert least == 5


def test_a_rank_that_fails_ends_the_grid(checkpoint: Folder) -> None:
    with grid_engine(checkpoint("llama"), 2, 1) as engine:
        engine.submit(job(1, prompt_of(10), max_tokens=4))
        engine.runner._channels[0].close()  # type: ignore[attr-defined]
        with pytest.raises(RankFailed, match="rank 1 is gone"):
            engine.step()


@pytest.mark.parametrize(("shape", "tensor", "depth"), [("llama", 2, 4), ("gemma3", 4, 2)])
def test_guesses_change_no_answer(checkpoint: Folder, shape: str, tensor: int, depth: int) -> None:
    """Each rank finds the same guesses right. Rows without guesses and chunks of prompts are among them."""
    jobs = varied_jobs()[: len(PARAMS)]
    options: dict[str, Any] = {"deterministic": True, "step_tokens": 40}
    with grid_engine(checkpoint(shape), tensor, **options) as engine:
        plain = run(engine, *jobs)
    with grid_engine(checkpoint(shape), tensor, speculate="ngram", **options) as engine:
        answers = run(guessing(engine, Replay(plain), depth), *jobs)
        guesses = engine.stats().guesses
    for key, answer in answers.items():
        assert (answer.tokens, answer.logprobs) == (plain[key].tokens, plain[key].logprobs)
        assert answer.tops == plain[key].tops
    assert 0 < guesses.accepted < guesses.drafted


def test_a_draft_model_of_each_rank_changes_no_answer(checkpoint: Folder, tmp_path: Path) -> None:
    """Also a parallel one, and if the ranks' draft models differ: all check the guesses of the first rank."""
    jobs, folder = varied_jobs()[: len(PARAMS)], checkpoint("llama")
    options: dict[str, Any] = {"deterministic": True, "step_tokens": 40}
    with grid_engine(folder, 2, **options) as engine:
        plain = run(engine, *jobs)
    drafting = {"speculate": f"draft:{folder}", "speculate_depth": 3, **options}
    with grid_engine(folder, 2, **drafting) as engine:
        answers, guesses = run(engine, *jobs), engine.stats().guesses
    with patch.object(CpuDraftModel, "guess", _guess_differently), grid_engine(folder, 2, **drafting) as engine:
        wrong, guessed_wrong = run(engine, *jobs), engine.stats().guesses
    with grid_engine(
        folder, 2, **{**drafting, "speculate": f"draft:{with_mask(folder, tmp_path / 'draft')}"}
    ) as engine:
        at_once, guessed_at_once = run(engine, *jobs), engine.stats().guesses
    for key, answer in plain.items():
        for found in (answers[key], wrong[key], at_once[key]):
            assert (found.tokens, found.logprobs, found.tops) == (answer.tokens, answer.logprobs, answer.tops)
    assert guesses.accepted > 0.5 * guesses.drafted
    assert guessed_wrong.drafted > 0
    assert guessed_at_once.accepted_at[0] == guessed_at_once.drafted_at[0] > 0


_guess, _guessed = CpuDraftModel.guess, itertools.count()


def _guess_differently(*given: Any) -> dict[int, list[int]]:
    """As the draft model does, with another last guess at each call: no two ranks have the same."""
    found = _guess(*given)
    return {slot: [*ids[:-1], next(_guessed) % 60] if ids else [] for slot, ids in found.items()}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculate": "heads:x"}, "2 x pipeline 1 ranks do not support WEFT_SPECULATE=heads:x"),
        ({"speculate": "suffix", "pipeline": 2}, "2 x pipeline 2 ranks do not support WEFT_SPECULATE=suffix"),
        ({"kv_scales": "dynamic", "kv_dtype": "fp8"}, "do not support KV_SCALES=dynamic"),
        ({"engine": "paced"}, "do not support ENGINE=paced"),
    ],
)
def test_what_a_grid_cannot_do_is_refused(checkpoint: Folder, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason), grid_engine(checkpoint("llama"), **{"tensor": 2, **options}):
        pass


def test_ranks_of_an_encoder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="an encoder cannot honour pipeline_parallel: it computes on one rank"):
        build_encoder(tmp_path, EngineOptions(pipeline_parallel=2), lambda *_: None)
