"""The page of `qwen35mm caption --preview`, in one load."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from qwen35mm.captioning.preview import Preview
from qwen35mm.http.run import ServerThread
from qwen35mm.http.sessions import PageToken
from qwen35mm.review.preview import Column, Shown
from qwen35mm.review.preview_page import create_preview_app
from tests.captioning.conftest import media_in_process
from tests.captioning.fake_model import Asked, FakeModel, picture
from tests.captioning.runs import job
from tests.web.browser import PATIENCE_MS
from tests.web.browser.access import check_access

__all__ = ["media_in_process"]


@pytest.fixture
def preview(tmp_path: Path, samples: Path) -> Iterator[Preview]:
    for number in range(3):
        picture(number).save(tmp_path / f"{number}.png")
    (tmp_path / "none.png").write_bytes(b"no picture")
    shutil.copy(samples / "moves-right.mp4", tmp_path)
    with closing(Preview(job(tmp_path, "Short?", "Long?"), 4)) as preview:
        preview.look()
        yield preview


@pytest.mark.usefixtures("media_in_process")
def test_a_person_compares_prompts_and_takes_a_command(browser: Browser, preview: Preview) -> None:
    seen = threading.Event()
    lengths = {"Short?": "A picture.", "Long?": " ".join(f"w{number}" for number in range(60))}

    def answer(asked: Asked) -> str:
        return lengths[asked.question]

    columns = [Column("short", "qwen35mm caption it --preset short"), Column("long", "qwen35mm caption it")]
    shown, token = Shown(preview, columns, "qwen35mm caption it --preset short,long"), PageToken()
    page_server = ServerThread(create_preview_app(shown, token=token), host="127.0.0.1", port=0)
    model = FakeModel(answer, waits=lambda: not seen.is_set())
    # The browser's own loop runs in this thread.
    filling = threading.Thread(target=lambda: asyncio.run(preview.fill(model.captioner())))
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = context.new_page()
        problems: list[str] = []
        context.on("weberror", lambda error: problems.append(str(error.error)))
        context.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(token.address(page_server.url))
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(4)
        expect(page.get_by_role("status")).to_have_text("Loading the model")
        filling.start()
        expect(page.get_by_role("status")).to_have_text("0 of 4")
        # What comes is shown without a reload.
        seen.set()
        expect(page.get_by_role("status")).to_have_text("4 of 4")
        expect(page.locator("tbody td").nth(1)).to_contain_text("60 words")
        expect(page.locator("thead th").first).to_contain_text("Whole run: ")
        expect(page.locator("thead th").first).to_contain_text("for videos")
        expect(page.locator("header")).to_contain_text("A run of 3 images, 1 video, estimated from 3 images, 1 video")
        page.wait_for_function("() => document.querySelectorAll('.shot img').length === 4")
        page.wait_for_function("() => [...document.querySelectorAll('.shot img')].some((each) => each.naturalWidth)")
        page.get_by_text("1 file can't be read").click()
        expect(page.locator("details")).to_contain_text("none.png: ")
        check_access(page)

        page.get_by_role("button", name="Use this prompt").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("qwen35mm caption it --preset short")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Use all prompts").click()
        expect(page.get_by_role("dialog")).to_contain_text("--preset short,long")
        page.keyboard.press("Escape")

        # In a narrow window only the table is wider.
        page.set_viewport_size({"width": 320, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        assert problems == []
    finally:
        seen.set()
        if filling.ident is not None:
            filling.join()
        context.close()
        page_server.close()
