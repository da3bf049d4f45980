"""A headless Chromium and a mesh for it. Without a Chromium all these tests are skipped."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from tests.mesh.conftest import demo_model
from tests.mesh.harness import Mesh

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("WEFT_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
# A step takes 30 ms, so that there is time to look at an answer while it grows, and to stop it.
PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "30", "MAX_BATCH_SIZE": "4", "WEFT_PACED_PREFILL_RATE": "4000"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder where there is no browser."""
    if CHROMIUM is None:
        skip = pytest.mark.skip(
            reason=f"no Chromium: none of {', '.join(NAMES)} is in PATH (WEFT_TEST_CHROMIUM names it)"
        )
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(skip)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The browser of all tests."""
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        await running.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """Two workers with the demo model, a gateway, and no result cache."""
    folder = tmp_path_factory.mktemp("page")
    async with Mesh(folder, demo_model(), workers=2) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def paced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A worker that takes its time, and another one; tests may kill what they start again."""
    folder = tmp_path_factory.mktemp("paced")
    async with Mesh(folder, demo_model(), workers=2, worker_env=PACED) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A tab of its own. Errors on its console fail the test: of scripts, and of what the security policy forbids."""
    context = await browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    tab = await context.new_page()
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on(
        "console", lambda message: problems.append(message.text) if _is_problem(message.type, message.text) else None
    )
    yield tab
    await context.close()
    assert problems == []


def _is_problem(kind: str, text: str) -> bool:
    """Failed requests are logged by the browser, too: the page shows them itself."""
    return kind in ("error", "warning") and not text.startswith("Failed to load resource")
