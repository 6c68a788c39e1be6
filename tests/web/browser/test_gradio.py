"""The Gradio page of examples/gradio_chat.py in a real browser."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from qwen35mm.assets import asset_path, demo_model_path, example_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.http.run import ServerThread
from qwen35mm.http.sessions import PageToken
from qwen35mm.web.serving.gradio_chat import create_app
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import PATIENCE_MS

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = asset_path("samples")


class GradioPage:
    """The page in a session of its own, driven as a person drives it."""

    def __init__(self, browser: Browser, address: str) -> None:
        self._address = address
        self.problems: list[str] = []
        self.context = browser.new_context(viewport={"width": 1200, "height": 850})
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.on("request", lambda request: self._note_request(request.url))
        self.context.on("console", lambda message: self._note_console(message.text))
        self.page: Page = self.context.new_page()
        self.visit()

    def visit(self) -> None:
        self.page.goto(self._address)
        expect(self.box).to_be_editable()

    @property
    def box(self) -> Locator:
        return self.page.get_by_test_id("textbox").first

    @property
    def answers(self) -> Locator:
        """The messages of answers: texts, and what stands beside them."""
        return self.page.get_by_test_id("bot")

    @property
    def chats(self) -> Locator:
        """The chats at the side."""
        return self.page.get_by_test_id(re.compile("dataset-cell"))

    @property
    def stop_button(self) -> Locator:
        return self.page.get_by_label("Stop", exact=True)

    def ask(self, text: str, *files: Path) -> None:
        """Sends a message with Enter."""
        if files:
            self.page.get_by_test_id("file-upload").first.set_input_files([str(file) for file in files])
            expect(self.page.get_by_label("Remove file")).to_have_count(len(files))
        self.box.fill(text)
        self.box.press("Enter")

    def wait_answered(self, *texts: str | re.Pattern[str]) -> None:
        """Waits until the answers' messages have these texts, and another question can be asked."""
        expect(self.answers).to_have_text(list(texts))
        expect(self.stop_button).to_be_hidden()
        expect(self.box).to_be_editable()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits, with the browser running on, until something on the server's side is so."""
        waited_ms = 0
        while not condition():
            assert waited_ms < PATIENCE_MS, "waited in vain"
            self.page.wait_for_timeout(10)
            waited_ms += 10

    def close(self) -> None:
        self.context.close()
        assert self.problems == []

    def _note_console(self, text: str) -> None:
        if "Content Security Policy" in text:
            self.problems.append(text)

    def _note_request(self, url: str) -> None:
        origin = "/".join(self._address.split("/")[:3])
        if not url.startswith((f"{origin}/", "data:", "blob:", "about:")):
            self.problems.append(f"request to another place: {url}")


@pytest.fixture(scope="module", autouse=True)
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        yield


def served(app: Any) -> ServerThread:
    return ServerThread(app, host="127.0.0.1", port=0)


@pytest.fixture(scope="module")
def demo_address() -> Iterator[str]:
    token = PageToken("let-me-in")
    with LocalBackend.load(demo_model_path()) as demo, closing(served(create_app(demo, token))) as server:
        yield token.address(server.url)


@contextmanager
def opened(browser: Browser, address: str) -> Iterator[GradioPage]:
    page = GradioPage(browser, address)
    yield page
    page.close()


COST = re.compile(r"\d+ tokens written")


@pytest.mark.slow
def test_a_clip_and_an_example_are_answered_rightly(browser: Browser, demo_address: str) -> None:
    with opened(browser, demo_address) as page:
        page.ask("What happens in the video?", SAMPLES / "moves-right.mp4", SAMPLES / "moves-up.mp4")
        page.wait_answered(re.compile("."), COST)
        page.page.get_by_role("button", name="New chat").click()
        # Else the old chat's question, which goes, might be what is clicked.
        expect(page.answers).to_have_count(0)
        page.page.get_by_text("What happens in the video?").last.click()
        page.wait_answered("A red star moves to the right.", COST)


@pytest.fixture(scope="module")
def fake() -> Iterator[tuple[FakeBackend, str]]:
    backend = FakeBackend()
    with closing(served(create_app(backend, None))) as server:
        yield backend, server.url


def test_a_slider_counts_stop_ends_the_answer_and_the_chat_is_found_again(
    browser: Browser, fake: tuple[FakeBackend, str]
) -> None:
    backend, address = fake
    with opened(browser, address) as page:
        page.page.get_by_role("button", name="Settings").first.click()
        frames = page.page.get_by_label("number input for Most frames of a video")
        frames.fill("4")
        frames.blur()
        page.ask("slow", SAMPLES / "moves-right.mp4", SAMPLES / "two-shapes.jpg")
        expect(page.answers).to_contain_text("word word")
        page.stop_button.click()
        expect(page.box).to_be_editable()
        page.wait_until(lambda: backend.active == 0)
        plan = backend.calls[-1].messages[-1].media[0].plan
        assert plan is not None
        assert len(plan.frame_indices) == 4
        page.ask("echo on")
        answers = (re.compile("word"), "on", COST)
        page.wait_answered(*answers)
        assert "word" in backend.calls[-1].messages[1].text, "what was written of it is part of the chat"
        page.page.get_by_role("button", name=COST).last.click()
        expect(page.answers.last).to_contain_text("3 tokens read")
        page.visit()
        expect(page.answers).to_have_count(0)
        page.chats.get_by_text("slow").click()
        page.wait_answered(*answers)


@pytest.mark.slow
def test_thinking_folds_up_and_a_refusal_leaves_the_chat_usable(
    browser: Browser, fake: tuple[FakeBackend, str]
) -> None:
    with opened(browser, fake[1]) as page:
        page.ask("think so it is")
        page.wait_answered("Thinking", "so it is", COST)
        expect(page.page.get_by_text("Let me see.")).to_be_hidden()
        page.page.get_by_role("button", name="Thinking").click()
        expect(page.page.get_by_text("Let me see.")).to_be_visible()
        page.ask("refuse this time")
        expect(page.page.get_by_text("this time", exact=True)).to_be_visible()
        page.ask("echo on")
        expect(page.answers.nth(-2)).to_have_text("on")


@pytest.mark.slow
def test_closing_the_page_ends_the_answer(browser: Browser, fake: tuple[FakeBackend, str]) -> None:
    backend, address = fake
    with opened(browser, address) as page, opened(browser, address) as other:
        page.ask("slow")
        expect(page.answers).to_contain_text("word word")
        page.page.close()
        other.wait_until(lambda: backend.active == 0)


@pytest.mark.slow
def test_the_example_runs_by_itself(browser: Browser, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "preprocess")))
    program = [sys.executable, "-u", str(example_path("gradio_chat.py")), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": paths, "GRADIO_TEMP_DIR": str(tmp_path / "uploads")}
    with subprocess.Popen(program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "http://" in line)
            assert f"http://127.0.0.1:{port}" in line
            with opened(browser, f"http://127.0.0.1:{port}/") as page:
                page.ask("How many shapes are there?", SAMPLES / "five-shapes.png")
                page.wait_answered("There are five shapes.", COST)
        finally:
            process.terminate()
    assert [path.name for path in tmp_path.iterdir()] == ["uploads"]
