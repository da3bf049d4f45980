"""The reports of `weft bench` and `weft verify` in a browser: nothing cut off, readable in both themes."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page
from typer.testing import CliRunner

from report import html, plot
from tests.mesh.harness import Mesh
from tests.page.conftest import SCHEMES, look
from tests.page.test_playground import CONTRAST
from verify.page import page as verify_page
from weft.cli.app import app

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("page")]  # One browser.

CUT = """() => [...document.querySelectorAll('.card, .scroll, .tiles, body')]
    .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.innerText.slice(0, 60))"""
OVERLAPPING = """() => [...document.querySelectorAll('svg')].flatMap(plot => {
    const boxes = [...plot.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
    return boxes.flatMap(([one, a], place) =>
        boxes.slice(place + 1).filter(([, b]) => !apart(a, b)).map(([other]) => `${one} | ${other}`));
})"""


def verified() -> dict[str, Any]:
    """A result of `weft verify` for three candidates with long names, drawn at random."""
    draws = random.Random(3)
    parts = ("queries", "keys", "attention", "mlp")

    def model(name: str) -> dict[str, Any]:
        return {"name": name}

    def candidate(name: str, passes: bool) -> dict[str, Any]:
        return {
            **model(name),
            "passes": passes,
            "gates": [{"gate": "top-1 agreement >= 0.97", "holds": passes, "value": draws.random()}],
            "worst_rows": [{"text": f"layer {n} self_attn.q_proj row {n}: gain 1.01, error 1.2 x"} for n in range(10)],
            "kl_curve": [(10 ** -(4 - share / 30), share) for share in range(1, 101)],
            "ratios": [{part: 1 + draws.gauss(0, 0.01) for part in parts} for _ in range(16)],
            "angles": [{part: 1 - abs(draws.gauss(0, 0.001)) for part in parts} for _ in range(16)],
        }

    names = ("llama-3.1-8b-instruct-awq-int4-g128", "llama-3.1-8b-instruct-w8a8-smooth", "llama-3.1-8b-fp8")
    kinds = ("int8 per channel", "int8 per tensor", "fp8 per channel", "fp8 per tensor")
    return {
        "base": model("llama-3.1-8b-instruct"),
        "candidates": [candidate(name, number != 1) for number, name in enumerate(names)],
        "device": "cuda",
        "tokens": 4096,
        "drafts": [
            {"name": name, "temperature": heat, "accepted_length": 2.46, "by_depth": [0.6, 0.4, 0.25, 0.2]}
            for name in ("draft:llama-3.2-1b-instruct", "heads:out/llama-3.1-8b-heads")
            for heat in (0.0, 1.0)
        ],
        "rounding": [{"linear": f"{n} qkv", **dict.fromkeys(kinds, 0.01)} for n in range(30)],
        "machine": {"gpu": "NVIDIA H200", "packages": "torch 2.11.0, triton 3.6.0, " * 6},
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reports."""
    return tmp_path_factory.mktemp("reports")


async def check(page: Page, file: Path) -> None:
    """The report is whole, apart and readable at all widths and in both themes."""
    for scheme in SCHEMES:
        for width in (1280, 900, 380):
            await look(page, width, 900, scheme)
            await page.goto(file.as_uri())
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            if width == 1280:
                assert await page.evaluate(CUT) == []
                assert await page.evaluate(OVERLAPPING) == []
            assert await page.evaluate(CONTRAST) == []


async def test_the_report_of_a_load(page: Page, mesh: Mesh, reports: Path) -> None:
    file = reports / "bench.html"
    command = ["bench", "--address", mesh.gateways[0].address, "--requests", "12", "--output-len", "8"]
    code = await _in_thread([*command, "--input-len", "32", "--warmup", "1", "--html", str(file)])
    assert code == 0
    await check(page, file)


async def test_the_report_of_a_verification(page: Page, reports: Path) -> None:
    file = reports / "verify.html"
    file.write_text(verify_page(verified()), encoding="utf-8")
    await check(page, file)


async def test_ticks_in_the_corner_of_a_plot_are_apart(page: Page, reports: Path) -> None:
    file = reports / "corner.html"
    across = [plot.Line("one", [(120.0, 0.0), (170.0, 90.0)]), plot.Line("two", [(1200.0, 0.0), (1300.0, 90.0)])]
    plots = [plot.lines([line], plot.Axis("ms", log=True), plot.Axis("requests")) for line in across]
    file.write_text(html.document("Corners", "", html.cards(plots), {}), encoding="utf-8")
    await check(page, file)


async def _in_thread(command: list[str]) -> int:
    return (await asyncio.to_thread(CliRunner().invoke, app, command)).exit_code
