"""What the benchmark of speculation through a mesh makes of the messages of answers."""

import argparse
from pathlib import Path

import pytest

from bench.speculation import mesh


def test_figures_are_those_of_the_messages_between_two_times() -> None:
    even = [(0.01 * number, 2) for number in range(300)]
    late = [(1.0, 1), (1.5, 4), (2.0, 1)]
    cell = mesh.figures([[even], [late]], 1.0, 2.0)
    assert cell["tok/s"] == pytest.approx(101 * 2 + 6)
    assert cell["tokens a message"] == pytest.approx(208 / 104)
    assert cell["ms p50"] == pytest.approx(10.0)
    assert cell["ms p99"] == pytest.approx(500.0)
    with pytest.raises(RuntimeError, match="no progress"):
        mesh.figures([[even], [late[:1]]], 1.0, 2.0)


def test_the_time_between_two_answers_of_a_client_is_not_one_between_messages() -> None:
    first, second = [(1.0, 1), (1.25, 1)], [(1.75, 1), (2.0, 1)]
    cell = mesh.figures([[first, [], second]], 1.0, 2.0)
    assert (cell["tok/s"], cell["ms p99"]) == (4.0, 250.0)


def test_the_table_has_each_figure_beside_that_without_speculation(tmp_path: Path) -> None:
    off = dict(zip(mesh.COLUMNS, (250.0, 1.0, 4.0, 5.0), strict=True))
    guessed = {**dict(zip(mesh.COLUMNS, (500.0, 1.25, 2.0, 4.0), strict=True)), "ratio": 2.0, "p99 ratio": 0.8}
    settings = vars(argparse.Namespace(model="random:llama-3.1-8b"))
    mesh.save(tmp_path, {"machine": {}, "settings": settings, "cells": {"off 1": off, "0.7 1": guessed}})
    table = (tmp_path / "speculation-mesh.md").read_text()
    assert "| off 1 | 250 |  | 1.00 | 4.00 | 5.00 |  |" in table
    assert "| 0.7 1 | 500 | 2.000 | 1.25 | 2.00 (4.00) | 4.00 (5.00) | 0.800 |" in table
    assert "acceptance 0.7" in (tmp_path / "speculation-mesh.svg").read_text()


def test_cells_are_compared_with_the_mean_of_both_meshes_without_speculation() -> None:
    figures = (200.0, 1.0, 4.0, 5.0), (300.0, 2.0, 2.0, 4.0), (100.0, 1.0, 4.0, 3.0)
    cells = [dict(zip(mesh.COLUMNS, each, strict=True)) for each in figures]
    found = dict(zip(("off 1", "0.7 1", "off again 1"), cells, strict=True))
    mesh.compare(found)
    assert (found["0.7 1"]["ratio"], found["0.7 1"]["p99 ratio"]) == (2.0, 1.0)
    assert found["off 1"].keys() == found["off again 1"].keys() == set(mesh.COLUMNS)
