"""The page of `qwen35mm review`, by keys and by buttons, in one load."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from qwen35mm.captioning.job import Job
from qwen35mm.captioning.records import Caption
from qwen35mm.http.run import ServerThread
from qwen35mm.http.sessions import PageToken
from qwen35mm.review.app import create_app
from qwen35mm.review.asking import Asker
from qwen35mm.review.collection import Collection
from qwen35mm.review.folder import Folder
from qwen35mm.review.records import RecordsFile
from qwen35mm.review.training import Training
from tests.captioning.conftest import media_in_process
from tests.captioning.fake_model import FakeModel, picture
from tests.captioning.runs import job, listed, run
from tests.review.test_training import EVENTS, WORDS
from tests.web.browser import PATIENCE_MS, box_of
from tests.web.browser.access import check_access

__all__ = ["media_in_process"]

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
    with shown(browser, Folder(media, suffix=".txt")) as page:
        yield page


@contextmanager
def shown(browser: Browser, reviewed: Collection[Any], program: str = "") -> Iterator[Page]:
    """program: what stands for `qwen35mm tune`."""
    token, training = PageToken(), Training(WORDS, (sys.executable, "-I", "-S", "-c", program))
    with closing(reviewed):
        app = create_app(reviewed, cast("Asker", FakeAsker()), training=training, token=token)
        thread = ServerThread(app, host="127.0.0.1", port=0)
        context = browser.new_context(viewport={"width": 1200, "height": 800}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        try:
            page = context.new_page()
            problems: list[str] = []
            context.on("weberror", lambda error: problems.append(str(error.error)))
            context.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.goto(token.address(thread.url))
            yield page
            # A browser counts a refusal of ours as an error.
            assert [problem for problem in problems if "status of 4" not in problem] == []
        finally:
            context.close()
            thread.close()


def wait_until_saved(page: Page, text: str) -> None:
    """Waits until the program has told the list of a text; the caption itself shows it at once."""
    script = "text => document.querySelector('.row[aria-current=true]').textContent.includes(text)"
    page.wait_for_function(script, arg=text)


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

    # What is written is on the disk before anybody says so; Escape takes it back, and nothing of another tab's.
    page.keyboard.press("e")
    area.fill("Better 1.")
    wait_until_saved(page, "Better 1.")
    assert second.read_text() == "Better 1.\n"
    other = page.context.new_page()
    other.goto(page.url)
    for key, named in (("j", "000.png"), ("j", "001.png"), ("a", "002.png")):
        expect(other.locator(".words h2")).to_have_text(named)
        other.keyboard.press(key)
    expect(other.locator(".count")).to_have_text(f"2 of {NUM_PICTURES + 1} accepted")
    other.close()
    page.keyboard.press("Escape")
    wait_until_saved(page, "Caption 1.")
    expect(caption).to_have_text("Caption 1.")
    assert second.read_text() == "Caption 1.\n"
    expect(count).to_have_text(f"2 of {NUM_PICTURES + 1} accepted")
    page.keyboard.press("e")
    area.fill("Best 1.")
    page.keyboard.press("Enter")
    wait_until_saved(page, "Best 1.")
    expect(caption).to_have_text("Best 1.")
    assert second.read_text() == "Best 1.\n"

    # While a caption is being saved, keys belong to the page; one that can't be saved is open again.
    held: list[Route] = []
    page.route("**/api/save", lambda route: held.append(route))
    page.keyboard.press("e")
    area.fill("Best of 1.")
    page.keyboard.press("Enter")
    page.keyboard.type("jkj")
    expect(name).to_have_text("002.png")
    expect(area).to_be_hidden()
    page.keyboard.type("k")
    expect(caption).to_have_text("Best of 1.")
    wait_until_saved(page, "Best 1.")
    held.pop().continue_()
    wait_until_saved(page, "Best of")
    assert second.read_text() == "Best of 1.\n"
    page.keyboard.press("e")
    area.fill("Lost?")
    page.keyboard.press("Enter")
    page.keyboard.press("j")
    expect(name).to_have_text("002.png")
    held.pop().fulfill(status=400, json={"error": {"message": "The disk is full."}})
    expect(name).to_have_text("001.png")
    expect(area).to_have_value("Lost?")
    expect(area).to_be_focused()
    page.unroute("**/api/save")
    page.keyboard.press("Escape")
    expect(caption).to_have_text("Best of 1.")

    # Somebody else's change is shown, and not replaced.
    page.keyboard.press("e")
    second.write_text("Theirs.\n")
    area.fill("Mine.")
    page.keyboard.press("Enter")
    changed = page.get_by_role("alert")
    expect(changed).to_contain_text("Theirs.")
    assert second.read_text() == "Theirs.\n"
    changed.get_by_role("button", name="Keep mine").click()
    wait_until_saved(page, "Mine.")
    expect(caption).to_have_text("Mine.")
    # The list changes once it is written.
    page.wait_for_function("() => document.querySelector('.row[aria-current=true]').textContent.includes('Mine.')")
    assert second.read_text() == "Mine.\n"

    # The prompt is kept for the next one.
    page.keyboard.press("r")
    page.get_by_role("combobox", name="Prompt").select_option(label="Custom prompt")
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
    page.get_by_role("button", name="Use it").click()
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

    page.keyboard.press("Escape")
    check_access(page)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    check_access(page)
    page.keyboard.press("Escape")

    # Many at once: a row, all up to another, and one by its box; the change is shown, made, and taken back as one.
    rows = page.locator(".rows li")
    for number in range(1, 6):
        (media / f"{number:03}.txt").write_text(f"ohwx, tag {number}\n")
    rows.nth(1).get_by_role("button").click()
    rows.nth(4).get_by_role("button").click(modifiers=["Shift"])
    rows.nth(5).get_by_role("checkbox").click()
    rows.nth(2).get_by_role("button").click(modifiers=["Control"])
    chosen = page.get_by_role("region", name="Selection")
    expect(chosen.locator("strong")).to_have_text("4 selected")
    chosen.get_by_role("button", name="Edit selected").click()
    chosen.get_by_role("textbox", name="Find").fill("tag (\\d)")
    chosen.get_by_role("checkbox", name="Regular expression").check()
    chosen.get_by_role("textbox", name="Replace with").fill("number \\1")
    expect(chosen.locator(".preview ins")).to_have_text(["number"] * 4)
    check_access(page)
    assert second.read_text() == "ohwx, tag 1\n"
    chosen.get_by_role("button", name="Change 4 captions").click()
    expect(caption).to_have_text("ohwx, number 1")
    written = [(media / f"{number:03}.txt").read_text() for number in range(1, 6)]
    assert written == [f"ohwx, {'tag' if number == 2 else 'number'} {number}\n" for number in range(1, 6)]
    page.keyboard.press("u")
    expect(caption).to_have_text("ohwx, tag 1")
    assert second.read_text() == "ohwx, tag 1\n"
    chosen.get_by_role("button", name="Edit selected").click()
    chosen.get_by_role("combobox", name="Action").select_option(label="Remove tags")
    chosen.get_by_role("textbox", name="Tags").fill("ohwx")
    chosen.get_by_role("textbox", name="Tags").press("Enter")
    expect(chosen.locator(".preview del")).to_have_count(4)
    chosen.get_by_role("textbox", name="Tags").press("Enter")
    expect(caption).to_have_text("tag 1")
    page.keyboard.press("Escape")
    expect(chosen).to_be_hidden()

    # What was undone isn't offered again, and no notice is in the way of a button.
    expect(page.locator(".toast").get_by_role("button", name="Undo")).to_have_count(1)

    # A tag of the statistics leads to the captions that have it.
    page.get_by_role("button", name="Statistics").click()
    shown_counts = page.get_by_role("dialog", name="Statistics")
    expect(shown_counts.locator(".bar").first).to_be_visible()
    in_words = shown_counts.locator(".bar").first.element_handle()
    shown_counts.get_by_role("combobox", name="Length in").select_option("kohya-sdxl")
    # The walk below would lose what is drawn anew on the way.
    page.wait_for_function("(bar) => !bar.isConnected", arg=in_words)
    check_access(page)
    shown_counts.get_by_role("button", name="ohwx").click()
    expect(page.locator(".rows li")).to_have_count(1)
    page.get_by_role("searchbox").fill("")
    page.get_by_role("searchbox").blur()

    # All that a search found are accepted, and the search stays, also when the page is loaded again.
    page.get_by_role("combobox", name="Show").select_option("open")
    page.get_by_role("searchbox").fill("tag")
    expect(rows).to_have_count(5)
    page.get_by_role("searchbox").blur()
    page.keyboard.press("Control+a")
    expect(chosen.locator("strong")).to_have_text("5 selected")
    page.keyboard.press("x")
    chosen.get_by_role("button", name="Accept selected").click()
    expect(rows).to_have_count(1)
    expect(count).to_have_text(f"4 of {NUM_PICTURES + 1} accepted")
    page.keyboard.press("u")
    expect(rows).to_have_count(5)
    page.reload()
    expect(rows).to_have_count(5)
    expect(page.get_by_role("combobox", name="Show")).to_have_value("open")
    page.get_by_role("combobox", name="Show").select_option("all")
    page.get_by_role("searchbox").fill("")
    expect(page.locator(".place")).to_contain_text(f"of {NUM_PICTURES + 1}")
    page.get_by_role("searchbox").blur()
    page.keyboard.press("Shift+ArrowDown")
    expect(chosen.locator("strong")).to_have_text("2 selected")

    # In a narrow window nothing lies beyond its side, and all buttons can be seen.
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    for button in page.locator(".buttons button:visible").all():
        box = box_of(button)
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
        assert box["y"] + box["height"] <= 640


def caption(job: Job, model: FakeModel) -> None:
    """A whole run, in a thread: the browser's own loop runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(run(job, model))).result()


