"""Parallel draft models: what a student reads in training, what it learns, resumed runs, and the command's flags."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from compress import text
from compress.base.network import load
from compress.cli import app
from compress.errors import CompressError
from compress.training.distill import distill
from compress.training.parallel import parallel_aim, places, random_places
from compress.training.run import Plan, logits
from tests.checkpoints import EOS, VOCAB, Shape, make_checkpoint

PLAN = Plan(steps=60, batch=4, learning_rate=1e-2, warmup=3)
TOKENS, GUESSES, MASK = 24, 4, 9


def quiet(*_: object) -> None:
    """Ignores progress."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("teacher"), Shape("llama", damped=0.02))


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("student"), Shape("llama", {"num_hidden_layers": 1}), seed=5)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    """Windows in which each token decides the next: a guess two tokens ahead can be right."""
    return 40 + 11 * ((torch.arange(16)[:, None] + torch.arange(TOKENS)) % 13)


@pytest.fixture(scope="module")
def trained(teacher: Path, student: Path, windows: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "draft"
    distill(teacher, student, out, windows, PLAN, quiet, guesses=GUESSES, mask_token=MASK)
    return out


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_a_mask_reads_what_it_reads_when_it_is_served(name: str, tmp_path: Path) -> None:
    tokens, anchors = 40, [0, 7, 21, 30, 36]
    model = load(make_checkpoint(tmp_path / "model", name))
    ids = torch.randint(2, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(3))
    read = places(torch.tensor(anchors), tokens, GUESSES)
    plain: Any = model
    with torch.no_grad():
        found = logits(model, read.filled(ids, MASK), **read.where(model.config))
        assert torch.allclose(found[:, :tokens], plain(ids).logits, atol=1e-4)
        for number, anchor in enumerate(anchors):
            served = torch.cat((ids[:, : anchor + 1], torch.full((2, GUESSES - 1), MASK)), 1)
            wanted = plain(served).logits[:, anchor + 1 :]
            begin = tokens + number * (GUESSES - 1)
            assert torch.allclose(found[:, begin : begin + GUESSES - 1], wanted, atol=1e-4)


@pytest.mark.parametrize("guesses", range(2, 9))
def test_a_window_has_about_as_many_masks_as_tokens_and_a_token_follows_each(guesses: int) -> None:
    read = random_places(64, guesses, torch.device("cpu"))
    masks = read.position_S[64:]
    assert 64 - guesses <= len(masks) <= 64
    assert masks.max() < 63
    assert len(set(read.anchor_S[64:].tolist())) == len(masks) // (guesses - 1)
    assert len(random_places(guesses + 1, guesses, torch.device("cpu")).position_S) == 2 * guesses


def right(teacher: Path, draft: Path, windows_WT: Tensor, guess: int) -> float:
    """How often this guess of a pass is the teacher's likeliest token after the tokens before it."""
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (teacher, draft))
    masks = torch.full((len(windows_WT), GUESSES - 1), MASK)
    with torch.no_grad():
        wanted = one(windows_WT).logits.argmax(-1)
        found = [
            other(torch.cat((windows_WT[:, :known], masks), 1)).logits.argmax(-1)[:, known + guess - 2]
            == wanted[:, known + guess - 2]
            for known in range(4, TOKENS - GUESSES)
        ]
    return torch.stack(found).float().mean().item()


def test_later_guesses_learn_without_harm_to_the_first(
    teacher: Path, student: Path, trained: Path, windows: Tensor
) -> None:
    assert json.loads((trained / "config.json").read_text())["pard_token"] == MASK
    assert right(teacher, student, windows, 2) < 0.1
    for guess in range(1, GUESSES + 1):
        assert right(teacher, trained, windows, guess) > 0.6, guess


def test_an_interrupted_run_is_resumed(
    teacher: Path, student: Path, trained: Path, windows: Tensor, tmp_path: Path
) -> None:
    out, reported = tmp_path / "parts", list[int]()

    def run(progress: Any) -> None:
        distill(teacher, student, out, windows, PLAN, progress, guesses=GUESSES, mask_token=MASK)

    def stop_half_way(_: str, done: int, __: int) -> None:
        if done == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stop_half_way)
    run(lambda _, done, __: reported.append(done))
    assert reported[0] == 30
    for file in trained.glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()


def test_a_run_without_masks_has_the_settings_of_earlier_versions(
    teacher: Path, student: Path, windows: Tensor, tmp_path: Path
) -> None:
    distill(teacher, student, tmp_path / "out", windows, Plan(steps=0), quiet)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "guesses" not in card
    assert "mask" not in card
    assert "pard_token" not in (tmp_path / "out" / "config.json").read_text()


def test_the_mask_token_is_one_that_no_text_has(teacher: Path, windows: Tensor, tmp_path: Path) -> None:
    def chosen(folder: Path) -> int:
        return parallel_aim(folder, load(folder).config, windows, GUESSES).mask_token

    def made(name: str, **settings: Any) -> Path:
        return make_checkpoint(tmp_path / name, Shape("llama", {"vocab_size": spoken, **settings}))

    spoken = text.tokenizer(teacher).get_vocab_size()
    assert chosen(made("spare", vocab_size=VOCAB, pad_token_id=7)) == spoken < VOCAB
    assert chosen(made("full")) == EOS
    assert chosen(made("padded", pad_token_id=7)) == 7
    assert chosen(made("named", pard_token="mask")) == EOS
    assert chosen(made("several", eos_token_id=[3, 4])) == 3
    assert chosen(made("parallel", vocab_size=VOCAB, pard_token=12)) == 12
    with pytest.raises(CompressError, match="name one with --mask-token"):
        chosen(made("none", eos_token_id=None))


def test_windows_shorter_than_the_guesses_are_refused(teacher: Path, windows: Tensor, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="4 guesses need windows of 5 tokens or more, these have 4"):
        distill(teacher, teacher, tmp_path / "out", windows[:, :4], PLAN, quiet, guesses=4)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--parallel", "3"), ""),
        (("--parallel", "3", "--mask-token", "8", "--hard", "0.3", "--drafting", "0.2"), ""),
        (("--mask-token", "8"), "--mask-token 8 needs --parallel"),
        (("--parallel", "3", "--mask-token", str(VOCAB)), f"mask token {VOCAB}: the student has {VOCAB} tokens"),
        (("--parallel", "3", "--mask-token", "-1"), f"mask token -1: the student has {VOCAB} tokens"),
    ],
)
def test_the_command_writes_the_mask_token_or_one_line(
    flags: tuple[str, ...], told: str, teacher: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time there was a fox who could spin. " * 80)
    few = ["--steps", "2", "--batch", "2", "--length", "32", "--text", str(tmp_path / "text.txt")]
    command = ["distill", str(teacher), str(teacher), str(tmp_path / "out"), *flags, *few]
    ran = CliRunner().invoke(app, command, catch_exceptions=False)
    assert told in ran.stderr
    if told:
        assert ran.exit_code == 1
        assert ran.stderr.count("\n") == 1
    else:
        assert ran.exit_code == 0, ran.output
        token = json.loads((tmp_path / "out" / "config.json").read_text())["pard_token"]
        assert token == (8 if "--mask-token" in flags else text.tokenizer(teacher).get_vocab_size())
