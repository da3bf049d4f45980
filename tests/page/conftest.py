"""A headless Chromium and a mesh for it. Without a Chromium all these tests are skipped."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
import pytest_asyncio
from playwright.async_api import ConsoleMessage, Error, Page, async_playwright

from tests.mesh.conftest import demo_model
from tests.mesh.harness import Mesh

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("WEFT_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
# A step takes 30 ms, so that there is time to look at an answer while it grows, and to stop it.
PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "30", "MAX_BATCH_SIZE": "4", "WEFT_PACED_PREFILL_RATE": "4000"}

Scheme: TypeAlias = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


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
async def tab() -> AsyncIterator[Page]:
    """The one tab of the one browser of all tests: to open another one takes over a second of processor time."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield await browser.new_page()
        await browser.close()


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
async def page(tab: Page) -> AsyncIterator[Page]:
    """The tab without anything that another test left in it. Errors on its console fail the test: of scripts, and of
    what the security policy forbids."""
    problems: list[str] = []

    def on_error(error: Error) -> None:
        problems.append(str(error))

    def on_message(message: ConsoleMessage) -> None:
        if _is_problem(message.type, message.text):
            problems.append(message.text)

    await look(tab)
    tab.on("pageerror", on_error)
    tab.on("console", on_message)
    yield tab
    tab.remove_listener("pageerror", on_error)
    tab.remove_listener("console", on_message)
    await forget(tab)
    assert problems == []


async def look(tab: Page, width: int = 1280, height: int = 860, scheme: Scheme = "light") -> None:
    """Sets the size of the tab and the colours that its system prefers."""
    await tab.set_viewport_size({"width": width, "height": height})
    await tab.emulate_media(color_scheme=scheme)


async def forget(tab: Page) -> None:
    """Removes what the page has stored, and leaves it. An empty page and a file have no storage."""
    await tab.evaluate("() => { if (origin !== 'null') { localStorage.clear(); sessionStorage.clear(); } }")
    await tab.goto("about:blank")


def _is_problem(kind: str, text: str) -> bool:
    """Failed requests are logged by the browser, too: the page shows them itself."""
    return kind in ("error", "warning") and not text.startswith("Failed to load resource")
