"""The page of `qwen35mm review`, by keys and by buttons, in one load."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from qwen35mm.captioning.records import Caption
from qwen35mm.review.app import create_app
from qwen35mm.review.asking import Asker
from qwen35mm.review.folder import Folder
from qwen35mm.server.page_token import PageToken
from tests.captioning.fake_model import picture
from tests.web.browser import PATIENCE_MS, box_of

NUM_PICTURES = 300


class FakeAsker:
    async def ask(self, name: str, path: Path, question: Any, text: str) -> Caption:
        text = f"{question.text} {text}"
        return Caption(text=text, kind="image", width=1, height=1, prompt="", model="fake", flags=("truncated",))

    async def close(self) -> None:
        pass


@pytest.fixture
def media(tmp_path: Path, samples: Path) -> Path:
    picture(0).save(tmp_path / "000.png")
    for number in range(1, NUM_PICTURES):
        (tmp_path / f"{number:03}.png").hardlink_to(tmp_path / "000.png")
    for number in range(3):
        (tmp_path / f"{number:03}.txt").write_text(f"Caption {number}.\n")
    shutil.copy(samples / "moves-right.mp4", tmp_path / "zzz.mp4")
    return tmp_path


@pytest.fixture
def page(browser: Browser, media: Path) -> Iterator[Page]:
    token = PageToken()
    with closing(Folder(media, suffix=".txt")) as folder:
        app = create_app(folder, cast("Asker", FakeAsker()), token=token)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        context = browser.new_context(viewport={"width": 1200, "height": 800}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        try:
            page = context.new_page()
            problems: list[str] = []
            context.on("weberror", lambda error: problems.append(str(error.error)))
            context.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.goto(token.address(url))
            yield page
            # A browser counts a refusal of ours as an error.
            assert [problem for problem in problems if "status of 409" not in problem] == []
        finally:
            context.close()
            server.should_exit = True
            with suppress(KeyboardInterrupt):
                thread.join()


def test_a_person_goes_through_captions_by_keys(page: Page, media: Path) -> None:
    first, second = media / "000.txt", media / "001.txt"
    name, caption = page.locator(".words h2"), page.locator(".words > .caption")
    count, area = page.locator(".count"), page.get_by_role("textbox", name="Caption")
    expect(caption).to_have_text("Caption 0.")
    # Only what can be seen is there.
    assert 0 < page.locator(".rows li").count() < 40

    # Accepting goes on, and is taken back.
    page.keyboard.press("a")
    expect(name).to_have_text("001.png")
    expect(count).to_have_text(f"1 of {NUM_PICTURES + 1} accepted")
    page.keyboard.press("u")
    expect(name).to_have_text("000.png")
    expect(count).to_have_text(f"0 of {NUM_PICTURES + 1} accepted")
    page.keyboard.press("Enter")

    # What is written is on the disk before anybody says so; Escape takes it back.
    page.keyboard.press("e")
    area.fill("Better 1.")
    page.wait_for_function("() => document.querySelector('.row[aria-current=true]').textContent.includes('Better 1.')")
    assert second.read_text() == "Better 1.\n"
    page.keyboard.press("Escape")
    expect(caption).to_have_text("Caption 1.")
    assert second.read_text() == "Caption 1.\n"
    page.keyboard.press("e")
    area.fill("Best 1.")
    page.keyboard.press("Enter")
    expect(caption).to_have_text("Best 1.")
    assert second.read_text() == "Best 1.\n"

    # Somebody else's change is shown, and not replaced.
    page.keyboard.press("e")
    second.write_text("Theirs.\n")
    area.fill("Mine.")
    page.keyboard.press("Enter")
    changed = page.get_by_role("alert")
    expect(changed).to_contain_text("Theirs.")
    assert second.read_text() == "Theirs.\n"
    changed.get_by_role("button", name="Keep mine").click()
    expect(caption).to_have_text("Mine.")
    assert second.read_text() == "Mine.\n"

    # The prompt is kept for the next one.
    page.keyboard.press("r")
    page.get_by_role("combobox", name="Prompt").select_option(label="Own words")
    page.get_by_role("textbox", name="Prompt").fill("Improve")
    page.keyboard.press("Enter")
    expect(page.locator(".proposal")).to_contain_text("Improve Mine.")
    assert second.read_text() == "Mine.\n"
    page.keyboard.press("t")
    expect(caption).to_have_text("Improve Mine.")
    assert second.read_text() == "Improve Mine.\n"
    page.keyboard.press("k")
    page.keyboard.press("r")
    expect(page.get_by_role("textbox", name="Prompt")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Take it").click()
    expect(caption).to_have_text("Improve Caption 0.")
    assert first.read_text() == "Improve Caption 0.\n"

    # A search, and its end; a clip at the end of the list.
    page.keyboard.press("/")
    page.keyboard.type("improve mine")
    expect(page.locator(".rows li")).to_have_count(1)
    expect(name).to_have_text("001.png")
    page.get_by_role("searchbox").fill("")
    expect(page.locator(".place")).to_have_text(f"2 of {NUM_PICTURES + 1}")
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    expect(name).to_have_text("zzz.mp4")
    page.wait_for_function("() => document.querySelector('.medium video').videoWidth > 0")

    # What was being written when the page is left, is saved.
    page.keyboard.press("Home")
    page.keyboard.press("e")
    area.fill("Left so.")
    page.reload()
    expect(caption).to_have_text("Left so.")
    assert first.read_text() == "Left so.\n"

    # In a narrow window nothing lies beyond its side, and all buttons can be seen.
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    for button in page.locator(".buttons button:visible").all():
        box = box_of(button)
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
        assert box["y"] + box["height"] <= 640
