"""A model on a server, in the page: an answer and its end, what is said of the server, and changing to it and back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from qwen35mm.backends.local import LocalBackend
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel
from qwen35mm.model_library import BackendOptions, BackendSwitch
from qwen35mm.server.app import create_app
from qwen35mm.web import Server as Page
from qwen35mm.web import serve
from qwen35mm.web.serving.servers import Server
from tests.backends.remote.server import ModelServer, answers, closes, pieces, running_server, sends, stalls
from tests.server.conftest import serving
from tests.web.browser import chat_pages

pytestmark = pytest.mark.browser

OPTIONS = BackendOptions(device="cpu", settings=EngineSettings(context_length=1024))


def page_on(server: Server, stack: ExitStack, folder: Path) -> tuple[BackendSwitch, Page]:
    """The page as `qwen35mm chat --backend` serves it."""
    backend = server.backend()
    # Playwright's loop is this thread's.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, backend.connect()).result()
    switch = BackendSwitch.of(backend, OPTIONS)
    stack.callback(switch.close)
    page = serve(switch, port=0, server=server, data_dir=folder)
    stack.callback(page.close)
    return switch, page


@pytest.fixture(autouse=True)
def no_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("QWEN35MM_MODELS", raising=False)


@pytest.fixture
def scripted() -> Iterator[ModelServer]:
    with running_server() as server:
        server.models = ["Big-9B"]
        yield server


def test_a_server_that_goes_away_leaves_the_text_so_far_and_is_asked_again(
    browser: Browser, scripted: ModelServer, tmp_path: Path, samples: Path
) -> None:
    with ExitStack() as stack:
        _, served = page_on(Server(scripted.url), stack, tmp_path)
        opener = stack.enter_context(chat_pages(browser, served.address))
        page = opener()
        # No demo of ours answers, and what nobody counts is an estimate.
        expect(page.page.locator(".welcome.card")).to_have_count(0)
        expect(page.page.locator("button.model:not([hidden])")).to_have_text(re.compile(rf"Big-9B\s*{scripted.host}"))
        begun = pieces(["It ", "is ", "red."], reasoning=["Let me ", "look."])
        scripted.acts = [
            sends(begun[:5], then=closes),
            sends([], then=stalls),
            answers(["It ", "is ", "a ", "star."], reasoning=["Again."]),
            sends(begun[:4], then=stalls),
        ]
        page.attach(samples / "one-shape.png")
        page.box.fill("What is this?")
        expect(page.page.locator(".gauge .parts")).to_contain_text("These are estimates")
        page.box.press("Enter")
        assert page.wait_answered() == "It is"
        expect(page.answers.last).to_contain_text("What it had answered until then is kept")
        page.answers.last.get_by_text("Thought for").click()
        expect(page.answers.last).to_contain_text("Let me look.")
        parts = scripted.bodies[0]["messages"][-1]["content"]
        assert [part["type"] for part in parts] == ["image_url", "text"]

        # This one can't go on with an answer, so it is asked again.
        expect(page.tool(page.answers.last, "Continue")).to_have_count(0)
        page.tool(page.answers.last, "Try again").click()
        # The picture was read long before a slow server says anything.
        expect(page.work).to_contain_text("Waiting for the model")
        page.wait_until(lambda: len(scripted.bodies) == 2)
        page.stop_button.click()
        page.tool(page.answers.last, "Try again").click()
        page.wait_ending("It is a star.")
        expect(page.answers.last.locator(".count")).to_have_text("3/3")

        page.ask("And now?")
        # The last answer of two: until then the one before is the last, and its text says "It", too.
        expect(page.answers).to_have_count(2)
        expect(page.answers.last.locator(".answer")).to_contain_text("It")
        page.stop_button.click()
        page.wait_until(lambda: scripted.num_gone == 2)
        page.wait_answered(2)

        notes = page.open_settings().locator(".server-notes")
        expect(notes).to_contain_text(f"Runs on {scripted.host}")
        expect(notes).to_contain_text("It can't continue an answer that ended early.")
        expect(page.page.get_by_label("Longest thinking")).to_have_count(0)


@pytest.mark.slow  # serving/test_servers has the same without a browser
def test_a_server_is_added_with_its_key_and_forgotten(browser: Browser, scripted: ModelServer, tmp_path: Path) -> None:
    scripted.models = ["Big-9B", "Small-1B"]
    with ExitStack() as stack:
        _, served = page_on(Server(scripted.url, "Big-9B"), stack, tmp_path)
        opener = stack.enter_context(chat_pages(browser, served.address))
        page = opener()
        page.page.locator("button.model:not([hidden])").click()
        models = page.page.get_by_role("dialog", name="Models")
        on_servers = models.get_by_role("region", name="On servers")
        expect(on_servers.get_by_role("button", name="Big-9B")).to_contain_text("In use")
        models.get_by_role("button", name="Add a server").click()
        page.dialog.get_by_label("Address").fill(scripted.url)
        page.dialog.get_by_label("API key").fill("secret-key")
        add = page.dialog.get_by_role("button", name="Add", exact=True)
        add.click()
        expect(page.dialog.get_by_role("alert")).to_have_text("The server has several models. Choose one.")
        page.dialog.get_by_label("Model").select_option("Small-1B")
        with page.page.expect_navigation():
            add.click()
        expect(page.page.locator("button.model:not([hidden])")).to_contain_text("Small-1B")
        scripted.acts = [answers(["Small ", "talk."])]
        page.ask("Hi.")
        assert page.wait_answered() == "Small talk."
        assert scripted.headers[-1]["Authorization"] == "Bearer secret-key"
        assert scripted.bodies[-1]["model"] == "Small-1B"

        page.page.locator("button.model:not([hidden])").click()
        on_servers.get_by_role("button", name="Remove Small-1B").click()
        page.dialog.get_by_role("button", name="Delete").click()
        expect(page.dialog).to_have_count(0)
        page.wait_until(lambda: "secret-key" not in (tmp_path / "servers.json").read_text("utf-8"))
        page.page.locator("button.model:not([hidden])").click()
        here = models.get_by_role("region", name="On this machine")
        expect(here.get_by_role("button", name="Practice model")).to_be_visible()
        expect(on_servers.get_by_role("button", name="Small-1B")).to_have_count(0)


@pytest.mark.slow
def test_a_chat_goes_on_from_a_server_to_a_model_of_this_machine(
    browser: Browser, demo: LoadedModel, tmp_path: Path, samples: Path
) -> None:
    """The server is our own: it counts, sees videos, and goes on with answers."""
    with ExitStack() as stack:
        engine = LocalBackend(demo, settings=EngineSettings(slots=2))
        stack.callback(engine.close)
        address = stack.enter_context(serving(create_app(engine, num_places=2)))
        switch, served = page_on(Server(address), stack, tmp_path)
        opener = stack.enter_context(chat_pages(browser, served.address))
        page = opener()
        page.attach(samples / "moves-up.mp4")
        page.box.fill("What happens in the video?")
        expect(page.page.locator(".gauge dd").nth(1)).to_have_text(re.compile("^[1-9]"))
        expect(page.page.locator(".gauge .parts")).not_to_contain_text("estimates")
        page.box.press("Enter")
        assert "up" in page.wait_answered()
        # This one can go on with an answer that was cut off.
        limit = page.open_settings().get_by_label("Longest answer")
        limit.fill("3")
        page.ask("Describe the video.")
        cut = page.wait_answered(2)
        limit.fill("")
        page.tool(page.answers.last, "Continue").click()
        expect(page.tool(page.answers.last, "Continue")).to_have_count(0)
        whole = page.wait_answered(2)
        assert whole.startswith(cut)
        assert len(whole) > len(cut)
        page.box.fill("What is the color of the shape?")

        page.page.locator("button.model:not([hidden])").click()
        models = page.page.get_by_role("dialog", name="Models")
        models.get_by_role("region", name="On this machine").get_by_role("button", name="Practice model").click()
        with page.page.expect_navigation():
            page.dialog.get_by_role("button", name="Load").click()
        expect(page.page.locator("button.model:not([hidden])")).to_have_text("Practice model")
        assert switch.info.host is None
        expect(page.questions).to_have_count(2)
        expect(page.box).to_have_value("What is the color of the shape?")
        page.box.press("Enter")
        assert page.wait_answered(3)
        expect(page.open_cost()).to_be_visible()
