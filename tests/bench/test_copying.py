"""Random weights that copy: n-grams and suffixes are right nearly always, as deep as they may, and change no answer."""

import pytest

from bench.engine.copying import make_copying, walk
from bench.speculation.cells import WINDOW, paces
from bench.speculation.equality import compare_in_one
from services.worker.engine.generation import GenerationEngine
from services.worker.loader import presets
from services.worker.speculative.depth import DepthChooser
from services.worker.speculative.ngram import NgramProposer
from services.worker.speculative.proposer import Proposer
from services.worker.speculative.suffix import SuffixProposer
from tests.worker.drive import decoder_of, job, open_engine, run

CYCLE, VOCABULARY, TOKENS = 500, 6144, 200


@pytest.fixture(scope="module")
def engine() -> GenerationEngine:
    made = open_engine(presets.folder_of("tiny"), kv_blocks=256, deterministic=True, speculate="ngram")
    make_copying(decoder_of(made).model, CYCLE)
    return made


@pytest.mark.parametrize("proposer", [NgramProposer, SuffixProposer])
def test_copying_answers_are_guessed_as_deep_as_they_may(
    proposer: type[Proposer], engine: GenerationEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps as long as those of an 8B model on an H200."""
    observe = DepthChooser.observe_step

    def paced(chooser: DepthChooser, rows: int, depth: int, _: float) -> None:
        observe(chooser, rows, depth, 0.004 + 0.00012 * depth)

    monkeypatch.setattr(DepthChooser, "observe_step", paced)
    prompts = [walk(first, CYCLE, CYCLE, VOCABULARY) for first in (7, 2600, VOCABULARY - 1)]
    jobs = [job(key, prompt, max_tokens=TOKENS, bypass_cache=True) for key, prompt in enumerate(prompts)]
    speculation = engine.speculation
    assert speculation is not None
    engine.speculation = guessing = speculation.fresh(None, proposer())
    answers = run(engine, *jobs)
    engine.speculation = speculation
    for key, prompt in enumerate(prompts):
        assert answers[key].tokens == walk(prompt[0], CYCLE + TOKENS, CYCLE, VOCABULARY)[CYCLE:]
    counts = guessing.counts
    assert counts.accepted >= 0.95 * counts.drafted
    assert counts.drafted_at[-1] >= 0.5 * counts.rows, counts
    assert sum(len(answer.tokens) for answer in answers.values()) - counts.accepted < 0.3 * TOKENS * len(jobs)


def test_random_requests_of_presets_are_equal() -> None:
    for name, wrong, line in compare_in_one("tiny", "tiny", 24, ("ngram", "suffix", "draft"), speculate_depth=4):
        assert wrong == 0, (name, line)
        assert " 0 of " not in line.partition(";")[2], "no guess was right: the test shows nothing"


def test_tokens_of_an_output_share_its_time() -> None:
    found = paces([[0.0, 0.002, 0.010, 0.010, 0.010, 0.010], [0.001]])
    assert list(found.values()) == pytest.approx([5.0, 8.0, 2.0, 0.0])
    steady = paces([[0.004 * (token // 2) for token in range(4 * WINDOW)]])
    assert list(steady.values()) == pytest.approx([4.0, 4.0, 2.0, 2.0])
