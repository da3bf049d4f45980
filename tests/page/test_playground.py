"""The playground in a browser: answers stream, stop and resume; receipts add up; the keyboard suffices."""

import asyncio
import itertools
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, Request, expect

from tests.mesh.harness import Mesh
from tests.page.conftest import SCHEMES, Scheme, forget, look

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("page")]  # One browser.

STORY = "Once upon a time there was a fox who lived in a dark wood near the old mill"
WAIT_MS = 60_000
ANSWER = ".turn:last-child .answer"


async def opened(page: Page, mesh: Mesh, view: str = "") -> None:
    """The page, once it has found the model."""
    await page.goto(f"{mesh.url()}/{view}")
    await expect(page.locator("#model")).not_to_have_value("", timeout=WAIT_MS)


async def send(page: Page, prompt: str = STORY, tokens: int = 24, **settings: str) -> None:
    """Sends a prompt with these values of the controls."""
    await page.fill("#option-max_tokens", str(tokens))
    for name, value in settings.items():
        await page.fill(f"#option-{name}", value)
    await page.fill("#prompt", prompt)
    await page.press("#prompt", "Enter")


async def whole(page: Page) -> str:
    """The text of the last answer, once it is whole."""
    await expect(page.locator(ANSWER)).to_have_attribute("aria-busy", "false", timeout=WAIT_MS)
    return await page.locator(f"{ANSWER} .text").text_content() or ""


@contextmanager
def recorded(page: Page) -> Iterator[list[dict[str, Any]]]:
    """The bodies of the generations that the page sends inside the block."""
    bodies: list[dict[str, Any]] = []

    def record(request: Request) -> None:
        if request.url.endswith("completions"):
            bodies.append(request.post_data_json or {})

    page.on("request", record)
    yield bodies
    page.remove_listener("request", record)


async def until_running(mesh: Mesh, jobs: int) -> None:
    """Waits until the workers run this number of jobs, as the mesh reports them."""
    async with asyncio.timeout(WAIT_MS / 1000), httpx.AsyncClient(base_url=mesh.url()) as client:
        while True:
            snapshot = (await client.get("/mesh")).json()
            if sum(int(worker["running"]) for worker in snapshot["workers"]) == jobs:
                return
            await asyncio.sleep(0.02)


async def test_a_prompt_streams(page: Page, paced: Mesh) -> None:
    await opened(page, paced)
    await send(page, tokens=60, temperature="0", seed="11")
    body = page.locator(f"{ANSWER} .text")
    await expect(body).not_to_be_empty(timeout=WAIT_MS)
    seen = set()
    for _ in range(20):
        seen.add(len(await body.text_content() or ""))
        await asyncio.sleep(0.05)
    assert len(seen) > 3
    text = await whole(page)
    async with httpx.AsyncClient(timeout=60) as client:
        fields = {"prompt": STORY, "max_tokens": 60, "temperature": 0, "seed": 11}
        reply = (await client.post(f"{paced.url()}/v1/completions", json=fields)).json()
    assert text == reply["choices"][0]["text"]
    await expect(page.locator(f"{ANSWER} .stats")).to_contain_text("60 tokens")


async def test_the_waterfall_adds_up_to_the_wall_time(page: Page, mesh: Mesh) -> None:
    await opened(page, mesh)
    await send(page)
    await whole(page)
    rows = await page.eval_on_selector_all(
        f"{ANSWER} .waterfall [data-hop]",
        "rows => rows.map(row => [row.dataset.hop, Number(row.dataset.hundredths), row.cells[2].textContent])",
    )
    *hops, (last, wall, _) = rows
    assert last == "wall"
    assert {"prefill", "decode"} <= {name for name, _, _ in hops}
    assert sum(value for _, value, _ in hops) == wall > 0
    assert all(float(text.replace(",", "")) == pytest.approx(value / 100, abs=1e-9) for _, value, text in rows)
    # Each bar begins where the one before ends, and the last one ends at the right edge.
    edges = await page.eval_on_selector_all(
        f"{ANSWER} .waterfall .track",
        """tracks => tracks.map(track => {
            const whole = track.getBoundingClientRect();
            const part = track.lastChild.getBoundingClientRect();
            return [(part.left - whole.left) / whole.width, (part.right - whole.left) / whole.width];
        })""",
    )
    for (_, end), (begin, _) in itertools.pairwise(edges):
        assert begin == pytest.approx(end, abs=0.03)
    assert edges[-1][1] == pytest.approx(1, abs=0.01)


