"""The program that makes the demo family, with two members that take a second each: the models change places."""

from pathlib import Path

import pytest
from torch import Tensor

from compress.progress import Progress
from compress.prune.shrink import Cut, shrink
from compress.training.run import Plan
from models import family
from tests.checkpoints import DEMO, SMALL_DEMO


def test_the_family_is_made_verified_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pruned(out: Path, windows: Tensor, progress: Progress) -> None:
        shrink(family.BASE, out, windows[:2], Cut(neurons=0.04), Plan(steps=0), progress)

    monkeypatch.setattr(family, "BASE", SMALL_DEMO)
    monkeypatch.setattr(family, "DRAFT", DEMO)
    monkeypatch.setattr(family, "QUANTIZED", {"int8": family.QUANTIZED["int8"]})
    monkeypatch.setattr(family, "CHANGED", {"pruned": pruned})
    with pytest.raises(SystemExit) as ended:
        family.main(["--out", str(tmp_path), "--windows", "1"])
    assert ended.value.code == 0
    rows = (tmp_path / "FAMILY.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| weft-story-2m", "| int8", "| pruned", "| weft-story-11m"]
    assert all(row.endswith("passes |") for row in rows[3:])
    assert "<svg" in (tmp_path / "family.html").read_text()


def test_a_missing_input_of_the_family_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"demo-family: text .*none cannot be read: FileNotFoundError"):
        family.main(["--out", str(tmp_path / "out"), "--text", str(tmp_path / "none")])
