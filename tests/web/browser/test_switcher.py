"""Another model, from the name of the one that answers or from the practice model's offer, with the real engine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from PIL import Image
from playwright.sync_api import Browser, Locator, Route, expect

from qwen35mm.assets import demo_model_path
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel
from qwen35mm.model_library import BackendOptions, BackendSwitch
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.model_library.conftest import hub, hub_cache
from tests.model_library.fake_hub import HUB_ID, FakeHub
from tests.server.instant import TEXT
from tests.server.test_several import Models
from tests.web.browser import ChatPage, chat_pages
from tests.web.browser.access import check_access

__all__ = ["hub", "hub_cache"]

pytestmark = pytest.mark.browser

GIB = 1 << 30


@pytest.fixture
def switch_server(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[BackendSwitch, Server]]:
    """The demo, a copy of it under another name, and a machine with 3 GiB to spare."""
    shutil.copytree(demo_model_path(), tmp_path / "models" / "my-finetune")
    monkeypatch.setenv("QWEN35MM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("qwen35mm.web.serving.models.lacking_disk_bytes", lambda num_bytes: 0)
    options = BackendOptions(device="cpu", settings=EngineSettings(context_length=512))
    switch = BackendSwitch.of(options.load(demo_model_path()), options, available=lambda _: 3 * GIB)
    server = serve(switch, port=0)
    yield switch, server
    server.close()
    switch.close()


# Every answer of the program comes late, and what has moved by then is counted unless the person moved it.
LATE = """() => {
    const plain = window.fetch;
    window.fetch = async (...asked) => {
        await new Promise((go) => setTimeout(go, 700));
        return plain(...asked);
    };
    window.moved = [];
    const note = ({ hadRecentInput, sources }) =>
        // What was replaced is in no place any more.
        hadRecentInput || !sources.length || window.moved.push(sources.map(({ node }) => node?.outerHTML));
    const observer = new PerformanceObserver((list) => list.getEntries().forEach(note));
    observer.observe({ type: "layout-shift", buffered: true });
}"""


def test_a_newcomer_is_led_to_a_real_model_and_nothing_jumps(
    browser: Browser, switch_server: tuple[BackendSwitch, Server], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "models" / "my-finetune")
    with chat_pages(browser, switch_server[1].address) as opener:
        page: ChatPage = opener()
        page.context.add_init_script(f"({LATE})()")
        page.visit()
        offer = {"name": "Get a real model · 4.3 GiB · fits this machine with int4 weights", "exact": True}
        page.page.locator(".welcome").get_by_role("button", **offer).click()
        expect(page.dialog).to_contain_text("Download Qwen/Qwen3.5-2B from Hugging Face?")
        expect(page.dialog.get_by_role("button", name="Download")).to_be_enabled()
        check_access(page.page)
        page.dialog.get_by_role("button", name="Cancel").click()
        chosen = page.open_settings().locator(".models option")
        expect(chosen.first).to_have_text("Practice model (12 MiB)")
        page.page.get_by_role("button", name="Close settings").click()
        photo = tmp_path / "photo.png"
        Image.effect_noise((320, 240), 80).save(photo)
        page.attach(photo)
        expect(page.thumbnails.locator(".label")).to_contain_text("tokens")
        assert page.page.evaluate("() => window.moved") == []

        # Opened twice, with the first list on its way, it stays.
        models = page.page.get_by_role("dialog", name="Models")
        held: list[Route] = []
        page.page.route("**/api/models", lambda route: held.append(route), times=1)
        name = page.page.get_by_role("button", name="Practice model", exact=True)
        name.click()
        expect(models).to_contain_text("Looking for models")
        page.page.keyboard.press("Escape")
        name.click()
        listed = models.get_by_role("region", name="On this machine")
        expect(listed).to_be_visible()
        with page.page.expect_response("**/api/models"):
            held[0].continue_()
        page.page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        expect(listed).to_be_visible()
        check_access(page.page)
        page.page.keyboard.press("Escape")

        page.ask("Which animal do you see?")
        assert page.wait_answered().startswith("I can't tell.")
        page.answers.last.get_by_role("button", **offer).click()
        expect(page.dialog).to_contain_text("Download Qwen/Qwen3.5-2B from Hugging Face?")


@pytest.mark.slow
def test_another_model_keeps_chat_and_draft(
    browser: Browser, switch_server: tuple[BackendSwitch, Server], samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, server = switch_server
    with chat_pages(browser, server.address) as opener:
        page: ChatPage = opener()
        page.ask("What is the capital of France?")
        page.wait_answered()
        page.attach(samples / "three-shapes.png")
        page.box.fill("And here?")

        name = page.page.get_by_role("button", name="Practice model", exact=True)
        models = page.page.get_by_role("dialog", name="Models")
        name.press("Enter")
        expect(models.get_by_role("region", name="On this machine").get_by_role("button")).to_contain_text(
            ["In use", "my-finetune"]
        )
        expect(models.get_by_role("region", name="Available to download").get_by_role("button")).to_have_text(
            [
                re.compile(r"Qwen3\.5-0\.8B\s*fits this machine\s*1\.6 GiB"),
                re.compile(r"Qwen3\.5-2B\s*fits this machine with int4 weights\s*4\.3 GiB"),
                *[re.compile("needs more memory than this machine has")] * 4,
            ]
        )
        page.page.keyboard.press("Escape")
        expect(models).to_be_hidden()
        expect(name).to_be_focused()

        # A download begins only when it is meant, by a person who has seen what it takes.
        name.click()
        models.get_by_role("button", name="Qwen/Qwen3.5-2B").click()
        expect(page.dialog).to_contain_text("It is downloaded once and kept.")
        expect(page.dialog.get_by_role("status")).to_contain_text("4.3 GiB to download.")
        download = page.dialog.get_by_role("button", name="Download")
        context = page.dialog.get_by_label("Context")
        expect(page.dialog.get_by_role("status")).to_contain_text("GiB of memory; 3.0 GiB is available")
        expect(context).to_be_hidden()
        page.dialog.get_by_text("Advanced").click()
        expect(page.dialog.get_by_label("Weights")).to_have_value("auto")
        expect(page.dialog.get_by_role("listitem")).to_contain_text(["Weights1.8 GiB", "KV cache384 MiB", "States"])
        expect(download).to_be_enabled()
        page.dialog.get_by_label("Weights").select_option("bf16")
        expect(page.dialog.get_by_role("status")).to_contain_text("Doesn't fit: needs 5.2 GiB")
        expect(download).to_be_disabled()
        page.dialog.get_by_role("button", name="Use these settings").click()
        expect(page.dialog.get_by_label("Weights")).to_have_value("int4")
        expect(download).to_be_enabled()
        context.fill("100000")
        expect(page.dialog.get_by_role("status")).to_contain_text("This fits")
        expect(download).to_be_disabled()
        page.dialog.get_by_role("button", name="Cancel").click()

        # The answer knows nothing of the world, and says who may.
        page.answers.last.get_by_role("button", name="Use my-finetune").click()
        # Nobody is held in its dialog by a connection that is lost meanwhile.
        asked = "**/api/change_state"
        page.page.route(asked, lambda route: route.abort("aborted"))
        with page.page.expect_event("requestfailed"):
            page.dialog.get_by_role("button", name="Load").click()
        expect(page.dialog).to_have_count(0)
        with page.page.expect_navigation():
            page.page.unroute(asked)
        assert switch.loaded.name == "my-finetune"
        expect(page.page.get_by_role("button", name="my-finetune", exact=True)).to_be_visible()
        expect(page.questions).to_have_count(1)
        expect(page.answers.get_by_role("button", name="Use my-finetune")).to_have_count(0)
        expect(page.box).to_have_value("And here?")
        expect(page.thumbnails.locator(".name")).to_have_text(["three-shapes.png"])
        page.box.press("Enter")
        page.wait_answered(2)

        # An answer in progress is stopped for other settings, if that is meant.
        monkeypatch.setattr(switch.answering, "stream", FakeBackend().stream)
        page.ask("slow")
        expect(page.answers.last.locator(".answer")).to_contain_text("word word")
        page.open_settings().get_by_role("button", name="Context and memory").click()
        page.dialog.get_by_label("Context length in tokens").fill("1024")
        page.dialog.get_by_role("button", name="Apply").click()
        with page.page.expect_navigation():
            page.dialog.get_by_role("button", name="Stop and change").click()
        expect(page.questions).to_have_count(3)
        expect(page.answers.last.locator(".problem")).to_have_text("Stopped")


def test_a_download_goes_on_behind_the_chat(
    browser: Browser, switch_server: tuple[BackendSwitch, Server], hub: FakeHub
) -> None:
    switch, server = switch_server
    hub.files["model.safetensors"] = (demo_model_path() / "model.safetensors").read_bytes()
    with chat_pages(browser, server.address) as opener:
        page: ChatPage = opener()

        def ask_for_it() -> Locator:
            page.page.get_by_role("button", name="Practice model", exact=True).click()
            page.page.get_by_role("button", name="Another model from Hugging Face").click()
            page.dialog.get_by_label("Hugging Face id").fill(HUB_ID)
            page.dialog.get_by_role("button", name="Continue").click()
            return page.dialog.get_by_role("status")

        hub.status = (503, "")
        expect(ask_for_it()).to_have_text("Hugging Face has a problem. Try again later: a download resumes.")
        page.dialog.get_by_role("button", name="Cancel").click()
        page.forgive()
        hub.status = None
        hub.gate.clear()
        expect(ask_for_it()).to_contain_text("MiB to download.")
        page.dialog.get_by_role("button", name="Download").click()
        expect(page.dialog.get_by_role("heading")).to_have_text(f"Downloading {HUB_ID}")
        expect(page.dialog).to_contain_text(re.compile(r"\d MiB of \d+ MiB"))
        page.dialog.get_by_role("button", name="Keep chatting").click()
        expect(page.dialog).to_have_count(0)
        shown = page.page.get_by_role("button", name="Show the download")
        expect(shown).to_contain_text("%")
        page.ask("What is this?")
        page.wait_answered()

        # A lost connection is none of the download's, and a page that is loaded again shows it, too.
        with page.page.expect_event("requestfailed"):
            page.page.route("**/api/change_state", lambda route: route.abort("aborted"), times=1)
        with page.page.expect_response("**/api/change_state"):
            pass
        expect(shown).to_contain_text("%")
        page.page.reload()
        shown.click()
        expect(page.dialog).to_contain_text("MiB of ")
        page.page.keyboard.press("Escape")
        # The page would be loaded again for it, which ends a temporary chat.
        page.page.get_by_role("button", name="Temporary chat").click()
        hub.gate.set()
        expect(page.toasts).to_contain_text("The model is ready.")
        assert switch.loaded.name == HUB_ID
        with page.page.expect_navigation():
            page.toasts.get_by_role("button", name="Reload page").click()
        expect(page.page.get_by_role("button", name=HUB_ID, exact=True)).to_be_visible()
        expect(shown).to_be_hidden()
        page.titles.click()
        expect(page.questions).to_have_count(1)


@pytest.fixture
def two_models(browser: Browser, demo: LoadedModel) -> Iterator[tuple[Models, str]]:
    models = Models(demo)
    models.shelf.put("demo", models.shelf.offers[0].load(print))
    backend = BackendSwitch(models.shelf, "demo")
    server = serve(backend, port=0)
    yield models, server.address
    server.close()


@pytest.mark.slow
def test_a_wait_for_another_model_is_left_and_nothing_ends(browser: Browser, two_models: tuple[Models, str]) -> None:
    models, address = two_models
    models.shelf._memory_bytes = 1
    with chat_pages(browser, address) as opener:
        page: ChatPage = opener()
        page.page.get_by_role("button", name="Temporary chat").click()
        page.ask("Hello")
        page.wait_ending(TEXT)
        # A program's answer, which doesn't end.
        with start_blocking_portal() as portal:
            portal.call(models.shelf.take, "demo")
        page.page.get_by_role("button", name="demo", exact=True).click()
        page.page.get_by_role("dialog", name="Models").get_by_role("button", name="bee").click()
        expect(page.dialog).to_contain_text("This temporary chat ends.")
        page.dialog.get_by_role("button", name="Continue").click()
        expect(page.dialog).to_contain_text("Waiting for the answer in progress")
        with page.page.expect_response("**/api/models"):
            page.dialog.get_by_role("button", name="Cancel").click()
        expect(page.dialog).to_have_count(0)
        expect(page.questions).to_have_count(1)


@pytest.mark.slow
def test_the_models_of_the_command_line_are_chosen_without_questions(
    browser: Browser, two_models: tuple[Models, str]
) -> None:
    models, address = two_models
    with chat_pages(browser, address) as opener:
        page: ChatPage = opener()
        page.ask("Hello")
        page.wait_ending(TEXT)
        listed = page.page.get_by_role("dialog", name="Models")
        page.page.get_by_role("button", name="demo", exact=True).click()
        expect(listed.get_by_role("button")).to_contain_text(["In use", "bee"])
        expect(listed).to_contain_text("Add a server")
        models.may_load.clear()
        listed.get_by_role("button", name="bee").click()
        expect(page.dialog).to_contain_text("Loading the model")
        models.may_load.set()
        page.page.get_by_role("button", name="bee", exact=True).click()
        expect(listed.get_by_role("button")).to_contain_text(["Ready", "In use"])
        page.page.keyboard.press("Escape")
        page.box.fill("And now?")
        page.box.press("Enter")
        expect(page.answers).to_have_count(2)
        page.wait_ending(TEXT)

        # Compared with an answer of the first model, which is there at once.
        page.tool(page.answers.last, "Compare").click()
        form = page.dialog.last
        form.get_by_label("Model").first.select_option("demo")
        expect(form).to_contain_text("The model is loaded first")
        form.get_by_role("button", name="Answer", exact=True).click()
        expect(page.dialog.locator(".side header strong")).to_have_text(["bee", "demo"])

        # A chat that is opened goes on with its model, but where another one was chosen in it.
        page.dialog.get_by_role("button", name="Close comparison").click()
        page.page.reload()
        chosen = page.page.locator("button.model").last
        expect(page.answers).to_have_count(2)
        expect(chosen).to_contain_text("demo")
        page.page.get_by_role("button", name="New chat").click()
        page.ask("And here?")
        page.wait_ending(TEXT)
        page.page.locator(".chat a").last.click()
        expect(chosen).to_contain_text("bee")
        expect(page.answers).to_have_count(2)