async def test_cached_prompt_tokens_are_marked(page: Page, mesh: Mesh) -> None:
    """The demo model's blocks have 16 tokens: of an equal prompt the whole blocks but the last token are cached."""
    prompt = "The marks of the cache. " + STORY
    await opened(page, mesh)
    await send(page, prompt, tokens=2)
    await whole(page)
    # Requests spread over two workers: another one may come to the worker that has not seen the prompt.
    for _ in range(3):
        await send(page, prompt, tokens=2)
        await whole(page)
        if await page.locator(f"{ANSWER} .facts", has_text="cached").count():
            break
    await page.locator(f"{ANSWER} .prompt-part summary").click()
    pieces = page.locator(f"{ANSWER} .piece")
    await expect(pieces.first).to_be_visible()
    kinds = await pieces.evaluate_all("spans => spans.map(span => span.classList[1])")
    cached = kinds.count("cached")
    assert cached >= 16
    assert kinds == ["cached"] * cached + ["computed"] * (len(kinds) - cached)
    assert "".join(await pieces.all_text_contents()).endswith(prompt)
    await expect(page.locator(f"{ANSWER} .facts")).to_contain_text(f"{cached} cached")


async def test_probabilities_are_shown_on_demand(page: Page, mesh: Mesh) -> None:
    await opened(page, mesh)
    await send(page, tokens=12)
    text = await whole(page)
    await page.click(f"{ANSWER} [data-action=probabilities]")
    tokens = page.locator(f"{ANSWER} .token")
    await expect(page.locator(ANSWER)).to_have_attribute("aria-busy", "false", timeout=WAIT_MS)
    await expect(tokens).to_have_count(12, timeout=WAIT_MS)
    # The same seed gives the same answer.
    assert "".join(await tokens.all_text_contents()) == text
    await tokens.first.focus()
    await page.keyboard.press("ArrowRight")
    panel = page.locator(f"{ANSWER} .token-panel")
    await expect(panel).to_contain_text("Token 2:")
    shares = [float(each.rstrip("%")) for each in await panel.locator("td:last-child").all_text_contents()]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) >= 5
    assert sum(shares) <= 101


async def test_stop_cancels_the_call_at_the_worker(page: Page, paced: Mesh) -> None:
    await opened(page, paced)
    await send(page, tokens=1500)
    await expect(page.locator(f"{ANSWER} .text")).not_to_be_empty(timeout=WAIT_MS)
    await until_running(paced, 1)
    await page.click("#stop-button")
    await expect(page.locator(f"{ANSWER} .stats")).to_contain_text("Stopped after")
    await until_running(paced, 0)
    # What has arrived stays, and the next prompt is answered.
    assert await page.locator(f"{ANSWER} .text").text_content()
    await send(page, tokens=3)
    await whole(page)


async def test_regenerate_replaces_the_answer(page: Page, mesh: Mesh) -> None:
    await opened(page, mesh)
    await send(page, tokens=20, temperature="1.5")
    first = await whole(page)
    await page.click(f"{ANSWER} [data-action=regenerate]")
    await expect(page.locator(f"{ANSWER} .text")).not_to_have_text(first, timeout=WAIT_MS)
    assert await whole(page) != first
    await expect(page.locator(".turn")).to_have_count(1)


