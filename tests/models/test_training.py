"""The program that trains the demo models, run as a whole at toy size."""

import gzip
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.training.run import schedule
from models.recipe import TINY_DRAFT, TINY_STORY, TINY_VOCAB
from models.train import main


def test_training_writes_two_checkpoints_and_lowers_the_loss(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models"
    main(["--corpus", str(corpus), "--out", str(out), "--tiny"])
    printed = capsys.readouterr().out
    for recipe in (TINY_STORY, TINY_DRAFT):
        losses = [float(loss) for loss in re.findall(rf"{recipe.name}: .* held-out loss ([\d.]+)", printed)]
        assert len(losses) == recipe.evaluations
        assert losses[-1] < math.log(TINY_VOCAB) * 0.6
        model = AutoModelForCausalLM.from_pretrained(out / recipe.name)
        assert model.dtype == torch.bfloat16
        assert model.config._attn_implementation == "sdpa"
        assert f"{model.num_parameters():,} parameters" in (out / recipe.name / "README.md").read_text()
    assert "drafts at temperature 1 is accepted" in (out / TINY_DRAFT.name / "README.md").read_text()


def test_an_unusable_corpus_is_refused_in_one_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus / "heldout.txt.gz").write_bytes(gzip.compress(b"The fox ran."))
    for folder, complaint in ((corpus, "the corpus is too small"), (tmp_path / "none", "no train-*.txt.gz in")):
        with pytest.raises(SystemExit, match="2"):
            main(["--corpus", str(folder), "--out", str(tmp_path), "--tiny"])
        assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_the_learning_rate_warms_up_holds_and_falls_to_zero() -> None:
    assert schedule(progress=0.01, warmth=0.5, decay_share=0.6) == 0.5
    assert schedule(progress=0.30, warmth=9.0, decay_share=0.6) == 1.0
    assert schedule(progress=0.70, warmth=9.0, decay_share=0.6) == pytest.approx(0.5)
    assert schedule(progress=1.00, warmth=9.0, decay_share=0.6) == 0.0
