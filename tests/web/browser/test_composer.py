"""The box where messages are written, in a browser: keys, and what is pasted and dropped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Route, expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, box_of
from tests.web.browser.access import check_access

pytestmark = pytest.mark.browser


def test_keys_send_stop_and_edit_but_not_those_of_an_input_method(page: ChatPage, backend: FakeBackend) -> None:
    page.box.fill("slow")
    page.box.press("Shift+Enter")
    page.box.press_sequentially("two")
    expect(page.box).to_have_value("slow\ntwo")
    page.box.fill("slow")
    page.box.press("Enter")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.box.fill("shi")
    press = "(box, key) => box.dispatchEvent(new KeyboardEvent('keydown', {bubbles: true, cancelable: true, ...key}))"
    for key in ("Enter", "Escape"):
        # Safari's last one is no part of the composition any more, and has that code.
        for how in ({"isComposing": True}, {"keyCode": 229}):
            assert page.box.evaluate(press, {"key": key, **how}), "the key is the input method's"
    expect(page.box).to_have_value("shi")
    assert backend.active == 1
    page.box.fill("")
    page.box.press("Escape")
    page.wait_answered()
    assert backend.active == 0
    page.box.press("ArrowUp")
    expect(page.box).to_have_value("slow")
    expect(page.page.locator(".editing")).to_be_visible()
    page.box.press("Escape")
    expect(page.box).to_have_value("")


def test_suggestions_fill_the_box_and_ask_for_the_files_that_they_are_about(page: ChatPage, samples: Path) -> None:
    def suggestion(title: str) -> Locator:
        return page.page.get_by_role("button", name=title, exact=True)

    expect(page.examples).to_have_count(6)
    with page.page.expect_file_chooser() as chooser:
        suggestion("Compare two pictures").click()
    chooser.value.set_files([samples / "one-shape.png", samples / "two-shapes.jpg"])
    expect(page.box).to_have_value("How do these differ?")
    expect(page.thumbnails).to_have_count(2)
    # Now there are pictures, and what to find is for the person to say.
    picker = page.page.locator(".composer input[type=file]")
    picker.evaluate("picker => picker.addEventListener('click', () => (picker.dataset.clicked = 'yes'))")
    suggestion("Find things in a picture").click()
    page.page.keyboard.type("cross")
    found = 'Locate every instance that belongs to the following categories: "cross". '
    found += "Report bbox coordinates in JSON format."
    expect(page.box).to_have_value(found)
    # What a person wrote stays.
    suggestion("Describe a picture").click()
    expect(page.box).to_have_value(f"{found}\nDescribe this picture in detail.")
    expect(picker).not_to_have_attribute("data-clicked", "yes")

    # A model that sees nothing is asked about nothing to see.
    def answer(route: Route) -> None:
        response = route.fetch()
        start = response.json()
        start["app"]["server"] = {"host": "cellar", "notes": [], "continues": None, "images": False}
        route.fulfill(response=response, json=start)

    page.page.route("**/api/start", answer)
    page.visit()
    expect(page.examples).to_have_text(["Summarise a text"])


def test_files_are_chosen_pasted_and_dropped_and_broken_ones_explained(
    page: ChatPage, samples: Path, tmp_path: Path
) -> None:
    pasted = """(element, [bytes, texts]) => {
        const clipboardData = new DataTransfer();
        if (bytes) clipboardData.items.add(new File([new Uint8Array(bytes)], 'cells.png', { type: 'image/png' }));
        for (const [kind, text] of Object.entries(texts)) clipboardData.setData(kind, text);
        const event = new ClipboardEvent('paste', { bubbles: true, cancelable: true, clipboardData });
        return element.dispatchEvent(event);
    }"""
    dropped = """(element, bytes) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([new Uint8Array(bytes)], 'dropped.png', { type: 'image/png' }));
        for (const kind of ['dragenter', 'drop'])
            element.dispatchEvent(new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer }));
    }"""
    picture = list((samples / "one-shape.png").read_bytes())
    cells = {"text/plain": "a\tb", "text/html": "<meta charset='utf-8'><table><tr><td>a</td><td>b</td></tr></table>"}
    body, search = page.page.locator("body"), page.page.get_by_role("searchbox")
    # A spreadsheet gives a picture of its cells besides.
    assert page.box.evaluate(pasted, [picture, cells]), "the box itself takes the text"
    assert search.evaluate(pasted, [None, {"text/plain": "a"}]), "another field takes its text"
    expect(page.thumbnails).to_have_count(0)
    body.evaluate(pasted, [picture, cells])
    expect(page.box).to_have_value("a\tb")
    copied = {"text/html": "<img src='http://example.com/a.png'>"}
    body.evaluate(pasted, [picture, copied])
    search.evaluate(pasted, [picture, {}])
    page.box.evaluate(pasted, [picture, {}])
    page.page.locator(".transcript").evaluate(dropped, picture)
    names = page.thumbnails.locator(".name")
    expect(names).to_have_text(["cells.png", "cells.png", "cells.png", "dropped.png"])
    # A broken one is explained by its name before anything is sent.
    whole = (samples / "three-shapes.png").read_bytes()
    for number, content in enumerate((b"\x89PNG\r\n\x1a\n broken", b"\x00\x01 nothing", whole[: len(whole) // 2])):
        path = tmp_path / f"photo {number}.png"
        path.write_bytes(content)
        page.page.locator(".composer input[type=file]").set_input_files(path)
        expect(page.toasts).to_contain_text(f"photo {number}.png")
    expect(page.toasts).to_contain_text("damaged or cut off: its pixels could not all be decoded")
    expect(page.thumbnails).to_have_count(4)
    page.ask("which?")
    assert page.wait_answered() == "4 images"


def test_thinking_system_prompt_and_preset_are_behind_plus_and_seen_while_they_are_on(
    page: ChatPage, backend: FakeBackend
) -> None:
    on = page.page.get_by_role("group", name="Switched on")
    chips = on.locator(".chip")
    expect(chips).to_have_count(0)
    page.add("Think first")
    expect(chips).to_have_text(["Think first"])
    page.add("System prompt")
    prompt = page.page.get_by_role("textbox", name="System prompt")
    expect(prompt).to_be_focused()
    prompt.fill("Be short.")
    page.page.keyboard.press("Escape")
    expect(prompt).to_be_hidden()
    page.add("Save as preset")
    page.dialog.get_by_role("textbox", name="Name").fill("Brief")
    page.page.keyboard.press("Enter")
    expect(chips).to_have_text(["Think first", "System prompt", "Brief"])
    page.ask("echo one")
    page.wait_answered()
    call = backend.calls[-1]
    assert (call.enable_thinking, [message.role for message in call.messages]) == (True, ["system", "user"])
    # The settings show the same, and what is changed there is seen here.
    page.open_settings().get_by_label("Think first").click()
    expect(chips).to_have_text(["System prompt"])
    on.get_by_role("button", name="Remove System prompt").click()
    expect(chips).to_have_count(0)
    expect(page.page.get_by_role("button", name="Add to message")).to_be_focused()
    page.toasts.get_by_role("button", name="Undo").click()
    expect(chips).to_have_text(["System prompt"])
    page.add("Brief")
    expect(page.open_settings().get_by_label("Think first")).to_be_checked()
    # There is room for them on a narrow page, too.
    page.page.get_by_role("button", name="Close settings").click()
    page.page.set_viewport_size({"width": 320, "height": 640})
    for chip in chips.all():
        box = box_of(chip)
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
    on.get_by_role("button", name="Remove Brief").click()
    expect(chips).to_have_count(0)


def test_a_link_is_read_into_the_message_where_the_person_allows_it(page: ChatPage) -> None:
    """Off at first; what the program fetches is tests/web/serving/test_web_pages.py."""
    pytest.importorskip("trafilatura")
    link = page.page.get_by_role("button", name="Read example.org", exact=True)
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url.partition("address=")[2])
        text = {"digest": "0" * 64, "kind": "text", "name": "Cats (example.org)", "num_bytes": 9, "label": "9 bytes"}
        if "cats" in asked[-1]:
            route.fulfill(json={"attachments": [text]})
        else:
            route.fulfill(json={"error": {"message": "It is gone.", "kind": "refused"}}, status=400)

    page.page.route("**/web_page?*", answer)
    page.box.fill("What is in (https://example.org/cats)?")
    expect(page.box).to_be_focused()
    expect(link).to_be_hidden()
    page.open_settings().get_by_role("checkbox", name="Read web addresses").check()
    page.page.keyboard.press("Escape")
    expect(link).to_be_visible()
    check_access(page.page)
    link.click()
    expect(page.thumbnails).to_have_attribute("title", re.compile("Cats"))
    expect(link).to_be_hidden()
    assert asked == ["https%3A%2F%2Fexample.org%2Fcats"]
    page.box.fill("And https://example.org/dogs, https://example.net/?")
    link.click()
    expect(page.toasts).to_contain_text("It is gone.")
    expect(page.thumbnails).to_have_count(1)
    page.forgive()
