"""Draft heads are trained on a base's hidden states and answers: they learn, and the worker computes the same heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from compress import text
from compress.base.network import load
from compress.cli import app
from compress.errors import CompressError
from compress.heads.network import HeadsNetwork, HeadsShape
from compress.heads.train import HeadsPlan, base_states, fused_layers, heads
from compress.training.run import Plan
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import Job, SamplingParams
from services.worker.options import EngineOptions
from services.worker.runners.cpu.runner import CpuRunner
from tests.checkpoints import Shape, make_checkpoint

PLAN = Plan(steps=30, batch=4, learning_rate=3e-3, warmup=3)
LAYERS, PROMPT, DEPTH = [1, 2], list(range(40, 70)), 3


def quiet(*_: object) -> None:
    """Ignores progress."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), Shape("llama", damped=0.02))


@pytest.fixture(scope="module")
def windows(base: Path) -> Tensor:
    return text.windows(text.read(text.CALIBRATION), base, 24, 24)


@pytest.fixture(scope="module")
def trained(base: Path, windows: Tensor, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder of heads, and their last loss."""
    out = tmp_path_factory.mktemp("trained") / "heads"
    return out, heads(base, out, windows, HeadsPlan(DEPTH), PLAN, quiet)


def open_engine(base: Path, place: Path, **options: Any) -> GenerationEngine:
    settings = EngineOptions(kv_blocks=64, speculate=f"heads:{place}", **options)
    return build_engine(base, settings, quiet).engine


def answer(engine: GenerationEngine, count: int) -> list[int]:
    """The greedy answer to a prompt."""
    engine.submit(Job(1, PROMPT, len(PROMPT), SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)))
    tokens = list[int]()
    while engine.has_work():
        tokens += [token.token_id for token in engine.step().tokens]
    return tokens


def test_heads_learn(base: Path, windows: Tensor, trained: tuple[Path, float], tmp_path: Path) -> None:
    out, loss = trained
    short = heads(base, tmp_path / "short", windows, HeadsPlan(DEPTH), Plan(1, 4, 0.0), quiet)
    assert loss < 0.95 * short
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_layers"] == LAYERS == fused_layers(3)
    assert config["depth"] == DEPTH
    assert not (out / "tokenizer.json").exists()


def test_the_worker_computes_the_heads_that_were_trained(base: Path, trained: tuple[Path, float]) -> None:
    out, _ = trained
    engine, guesses = open_engine(base, out, speculate_depth=DEPTH), list[int]()
    assert isinstance(engine.runner, CpuRunner)
    draft = engine.runner.draft
    assert draft is not None
    original = draft.guess

    def record(*arguments: Any) -> dict[int, list[int]]:
        found = original(*arguments)
        guesses.extend(token for tokens in found.values() for token in tokens)
        return found

    draft.guess = record  # type: ignore[method-assign,assignment]
    first = answer(engine, 5)[0]
    model: Any = load(base)
    shape = HeadsShape(width=64, neurons=96, heads=4, kv_heads=2, head_dim=16, fused=2, eps=1e-6)
    network = HeadsNetwork(shape, model.get_input_embeddings().weight, None)
    stored = load_file(out / "model-00001-of-00001.safetensors")
    with torch.no_grad():
        for name, weight in network.tensors().items():
            weight.copy_(stored[name])
        ids = torch.tensor([[*PROMPT, first, *guesses[: DEPTH - 1]]])
        states, _ = base_states(model, ids, LAYERS)
        outputs = list(network.unroll(ids, states, DEPTH))
        expected = [int(model.lm_head(x[0, len(PROMPT) + at]).argmax()) for at, x in enumerate(outputs)]
    assert guesses[:DEPTH] == expected


@pytest.mark.parametrize("at", ["answers", "steps"])
def test_an_interrupted_run_is_resumed(
    at: str, base: Path, windows: Tensor, trained: tuple[Path, float], tmp_path: Path
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == at and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heads(base, tmp_path / "out", windows, HeadsPlan(DEPTH), PLAN, interrupt)
    seen: list[tuple[str, int]] = []
    heads(base, tmp_path / "out", windows, HeadsPlan(DEPTH), PLAN, lambda what, done, _: seen.append((what, done)))
    assert next(done for what, done in seen if what == at) > 0, "the run began anew"
    name = "model-00001-of-00001.safetensors"
    whole, resumed = load_file(trained[0] / name), load_file(tmp_path / "out" / name)
    assert all(torch.allclose(whole[key], resumed[key], atol=1e-5) for key in whole)


def test_the_command_makes_heads_with_a_head_of_their_own(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "own"
    flags = {"depth": 2, "neurons": 32, "vocabulary": 100, "steps": 2, "batch": 2, "windows": 2, "length": 32}
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    result = CliRunner().invoke(app, ["heads", str(base), str(out), *given], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    config = json.loads((out / "config.json").read_text())
    assert len(config["draft_tokens"]) == config["vocab_size"] == 100
    engine = open_engine(base, out, speculate_depth=2)
    assert len(answer(engine, 20)) == 20
    assert engine.stats().guesses.drafted > 0


def test_more_tokens_than_the_base_has_are_refused(base: Path, windows: Tensor, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="--vocabulary 400: the base has 320 tokens"):
        heads(base, tmp_path / "out", windows, HeadsPlan(vocabulary=400), PLAN, quiet)