@pytest.mark.slow
@pytest.mark.usefixtures("media_in_process")
def test_a_person_goes_through_a_file_of_records(browser: Browser, tmp_path: Path) -> None:
    media, path = tmp_path / "media", tmp_path / "all.jsonl"
    media.mkdir()
    for number in range(3):
        picture(number).save(media / f"{number}.png")
    one = job(media, outputs=[f"jsonl:{path}"])
    caption(one, FakeModel(answer=lambda _: "A picture.", finish_reason="length"))

    def last(name: str) -> str:
        """What a reader of the file knows of an item: of two lines the later one holds."""
        return [line["caption"] for line in listed(path) if line["name"] == name][-1]

    with shown(browser, RecordsFile(path)) as page:
        name, shown_text = page.locator(".words h2"), page.locator(".words > .caption")
        area, count = page.get_by_role("textbox", name="Caption"), page.locator(".count")
        expect(page).to_have_title("all.jsonl · qwen35mm")
        page.wait_for_function("() => document.querySelector('.medium img').naturalWidth === 48")
        expect(page.locator(".facts")).to_contain_text("truncated")

        # What is written is in the file before anybody says so; Escape takes it back, and nobody has edited it.
        page.keyboard.press("e")
        area.fill("Better 0.")
        wait_until_saved(page, "Better")
        assert last("0.png") == "Better 0."
        page.keyboard.press("Escape")
        expect(shown_text).to_have_text("A picture.")
        expect(page.locator(".facts")).not_to_contain_text("edited")
        assert last("0.png") == "A picture."
        page.keyboard.press("e")
        area.fill("Best 0.")
        page.keyboard.press("Control+Enter")
        expect(name).to_have_text("1.png")
        expect(count).to_have_text("1 of 3 accepted")
        assert last("0.png") == "Best 0."

        # Asked again, and taken.
        page.keyboard.press("r")
        page.get_by_role("combobox", name="Prompt").select_option(label="Custom prompt")
        page.get_by_role("textbox", name="Prompt").fill("Improve")
        page.keyboard.press("Enter")
        expect(page.locator(".proposal")).to_contain_text("Improve A picture.")
        assert last("1.png") == "A picture."
        page.keyboard.press("t")
        expect(shown_text).to_have_text("Improve A picture.")
        assert last("1.png") == "Improve A picture."

        # By flag, by what isn't accepted, and all.
        page.reload()
        page.get_by_role("combobox", name="Flag").select_option("edited")
        expect(page.locator(".rows li")).to_have_count(2)
        page.get_by_role("combobox", name="Flag").select_option("truncated")
        expect(page.locator(".rows li")).to_have_count(1)
        expect(name).to_have_text("2.png")
        page.get_by_role("combobox", name="Flag").select_option("")
        page.keyboard.press("Escape")
        page.get_by_role("searchbox").fill("improve")
        expect(page.locator(".rows li")).to_have_count(1)
    texts = {line["name"]: (line["caption"], line["flags"]) for line in listed(path)}
    edited = {"0.png": ("Best 0.", ["edited"]), "1.png": ("Improve A picture.", ["edited"])}
    assert texts == edited | {"2.png": ("A picture.", ["truncated"])}
    assert len(listed(path)) == 3
    model = FakeModel()
    caption(one, model)
    assert (model.asked, {line["name"]: (line["caption"], line["flags"]) for line in listed(path)}) == ([], texts)


