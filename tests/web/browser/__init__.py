"""A page in a real browser, driven as a person drives it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, FloatRect, Locator, Page, ViewportSize, expect, sync_playwright

# The first has no windows, and takes a fifth less processor time than the others.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
# What Playwright switches off itself, since the last list that a browser is given counts, and the address bar's
# suggestions, which are a page of their own: it takes a second of a core beside each page of ours, and no one sees it.
FEATURES_OFF = (
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "LensOverlay",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxFullPopup",
    "WebUIOmniboxPopup",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    # Drawing in a process of its own costs a tenth of the tests' time.
    "--in-process-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(FEATURES_OFF)}",
    # A camera that shows a moving pattern.
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
# A refusal of ours is shown on the page in words, and a browser counts it as an error besides; also a request that it
# gives up itself because its page is loaded again.
_EXPECTED = re.compile(r"responded with a status of 4\d\d|net::ERR_ABORTED")
VIEWPORT: ViewportSize = {"width": 1200, "height": 850}
# Only reached by a test that fails: whatever a test waits for, it waits for its event.
PATIENCE_MS = int(os.environ.get("PATIENCE", "60000"))


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


def box_of(shown: Locator) -> FloatRect:
    """Where something is on the page, in CSS pixels."""
    box = shown.bounding_box()
    assert box is not None
    return box


class ChatPage:
    """The chat page in a session of its own; `problems` collects what a browser reports or should not have done.

    A test that ends the page's server says so first, by `server_ends`: until the visit ends broken connections are
    expected.
    """

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.url = url.partition("t/")[0] if "/t/" in url else url
        self._address = url
        self.problems: list[str] = []
        self._forgiven: set[str] = set()
        self.server_ends = False
        # The examples' clips would play all along otherwise.
        own = {"viewport": VIEWPORT, "reduced_motion": "reduce"}
        self.context = browser.new_context(**{**own, **context})
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.on("weberror", lambda error: self.problems.append(f"error: {error.error}"))
        self.context.on("console", lambda message: self._note_console(message.type, message.text))
        self.context.on("request", lambda request: self._note_request(request.url))
        self.page: Page = self.context.new_page()
        self.visit()

    def visit(self) -> None:
        """Loads the page; in a session that has loaded it before, that takes a third of the time."""
        self.page.goto(self._address)
        self.box.wait_for()

    def leave(self) -> None:
        """Ends a visit, so that the next one is like a first one; there must have been no problem.

        The page stays until then, since one loads over itself in two thirds of the time; it can only note nothing more.
        """
        # What a test that failed may have left.
        self.context.set_offline(False)
        self.page.unroute_all(behavior="ignoreErrors")
        forget = "Storage.prototype.setItem = () => {}; localStorage.clear()"
        self.page.evaluate(f"() => {{ if (location.protocol !== 'about:') {{ {forget} }} }}")
        if self.page.viewport_size != VIEWPORT:
            self.page.set_viewport_size(VIEWPORT)
        self.server_ends = False
        problems, self.problems = [each for each in self.problems if each not in self._forgiven], []
        self._forgiven.clear()
        assert problems == [], f"the browser complained: {problems}"

    def forgive(self) -> None:
        """Takes the problems so far for what was to be shown. The browser tells those of a frame once more when another
        frame joins its process."""
        self._forgiven.update(self.problems)

    @property
    def box(self) -> Locator:
        return self.page.locator(".composer textarea")

    @property
    def questions(self) -> Locator:
        return self.page.locator(".message.user")

    @property
    def answers(self) -> Locator:
        return self.page.locator(".message.assistant")

    @property
    def work(self) -> Locator:
        """What is going on for the last answer."""
        return self.answers.last.locator(".work")

    @property
    def send_button(self) -> Locator:
        return self.page.get_by_role("button", name="Send", exact=True)

    @property
    def stop_button(self) -> Locator:
        return self.page.get_by_role("button", name="Stop", exact=True)

    @property
    def examples(self) -> Locator:
        return self.page.locator(".example")

    @property
    def outbox(self) -> Locator:
        """Messages that wait for their files or for an answer."""
        return self.page.locator(".outbox li")

    @property
    def thumbnails(self) -> Locator:
        return self.page.locator(".thumbnail")

    @property
    def chats(self) -> Locator:
        return self.page.locator(".chat")

    @property
    def titles(self) -> Locator:
        """The titles of the conversations in the sidebar."""
        return self.page.locator(".chat .name")

    @property
    def toasts(self) -> Locator:
        return self.page.locator(".toasts")

    @property
    def dialog(self) -> Locator:
        return self.page.locator("dialog[open]")

    def tool(self, message: Locator, name: str) -> Locator:
        """A button below a message."""
        return message.get_by_role("button", name=name, exact=True)

    def open_cost(self) -> Locator:
        """What the last answer cost, opened."""
        self.tool(self.answers.last, "Cost of this answer").click()
        return self.answers.last.locator(".cost")

    def add(self, entry: str) -> None:
        """Takes an entry of the menu behind "+"."""
        self.page.get_by_role("button", name="Add to message").click()
        self.page.get_by_role("dialog", name="Add to message").get_by_role("button", name=entry).click()

    def attach(self, *files: Path) -> None:
        """Adds files to the message, and waits until they are uploaded and their costs are known."""
        before = self.thumbnails.count()
        with self.page.expect_file_chooser() as chooser:
            self.add("Add files")
        chooser.value.set_files([str(file) for file in files])
        expect(self.thumbnails).to_have_count(before + len(files))
        for label in self.page.locator(".thumbnail .label").all():
            expect(label).not_to_contain_text("Uploading")

    def ask(self, text: str, files: Sequence[Path] = ()) -> None:
        """Sends a message with Enter."""
        if files:
            self.attach(*files)
        self.box.fill(text)
        self.box.press("Enter")

    def wait_answered(self, num_answers: int = 1) -> str:
        """Waits until that many answers are there and none is in progress; the text of the last one."""
        expect(self.answers).to_have_count(num_answers)
        expect(self.stop_button).to_be_hidden()
        expect(self.answers.last.locator(".tools button").first).to_be_visible()
        return self.answers.last.locator(".answer").inner_text().strip()

    def wait_ending(self, text: str) -> None:
        """Waits until the last answer ends so and none is in progress; until the server has begun to continue it, the
        page looks as if it were there."""
        expect(self.answers.last.locator(".answer")).to_have_text(re.compile(re.escape(text) + r"\s*$"))
        self.wait_answered(self.answers.count())

    def open_settings(self, *, advanced: bool = False) -> Locator:
        """The settings, open; those that most people leave alone are unfolded, too, if `advanced`."""
        panel = self.page.locator("aside.settings")
        if not panel.is_visible():
            self.page.locator(".top").get_by_role("button", name="Settings").click()
        if advanced:
            panel.get_by_text("Advanced", exact=True).click()
        return panel

    def new_chat(self) -> None:
        """Begins a new conversation."""
        self.page.get_by_role("button", name="New chat").click()
        expect(self.page.locator(".welcome")).to_be_visible()

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
        # A server that is about to end refuses whoever still comes.
        is_end = "net::ERR_" in text or "status of 503" in text
        expected = _EXPECTED.search(text) or (self.server_ends and is_end)
        if kind == "error" and not expected:
            self.problems.append(f"console: {text}")

    def _note_request(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:", "about:")):
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
