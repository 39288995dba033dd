"""The chat in a real browser: two people at once, stop, a closed tab, errors, a phone's width, nothing from outside.

Needs Chromium. With HF_CB_SCREENSHOTS=folder the pictures of the documentation are made anew there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_cb
from hf_cb.manager.manager import ContinuousBatchingManager

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
LONG = "Write a very long story about a lighthouse keeper."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    return hf_cb.demo_model()


@pytest.fixture
def chat(model: tuple[Any, Any]) -> Iterator[tuple[str, ContinuousBatchingManager]]:
    """The page's address, and the manager behind it."""
    pytest.importorskip("gradio")
    from hf_cb.chat.app import appearance, build_app

    hf_cb.accelerate(*model)
    with model[0].continuous_batching_context_manager() as manager:
        app = build_app(manager, "SmolLM2-135M-Instruct")
        _, address, _ = app.launch(prevent_thread_lock=True, quiet=True, **appearance())
        yield address, manager
        app.close()
        manager.stop(hard_stop=True)
    hf_cb.restore(model[0])


@pytest.fixture
def visit(browser: Any, chat: tuple[str, ContinuousBatchingManager]) -> Iterator[Callable[..., Any]]:
    """Opens the page for one more person."""
    contexts = []

    def visit(width: int = 1280, height: int = 860) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.goto(chat[0])
        page.wait_for_selector("#box textarea")
        return page

    yield visit
    for context in contexts:
        context.close()


def ask(page: Any, text: str) -> None:
    page.fill("#box textarea", text)
    page.press("#box textarea", "Enter")
    page.wait_for_selector(f"#chat .user:has-text({text!r})")


def answer(page: Any) -> str:
    shown = page.query_selector_all("#chat .bot .message-content, #chat .bot")
    return shown[-1].inner_text() if shown else ""


def until(condition: Callable[[], Any], page: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        page.wait_for_timeout(50)


def picture(page: Any, name: str) -> None:
    if folder := os.environ.get("HF_CB_SCREENSHOTS"):
        page.wait_for_timeout(1500)
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_two_people_at_once_and_both_stream(visit: Callable[..., Any], chat: tuple[str, Any]) -> None:
    one, two, manager = visit(), visit(390, 844), chat[1]
    outside: list[str] = []
    for page in (one, two):
        page.on("request", lambda request: outside.append(request.url))
        page.reload()
        page.wait_for_selector("#box textarea")
    ask(one, LONG)
    ask(two, LONG)
    until(lambda: len(answer(one)) > 40 and len(answer(two)) > 40, one)
    assert manager.stats().running == 2, "one of them waited for the other"
    until(lambda: "2" in one.inner_text("#engine b[data-name=running]"), one)
    seen = answer(one), answer(two)
    until(lambda: answer(one) != seen[0] and answer(two) != seen[1], one)
    picture(one, "chat")
    picture(two, "chat-phone")
    width = two.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, "the page is wider than a phone"
    addresses = [url for url in outside if not url.startswith((chat[0], "data:", "blob:"))]
    assert not addresses, "something comes from the network"


def test_stop_ends_the_answer_and_frees_its_blocks(visit: Callable[..., Any], chat: tuple[str, Any]) -> None:
    page, manager = visit(), chat[1]
    ask(page, LONG)
    until(lambda: len(answer(page)) > 40, page)
    assert manager.stats().blocks_held > 0
    page.click("#stop")
    page.wait_for_selector("small.figures:has-text('stopped')")
    until(lambda: manager.stats().running == 0, page)
    assert manager.stats().blocks_held == 0
    ask(page, "What is the capital of France?")  # and the conversation goes on
    until(lambda: page.locator("small.figures").count() == 2, page)


def test_a_closed_tab_cancels(visit: Callable[..., Any], chat: tuple[str, Any]) -> None:
    leaving, staying, manager = visit(), visit(), chat[1]
    ask(leaving, LONG)
    ask(staying, LONG)
    until(lambda: manager.stats().running == 2, staying)
    leaving.close()
    until(lambda: manager.stats().running == 1, staying, seconds=10)
    seen = answer(staying)
    until(lambda: answer(staying) != seen, staying)


def test_errors_are_shown(visit: Callable[..., Any], chat: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    page, manager = visit(), chat[1]
    ask(page, "x " * 9000)
    page.wait_for_selector("small.problem:has-text('tokens')")
    monkeypatch.setattr(manager.engine, "step", lambda: 1 / 0)
    ask(page, "Are you there?")
    page.wait_for_selector("small.problem:has-text('division')")
    page.wait_for_selector("#engine:has-text('The engine has stopped')")
    picture(page, "chat-error")


def test_retry_and_edit_make_the_answer_anew(visit: Callable[..., Any]) -> None:
    page = visit()
    ask(page, "Name a colour.")
    page.wait_for_selector("small.figures")
    first = page.inner_text("small.figures")
    page.click("#chat button[aria-label='Retry']")
    until(lambda: page.locator("small.figures").count() == 1 and page.inner_text("small.figures") != first, page)
    page.click("#chat button[aria-label='Edit']")
    page.fill("#chat textarea", "Name an animal.")
    page.click("#chat button[aria-label='Submit']")
    page.wait_for_selector("#chat .user:has-text('Name an animal.')")
    until(lambda: page.locator("small.figures").count() == 1, page)
    assert page.locator("#chat .user:has-text('Name a colour.')").count() == 0


def test_what_is_cleared_in_the_middle_stays_away(visit: Callable[..., Any], chat: tuple[str, Any]) -> None:
    page, manager = visit(), chat[1]
    ask(page, LONG)
    until(lambda: len(answer(page)) > 40, page)
    page.click("#chat button[aria-label='Clear']")
    until(lambda: manager.stats().running == 0, page)
    page.wait_for_timeout(1000)
    assert page.locator("#chat .user, #chat .bot").count() == 0


def test_markup_in_a_message_does_nothing_and_reaches_nobody(visit: Callable[..., Any]) -> None:
    page, violations = visit(), []
    page.on("console", lambda message: violations.append(message.text))
    finished: list[str] = []
    page.on("requestfinished", lambda request: finished.append(request.url))
    page.route("http://elsewhere.example/**", lambda route: route.fulfill(body="x"))
    image = "![i](http://elsewhere.example/seen.png)"
    page.fill("#box textarea", f"{image}<script>window.hit=1</script><img src=x onerror='window.hit=2'>")
    page.press("#box textarea", "Enter")
    until(lambda: any("elsewhere" in text and "Content Security Policy" in text for text in violations), page)
    assert page.evaluate("window.hit") is None and not any("elsewhere" in url for url in finished)