def test_a_training_is_started_watched_and_stopped(browser: Browser, media: Path) -> None:
    """The program waits for a file before it ends, and fails without --restart at first."""
    ready, lines = media / "ready", [json.dumps(each) for each in EVENTS]
    program = f"""
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(130)), daemon=True).start()
def say(lines): print(*lines, sep=chr(10), flush=True)
assert "--accepted" in sys.argv
if "--restart" not in sys.argv: sys.exit("Error: there is a finished adapter.")
say({lines[:4]!r})
import time
while not os.path.exists({str(ready)!r}): time.sleep(0.01)
say({lines[4:]!r})
"""
    with shown(browser, Folder(media, suffix=".txt"), program) as page:
        page.get_by_role("button", name="Train on these captions").click()
        dialog = page.get_by_role("dialog", name="Train on these captions")
        chosen = dialog.get_by_role("checkbox", name="Only accepted captions")
        expect(chosen).not_to_be_checked()
        chosen.check()
        expect(dialog).to_contain_text("qwen35mm tune photos --out photos-adapter --accepted")
        check_access(page)
        dialog.get_by_role("button", name="Start training").click()
        expect(dialog.get_by_role("status")).to_have_text("The training failed.")
        expect(dialog).to_contain_text("Error: there is a finished adapter.")
        anew = page.get_by_role("dialog", name="Train anew")
        dialog.get_by_role("button", name="Train anew").click()
        anew.get_by_role("button", name="Train anew").click()
        expect(dialog.get_by_role("status")).to_have_text("Step 4 of 4, 0 s left")
        expect(dialog.get_by_role("progressbar")).to_have_attribute("value", "1")
        expect(dialog).to_contain_text("Step 0: held-out loss 2.500")
        dialog.get_by_role("button", name="Stop").click()
        expect(dialog.get_by_role("status")).to_contain_text("Stopped.")
        ready.touch()
        # After a reload it goes on with the captions that it began with.
        page.reload()
        page.get_by_role("button", name="Train on these captions").click()
        expect(chosen).to_be_checked()
        dialog.get_by_role("button", name="Train anew").click()
        anew.get_by_role("button", name="Train anew").click()
        dialog.get_by_role("button", name="Close").click()
        told = page.get_by_text("The adapter is in photos-adapter. Use it with --lora.")
        expect(told).to_be_visible()
        page.get_by_role("button", name="Show", exact=True).click()
        row = dialog.get_by_role("row").nth(1)
        expect(row).to_have_text("a.pngreda red circlea red circle")
        expect(dialog).to_contain_text("Step 4: held-out loss 0.500Best")
        check_access(page)
