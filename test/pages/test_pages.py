"""The chat page and the status page in a real Chromium, on a real front with a scripted engine."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from front.conftest import chat_dir, chat_tokenizer, client, engine, front, model_dir, tokenizer  # noqa: F401
from front.scripted_engine import Front, ScriptedEngine, serving
from support.server import until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
PAINTED = "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
ANSWER = "<think>The user greets.</think>Hello! **Bold**, `code` and\n\n- one\n- two\n\n```python\nprint('<b>')\n```"


@pytest.fixture(scope="module")
def served(chat_tokenizer, chat_dir) -> Iterator[tuple[Front, ScriptedEngine]]:  # noqa: F811
    with serving(chat_tokenizer, model_dir=str(chat_dir), model_name="scripted") as front_and_engine:
        yield front_and_engine


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(params=[(1200, 800), (390, 780)], ids=["wide", "phone"])
def page(browser, front, request) -> Iterator:  # noqa: F811
    """A page that logs no error and asks no other host."""
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda asked: None if asked.url.startswith((front.url, "data:")) else errors.append(asked.url))
    yield page
    page.close()
    assert errors == []


def shown(page) -> bool:
    """Nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def ask(page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def test_chat(page, front, engine, tmp_path: Path) -> None:  # noqa: F811
    engine.says = ANSWER
    page.goto(f"{front.url}/chat")
    page.get_by_role("heading", name="scripted").wait_for()
    assert shown(page)
    ask(page, "hi <b>there</b>")
    page.get_by_text("tokens/s").wait_for()
    answer = page.locator(".assistant")
    assert answer.locator("b").first.inner_text() == "Bold" and answer.locator("li").count() == 2
    assert "print('<b>')" in answer.locator("pre").inner_text()
    assert "The user greets." in (answer.locator("details").text_content() or "")
    assert page.locator(".user").inner_text() == "hi <b>there</b>"
    assert shown(page)
    engine.says = "another"
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("another").wait_for()
    assert page.locator(".assistant").count() == 1
    ask(page, "and")
    until(lambda: len(engine.requests) == 3)
    page.get_by_text("tokens/s").last.wait_for()
    text = front.tokenizer.decode(engine.prompt())
    assert "another<|im_end|>\n<|im_start|>user\nand" in text and "Bold" not in text
    page.get_by_role("button", name="New").click()
    assert page.locator(".message").count() == 0


def test_stop_and_settings(page, front, engine) -> None:  # noqa: F811
    engine.pace = 0.05
    page.goto(f"{front.url}/chat")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("be brief")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Settings").click()
    ask(page, "hi")
    page.get_by_text("abc").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped").wait_for()
    until(lambda: engine.aborted == [engine.requests[0].id])
    assert (engine.requests[0].sampling.temperature, engine.requests[0].sampling.seed) == (0.5, 7)
    assert "be brief" in front.tokenizer.decode(engine.prompt())
    page.evaluate("localStorage.clear()")


def test_errors_are_shown(page, front, engine) -> None:  # noqa: F811
    engine.failing_after = 2
    page.goto(f"{front.url}/chat")
    ask(page, "hi")
    page.get_by_text("the row failed").wait_for()
    assert page.get_by_role("button", name="Send").is_visible()


def test_dark_and_light(page, front, engine) -> None:  # noqa: F811
    page.goto(f"{front.url}/chat")
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.get_by_role("button", name="dark or light").click()
    assert page.evaluate(background) != before
    page.reload()
    assert page.evaluate(background) != before, "the choice is kept"
    page.evaluate("localStorage.clear()")


def test_dashboard(page, front, engine) -> None:  # noqa: F811
    page.goto(f"{front.url}/dashboard")
    page.get_by_text("2,500 (50 %)").wait_for()
    page.get_by_text("500 (10 %)", exact=True).wait_for()
    assert page.locator("#waiting").inner_text() == "3"
    assert shown(page)
    assert page.evaluate("[...document.querySelectorAll('canvas')].every(canvas => " + PAINTED + ".some(Boolean))")
