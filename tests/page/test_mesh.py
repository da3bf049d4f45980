"""The live view of the mesh in a browser: traffic, workers that come and go, keys, and what only operators see."""

import asyncio
import hashlib
import re
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.mesh.conftest import demo_model
from tests.mesh.harness import Mesh
from tests.page.test_playground import ANSWER, CONTRAST, WAIT_MS, opened, send, whole

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("page")]  # One browser.

KEYS = {"operator": "weft-key-of-the-operator", "reader": "weft-key-of-the-reader"}


def tenants(path: Path) -> str:
    """A file of two tenants, one of whom may watch the mesh."""
    entries = (
        f'[[tenant]]\nname = "{name}"\nkeys = ["sha256:{hashlib.sha256(key.encode()).hexdigest()}"]\n{more}\n'
        for (name, key), more in zip(KEYS.items(), ("operator = true", ""), strict=True)
    )
    path.write_text("\n".join(entries))
    return str(path)


async def test_traffic_is_shown_as_it_happens(page: Page, paced: Mesh) -> None:
    await opened(page, paced, "#mesh")
    await expect(page.locator("#mesh .worker")).to_have_count(2, timeout=WAIT_MS)
    async with httpx.AsyncClient(timeout=60) as client:
        fields = {"prompt": "A tale", "max_tokens": 100, "ignore_eos": True}
        asked = [asyncio.create_task(client.post(f"{paced.url()}/v1/completions", json=fields)) for _ in range(4)]
        await expect(page.locator("#mesh .measure", has_text="running").first).not_to_contain_text(" 0 running")
        rate = page.locator(".tile", has_text="tokens/s").locator("b")
        await expect(rate).not_to_have_text("0.00", timeout=WAIT_MS)
        await asyncio.gather(*asked)
    # The worker takes 30 ms for a step; the median is exact to a tenth.
    itl = page.get_by_role("img", name="Time between tokens")
    await expect(itl).to_have_attribute(
        "aria-label", re.compile(r"p50 \d+(\.\d+)? ms, p90 .* ms, p99 .* ms"), timeout=WAIT_MS
    )
    label = await itl.get_attribute("aria-label") or ""
    assert float(label.split("p50 ")[1].split(" ")[0]) >= 27
    for name in ("Time to first token", "Tokens", "Jobs", "KV memory", "Requests"):
        plot = page.get_by_role("img", name=f"{name}:")
        assert len(await plot.locator("path.line").first.get_attribute("d") or "") > 10, name
        assert await plot.locator("text").count() >= 8, name


async def test_a_killed_worker_shows_and_comes_back(page: Page, paced: Mesh) -> None:
    await opened(page, paced, "#mesh")
    workers = page.locator("#mesh .worker")
    ready = page.locator("#mesh .worker[data-phase=ready]")
    await expect(ready).to_have_count(2, timeout=WAIT_MS)
    await expect(page.locator("#link-state")).to_have_text("2 workers")
    names = set(await workers.locator("h3").all_text_contents())
    paced.workers[1].kill()
    gone = page.locator("#mesh .worker[data-phase=gone]")
    await expect(gone).to_have_count(1, timeout=WAIT_MS)
    await expect(page.locator("#link-state")).to_have_text("1 worker")
    assert await page.evaluate(CONTRAST) == []
    lost = await gone.locator("h3").text_content() or ""
    assert lost in names
    await expect(page.locator(".changes")).to_contain_text(f"{lost}: gone")
    # The playground goes on with the other worker.
    await page.click("#nav-playground")
    await send(page, tokens=3)
    await whole(page)
    await page.click("#nav-mesh")
    paced.workers[1].start()
    await expect(ready).to_have_count(2, timeout=WAIT_MS)
    (new,) = set(await ready.locator("h3").all_text_contents()) - names
    await expect(page.locator(".changes")).to_contain_text(f"{new}: ready")
    await paced.workers[1].ready()


async def test_a_restart_of_scheduler_and_gateway_is_shown_and_survived(page: Page, paced: Mesh) -> None:
    await opened(page, paced, "#mesh")
    notice = page.locator("#mesh .notice")
    paced.scheduler.kill()
    await expect(notice).to_contain_text("scheduler does not answer", timeout=WAIT_MS)
    await expect(page.locator("#mesh .service", has_text="scheduler")).to_contain_text("not reachable")
    paced.scheduler.start()
    await expect(notice).to_be_hidden(timeout=WAIT_MS)
    paced.gateways[0].kill()
    await expect(notice).to_contain_text("trying again", timeout=WAIT_MS)
    await expect(page.locator("#link-state")).to_have_text("Gateway not reachable")
    paced.gateways[0].start()
    await expect(notice).to_be_hidden(timeout=WAIT_MS)
    await expect(page.locator("#mesh .worker[data-phase=ready]")).to_have_count(2, timeout=WAIT_MS)
    await paced.gateways[0].ready()


async def test_the_start_of_a_worker_is_shown(page: Page, tmp_path: Path) -> None:
    """The page of a gateway without a model shows the progress of the first worker, then finds its model."""
    async with Mesh(tmp_path, demo_model(), workers=0, gateways=0) as mesh:
        # A variable that no service reads: the worker is not forked, so its start takes as long as a user's.
        gateway, worker = mesh._gateway(0), mesh.new_worker(0, PYTHONUNBUFFERED="1")
        mesh.gateways.append(gateway)
        gateway.start()
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            while True:
                try:
                    await client.get(f"{mesh.url()}/startupz")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)
        await page.goto(mesh.url())
        await expect(page.locator("#log-empty-text")).to_have_text("No model is served yet.", timeout=WAIT_MS)
        await page.click("#nav-mesh")
        mesh.workers.append(worker)
        worker.start()
        await expect(page.locator("#mesh .worker[data-phase=loading]")).to_be_visible(timeout=WAIT_MS)
        await expect(page.locator("#mesh .worker[data-phase=ready]")).to_be_visible(timeout=WAIT_MS)
        await page.click("#nav-playground")
        await expect(page.locator("#log-empty-text")).to_contain_text("weft-story-2m", timeout=WAIT_MS)


async def test_a_mesh_with_tenants_asks_for_a_key_and_shows_itself_to_operators(page: Page, tmp_path: Path) -> None:
    environment = {"WEFT_TENANTS_FILE": tenants(tmp_path / "tenants.toml")}
    async with Mesh(tmp_path, demo_model(), gateway_env=environment) as mesh:
        await page.goto(f"{mesh.url()}/#mesh")
        dialog = page.locator("#key-dialog")
        await expect(dialog).to_be_visible(timeout=WAIT_MS)
        await page.keyboard.type("a wrong key")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-reason")).to_have_text("The mesh does not accept this key.", timeout=WAIT_MS)
        await page.fill("#key-input", KEYS["reader"])
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#mesh .notice")).to_contain_text("operator", timeout=WAIT_MS)
        await page.click("#nav-playground")
        await send(page, tokens=3)
        await whole(page)
        await expect(page.locator(f"{ANSWER} .stats")).to_contain_text("3 tokens")
        await page.click("#key-button")
        await page.fill("#key-input", KEYS["operator"])
        await page.keyboard.press("Enter")
        await page.click("#nav-mesh")
        await expect(page.locator("#mesh .worker[data-phase=ready]")).to_be_visible(timeout=WAIT_MS)
        # The key is in the storage of this tab alone.
        assert await page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert await page.evaluate("Object.values(sessionStorage)") != []
        assert KEYS["operator"] not in page.url
        for process in mesh.processes:
            assert KEYS["operator"] not in process.log.read_text(errors="replace")
