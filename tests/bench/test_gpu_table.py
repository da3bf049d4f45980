"""The tables and plots of `bench.mesh.gpu`, made from given figures without a GPU."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from bench import peers
from bench.engine import determinism
from bench.engine import measure as engine
from bench.kernels import measure as kernels
from bench.mesh import gpu
from bench.mesh.floors import loop_tokens_per_s
from bench.table import selected

ROW = {"tok/s": 1300.0, "ttft p50": 200.0, "ttft p99": 300.0, "itl p50": 4.8, "itl p99": 5.0}
REST = {"requests": 24.0, "failed": 0.0, "cached": 0.0}
NAME = "8b 1950/200, 8 at a time"


def cells_of(page: str, name: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def words_of(plot: Path) -> set[str | None]:
    return {text.text for text in ET.parse(plot).getroot().iter() if text.tag.endswith("text")}


def test_a_row_stands_beside_vllm_the_floor_and_the_bare_loop(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({"cells": {"8b loop 1950/200 8": {"tok/s": 1310.0}}}))
    gpu.save(tmp_path / "gpu.json", {"machine": {"gpu": "H200"}, "rows": {NAME: {**ROW, **REST}}})
    cells = cells_of((tmp_path / "gpu.md").read_text(), NAME)
    assert cells[1:6] == ["1,300 (1,108)", "200 (257)", "300 (359)", "4.8 (5.46)", "5 (6.05)"]
    assert cells[7:10] == [
        "1.17",
        f"{1300 / loop_tokens_per_s('random:llama-3.1-8b', 'bf16', 1950, 200, 8):.2f}",
        "0.99",
    ]
    assert {"8B bf16, 1,950 in, 200 out", "floor"} <= words_of(tmp_path / "throughput-8b.svg")
    assert {NAME, "1.17"} <= words_of(tmp_path / "over-vllm.svg")


def test_a_row_is_not_compared_with_the_bare_loop_of_another_commit(tmp_path: Path) -> None:
    name = "8b loop 1950/200 8"
    (tmp_path / "engine.json").write_text(json.dumps({"cells": {name: {"tok/s": 1310.0}}, "commits": {name: "a"}}))
    for commit, ratio in (("a", "0.99"), ("b", "")):
        row = {**ROW, **REST, "commit": commit}
        gpu.save(tmp_path / "gpu.json", {"machine": {"gpu": "H200"}, "rows": {NAME: row}})
        cells = cells_of((tmp_path / "gpu.md").read_text(), NAME)
        assert (cells[9], cells[-1]) == (ratio, commit)


@pytest.mark.parametrize(
    ("format", "batch", "milliseconds"), [("bf16", 1, 3.56), ("bf16", 256, 19.9), ("fp8", 32, 2.89), ("int4", 1, 1.15)]
)
def test_floors_of_long_answers_are_those_of_the_steps(format: str, batch: int, milliseconds: float) -> None:
    tokens_per_s = loop_tokens_per_s("random:llama-3.1-8b", format, 1, 4198, batch)  # a context of 2,100 on average
    assert batch / tokens_per_s * 1e3 == pytest.approx(milliseconds, rel=0.03)


def test_rows_have_different_names_and_quantized_ones_run_shorter() -> None:
    every = [row for format in ("bf16", "fp8", "int4") for row in gpu.rows("8b", format)]
    assert len({row.name for row in every}) == len(every)
    assert peers.load("vllm").rows.keys() <= {row.name for row in (*every, *gpu.rows("1b", "bf16"))}
    assert {row.seconds for row in every if row.format != "bf16"} == {25.0}
    assert [row.requests for row in every if row.format == "int4"][-1] == 256


def test_short_answers_stand_beside_vllms_server(tmp_path: Path) -> None:
    name = "1b 16/16, 64 at a time"
    assert {row.requests for row in gpu.rows("1b", "bf16") if row.name == name} == {5000}
    gpu.save(
        tmp_path / "gpu.json", {"machine": {}, "rows": {name: {**ROW, **REST, "tok/s": 13344, "request p99": 80.0}}}
    )
    cells = cells_of((tmp_path / "gpu.md").read_text(), name)
    assert (cells[1], cells[6], cells[7]) == ("13,344 (6,672)", "80 (164)", "2.00")


@pytest.mark.parametrize("program", [gpu, engine, determinism, kernels])
def test_without_a_gpu_the_measured_table_is_unchanged(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("report.machine.gpu", str)
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        program.main()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gpu", "engine", "determinism"])
def test_the_tables_that_ship_name_the_gpu(name: str) -> None:
    measured = json.loads((Path(peers.__file__).parents[1] / f"results/{name}.json").read_text())
    assert "H200" in measured["machine"]["gpu"]


def test_rows_are_selected_by_whole_names_or_patterns() -> None:
    names = ["8b decode 1", "8b decode 128", "8b fp8 decode 1"]
    assert [name for name in names if selected(name, ["8b decode 1"])] == names[:1]
    assert [name for name in names if selected(name, ["*decode 1"])] == [names[0], names[2]]
    assert [name for name in names if selected(name, None)] == names
