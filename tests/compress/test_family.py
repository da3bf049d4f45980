"""The program that makes the demo family, with two members that take seconds."""

from pathlib import Path

import pytest
from torch import Tensor

from compress.progress import Progress
from compress.shrink import Cut, shrink
from compress.training import Plan
from models import family


def test_the_family_is_made_proved_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pruned(out: Path, windows: Tensor, told: Progress) -> None:
        shrink(family.BASE, out, windows[:2], Cut(neurons=0.04), Plan(steps=0), told)

    monkeypatch.setattr(family, "QUANTIZED", {"int8": family.QUANTIZED["int8"]})
    monkeypatch.setattr(family, "CHANGED", {"pruned": pruned})
    with pytest.raises(SystemExit) as ended:
        family.main(["--out", str(tmp_path), "--windows", "1"])
    assert ended.value.code == 0
    rows = (tmp_path / "FAMILY.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| weft-story-11m", "| int8", "| pruned", "| weft-story-2m"]
    assert all(row.endswith("passes |") for row in rows[3:])
    assert "<svg" in (tmp_path / "family.html").read_text()


def test_what_keeps_the_family_from_being_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"demo-family: text .*none cannot be read: FileNotFoundError"):
        family.main(["--out", str(tmp_path / "out"), "--text", str(tmp_path / "none")])