async def test_the_controls_reach_the_model(page: Page, mesh: Mesh) -> None:
    await opened(page, mesh)
    await page.locator("details.more summary").click()
    await page.fill("#stop", "fox\nwolf")
    with recorded(page) as sent:
        await send(page, tokens=50, temperature="0", seed="7", top_k="3", repetition_penalty="1.2")
        text = await whole(page)
        (body,) = sent
        wanted = {"prompt": STORY, "max_tokens": 50, "temperature": 0, "seed": 7, "top_k": 3, "repetition_penalty": 1.2}
        assert {name: body[name] for name in wanted} == wanted
        assert body["stop"] == ["fox", "wolf"]
        assert "fox" not in text
        # A value beyond its limits is not sent.
        await send(page, temperature="9")
        await expect(page.locator("#option-temperature:invalid")).to_be_focused()
        assert len(sent) == 1


async def test_a_chat_carries_its_history(page: Page, mesh: Mesh) -> None:
    await opened(page, mesh)
    await page.check("[name=mode][value=chat]")
    await page.fill("#system", "You tell stories.")
    with recorded(page) as sent:
        await send(page, "A story, please.", tokens=8)
        first = await whole(page)
        await send(page, "Another one.", tokens=8)
        await whole(page)
    assert sent[1]["messages"] == [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "A story, please."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Another one."},
    ]


async def test_prompts_are_shown_as_text(page: Page, mesh: Mesh) -> None:
    await opened(page, mesh)
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    await send(page, markup, tokens=2)
    await whole(page)
    assert await page.locator(".turn:last-child .prompt").first.text_content() == markup
    assert await page.locator(".turn img, .turn b, .turn script").count() == 0


async def test_an_error_names_the_field_and_leaves_the_page_working(page: Page, mesh: Mesh) -> None:
    await opened(page, mesh)
    await send(page, STORY * 400, tokens=10)
    problem = page.locator(f"{ANSWER} .problem.error")
    await expect(problem).to_contain_text("context", timeout=WAIT_MS)
    await send(page, tokens=2)
    await whole(page)
    await expect(page.locator(f"{ANSWER} .stats")).to_contain_text("2 tokens")


async def test_an_answer_survives_the_restart_of_the_gateway(page: Page, paced: Mesh) -> None:
    await opened(page, paced)
    await send(page, tokens=150, temperature="0")
    body = page.locator(f"{ANSWER} .text")
    await expect(body).not_to_be_empty(timeout=WAIT_MS)
    paced.gateways[0].kill(signal.SIGKILL)
    before = await body.text_content() or ""
    await expect(page.locator(f"{ANSWER} .problem")).to_contain_text("trying again", timeout=WAIT_MS)
    paced.gateways[0].start()
    await paced.gateways[0].ready()
    text = await whole(page)
    assert text.startswith(before)
    await expect(page.locator(f"{ANSWER} .stats")).to_contain_text("150 tokens")
    await expect(page.locator(f"{ANSWER} .problem")).to_be_hidden()
    await expect(page.locator("#link-state")).to_have_attribute("data-state", "open", timeout=WAIT_MS)


