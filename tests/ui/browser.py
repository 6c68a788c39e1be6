"""A page in a real browser, driven as a person drives it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Only reached by a test that fails: whatever a test waits for, it waits for its event.
PATIENCE_MS = 60_000


def find_chromium() -> str | None:
    """The browser's path: QWEN35MM_CHROMIUM, or the first one that is installed."""
    return os.environ.get("QWEN35MM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless Chromium. Nothing asynchronous may run in this thread meanwhile: Playwright has its loop in it."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        yield browser
        browser.close()


class ChatPage:
    """The chat page in a session of its own; `problems` collects what a browser reports or should not have done."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.url = url
        self.problems: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 850}, **context})
        self.context.set_default_timeout(PATIENCE_MS)
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", lambda message: self._note_console(message.type, message.text))
        self.page.on("request", lambda request: self._note_request(request.url))
        self.page.goto(url)
        self.box.wait_for()

    @property
    def box(self) -> Locator:
        return self.page.locator("#box textarea")

    @property
    def questions(self) -> Locator:
        return self.page.locator("#chat .user-row")

    @property
    def answers(self) -> Locator:
        return self.page.locator("#chat .bot-row")

    @property
    def status(self) -> Locator:
        return self.page.locator("#status")

    @property
    def send_button(self) -> Locator:
        return self.page.locator("#box .submit-button")

    @property
    def stop_button(self) -> Locator:
        return self.page.locator("#box .stop-button")

    @property
    def examples(self) -> Locator:
        return self.page.locator("#chat .example")

    @property
    def toasts(self) -> Locator:
        return self.page.locator(".toast-wrap")

    def attach(self, *files: Path) -> None:
        """Adds files to the message, and waits until they are uploaded."""
        with self.page.expect_file_chooser() as chooser:
            self.page.locator("#box .upload-button").click()
        chooser.value.set_files([str(file) for file in files])
        expect(self.page.locator("#box .thumbnail-item")).to_have_count(len(files))

    def ask(self, text: str, files: Sequence[Path] = ()) -> None:
        """Sends a message with Enter."""
        if files:
            self.attach(*files)
        self.box.fill(text)
        self.box.press("Enter")

    def wait_answered(self, num_answers: int = 1) -> str:
        """Waits until that many answers are there and none is in progress; the text of the last one."""
        expect(self.answers).to_have_count(num_answers)
        expect(self.send_button).to_be_visible()
        return self.answers.last.inner_text().strip()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits, with the browser running on, until something on the server's side is so."""
        waited_ms = 0
        while not condition():
            assert waited_ms < PATIENCE_MS, "waited in vain"
            self.page.wait_for_timeout(10)
            waited_ms += 10

    def close(self) -> None:
        self.context.close()

    def _note_console(self, kind: str, text: str) -> None:
        if kind == "error":
            self.problems.append(f"console: {text}")

    def _note_request(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"request to another place: {url}")


OpenPage = Callable[..., ChatPage]


@contextmanager
def chat_pages(browser: Browser, url: str) -> Iterator[OpenPage]:
    """Opens pages that are closed at the end, and asserts that none had a problem."""
    opened: list[ChatPage] = []

    def opener(**context: Any) -> ChatPage:
        opened.append(ChatPage(browser, url, **context))
        return opened[-1]

    yield opener
    for page in opened:
        page.close()
    problems = [problem for page in opened for problem in page.problems]
    assert problems == [], f"the browser complained: {problems}"