async def test_the_keyboard_suffices(page: Page, paced: Mesh) -> None:
    """From an empty page to a stopped answer, its probabilities, and the other view, without a pointer."""
    await opened(page, paced)

    async def tab_to(selector: str) -> None:
        for _ in range(60):
            if await page.evaluate("selector => document.activeElement?.matches(selector)", selector):
                # What has the focus is visible, and so is the ring around it.
                assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
                return
            await page.keyboard.press("Tab")
        raise AssertionError(f"{selector} is not reached")

    await tab_to("#prompt")
    await page.keyboard.type("A tale")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("of two lines")
    await page.keyboard.press("Enter")
    await expect(page.locator(f"{ANSWER} .text")).not_to_be_empty(timeout=WAIT_MS)
    await page.keyboard.press("Escape")
    await expect(page.locator(f"{ANSWER} .stats")).to_contain_text("Stopped")
    assert await page.locator(".turn .prompt").first.text_content() == "A tale\nof two lines"
    await tab_to("#option-max_tokens")
    await page.keyboard.type("5")
    await tab_to("#logprobs")
    await page.keyboard.press("Space")
    await page.keyboard.press("Escape")
    for _ in range(30):
        await page.keyboard.press("Shift+Tab")
        if await page.evaluate("document.activeElement.id") == "prompt":
            break
    await page.keyboard.type("Again")
    await page.keyboard.press("Enter")
    await expect(page.locator(f"{ANSWER} .waterfall")).to_be_visible(timeout=WAIT_MS)
    for _ in range(30):
        await page.keyboard.press("Shift+Tab")
        if await page.evaluate("document.activeElement.classList.contains('token')"):
            break
    await page.keyboard.press("ArrowRight")
    await expect(page.locator(f"{ANSWER} .token-panel")).to_contain_text("Token 2:")
    await page.keyboard.press("Home")
    for _ in range(30):
        await page.keyboard.press("Shift+Tab")
        if await page.evaluate("document.activeElement.id") == "nav-mesh":
            break
    await page.keyboard.press("Enter")
    await expect(page.locator("#mesh .worker").first).to_be_visible(timeout=WAIT_MS)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_both_themes_have_enough_contrast(page: Page, mesh: Mesh, scheme: Scheme) -> None:
    """Every visible text has a contrast of at least 4.5 with what is behind it, whatever the system prefers."""
    (other,) = set(SCHEMES) - {scheme}
    for system, presses in ((scheme, 0), (other, {"light": 1, "dark": 2}[scheme])):
        await look(page, scheme=system)
        await opened(page, mesh)
        for _ in range(presses):
            await page.click("#theme-button")
        assert await page.evaluate("getComputedStyle(document.body.parentElement).colorScheme") == (
            scheme if presses else "light dark"
        )
        await page.check("#logprobs")
        await send(page, tokens=12)
        await whole(page)
        await page.locator(f"{ANSWER} .token").first.focus()
        assert await page.evaluate(CONTRAST) == []
        await page.goto(f"{mesh.url()}/#mesh")
        await expect(page.locator("#mesh .worker").first).to_be_visible(timeout=WAIT_MS)
        assert await page.evaluate(CONTRAST) == []
        background = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        shades = [int(each) for each in re.findall(r"\d+", background)[:3]]
        assert (sum(shades) > 380) == (scheme == "light")
        await forget(page)


CONTRAST = """() => {
  // Colours as the browser paints them, with transparent ones laid over what is behind.
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const layers = (node) => {
    const found = [];
    for (let at = node; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
    return found;
  };
  const painted = (colours) => {
    canvas.fillStyle = "#fff";
    canvas.fillRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const wrong = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { parentElement: parent, data } = walker.currentNode;
    if (!data.trim() || !parent.checkVisibility() || parent.closest(".hidden, .skip, option, noscript")) continue;
    const style = getComputedStyle(parent);
    const behind = layers(parent);
    const text = painted([...behind, parent instanceof SVGElement ? style.fill : style.color]);
    const [high, low] = [luminance(text), luminance(painted(behind))].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) wrong.push(`${data.trim().slice(0, 30)} (${parent.className}): ${contrast.toFixed(2)}`);
  }
  return wrong;
}"""


async def test_a_narrow_screen_does_not_scroll_sideways(page: Page, mesh: Mesh) -> None:
    await look(page, 360, 740)
    await opened(page, mesh)
    await expect(page.locator("#settings")).to_be_hidden()
    await page.click("#settings-button")
    await page.check("#logprobs")
    await page.fill("#option-max_tokens", "12")
    await page.click("#settings-button")
    await page.fill("#prompt", "w" * 200)
    await page.click("#send-button")
    await whole(page)
    await page.locator(f"{ANSWER} .token").first.focus()
    await page.locator(f"{ANSWER} .prompt-part summary").click()
    await expect(page.locator(f"{ANSWER} .piece").first).to_be_visible()
    for view in ("#playground", "#mesh"):
        await page.goto(f"{mesh.url()}/{view}")
        wide = await page.evaluate(
            "[document, ...document.querySelectorAll('main, #log, #mesh')]"
            ".map(each => each.scrollingElement ?? each).map(each => each.scrollWidth - each.clientWidth)"
        )
        assert max(wide) <= 0
