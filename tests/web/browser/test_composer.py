"""The box where messages are written, in a browser: keys, and what is pasted and dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage

pytestmark = pytest.mark.browser


def test_enter_sends_and_shift_enter_begins_a_line(page: ChatPage, backend: FakeBackend) -> None:
    page.box.fill("echo one")
    page.box.press("Shift+Enter")
    page.box.press_sequentially("two")
    page.box.press("Enter")
    page.wait_answered()
    assert backend.calls[0].messages[-1].text == "echo one\ntwo"


@pytest.mark.parametrize(
    ("place", "events"),
    [
        (".composer textarea", "[new ClipboardEvent('paste', {...how, clipboardData: files})]"),
        (".transcript", "['dragenter', 'drop'].map(kind => new DragEvent(kind, {...how, dataTransfer: files}))"),
    ],
    ids=["pasted", "dropped anywhere"],
)
def test_a_picture_is_attached(page: ChatPage, samples: Path, place: str, events: str) -> None:
    page.page.locator(place).evaluate(
        f"""(element, data) => {{
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(data)], 'some.png', {{ type: 'image/png' }}));
            const how = {{ bubbles: true, cancelable: true }};
            for (const event of {events}) element.dispatchEvent(event);
        }}""",
        list((samples / "one-shape.png").read_bytes()),
    )
    expect(page.thumbnails.locator(".name")).to_have_text("some.png")
    page.ask("which?")
    assert page.wait_answered() == "1 image"


def test_a_table_is_pasted_as_its_text_and_files_and_texts_anywhere(page: ChatPage, samples: Path) -> None:
    """A spreadsheet gives a picture of its cells besides."""
    pasted = """(element, [bytes, texts]) => {
        const clipboardData = new DataTransfer();
        if (bytes) clipboardData.items.add(new File([new Uint8Array(bytes)], 'cells.png', { type: 'image/png' }));
        for (const [kind, text] of Object.entries(texts)) clipboardData.setData(kind, text);
        const event = new ClipboardEvent('paste', { bubbles: true, cancelable: true, clipboardData });
        return element.dispatchEvent(event);
    }"""
    picture = list((samples / "one-shape.png").read_bytes())
    cells = {"text/plain": "a\tb", "text/html": "<meta charset='utf-8'><table><tr><td>a</td><td>b</td></tr></table>"}
    body, search = page.page.locator("body"), page.page.get_by_role("searchbox")
    assert page.box.evaluate(pasted, [picture, cells]), "the box itself takes the text"
    assert search.evaluate(pasted, [None, {"text/plain": "a"}]), "another field takes its text"
    expect(page.thumbnails).to_have_count(0)
    body.evaluate(pasted, [picture, cells])
    expect(page.box).to_have_value("a\tb")
    copied = {"text/html": "<img src='http://example.com/a.png'>"}
    body.evaluate(pasted, [picture, copied])
    search.evaluate(pasted, [picture, {}])
    expect(page.thumbnails).to_have_count(2)
    labels = page.thumbnails.locator(".label")
    expect(labels).to_contain_text(["tokens", "tokens"])


def test_keys_of_an_input_method_neither_send_nor_stop(page: ChatPage, backend: FakeBackend) -> None:
    press = "(box, key) => box.dispatchEvent(new KeyboardEvent('keydown', {bubbles: true, cancelable: true, ...key}))"
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.box.fill("shi")
    for key in ("Enter", "Escape"):
        # Safari's last one is no part of the composition any more, and has that code.
        for how in ({"isComposing": True}, {"keyCode": 229}):
            assert page.box.evaluate(press, {"key": key, **how}), "the key is the input method's"
    expect(page.box).to_have_value("shi")
    assert backend.active == 1
    page.box.fill("")
    page.box.press("Escape")
    page.wait_answered()


def test_thinking_system_prompt_and_preset_are_at_hand(
    page: ChatPage, backend: FakeBackend, open_page: OpenPage
) -> None:
    composer = page.page.locator(".composer")
    think = composer.get_by_role("button", name="Think first")
    preset = composer.get_by_role("combobox", name="Choose a preset")
    expect(think).to_have_attribute("aria-pressed", "false")
    think.click()
    expect(think).to_have_attribute("aria-pressed", "true")
    system = composer.get_by_role("button", name="System prompt")
    system.click()
    prompt = composer.get_by_role("textbox", name="System prompt")
    expect(prompt).to_be_focused()
    prompt.fill("Be short.")
    page.page.keyboard.press("Escape")
    expect(prompt).to_be_hidden()
    expect(system).to_be_focused()
    preset.select_option("Save as preset")
    page.dialog.get_by_role("textbox", name="Name").fill("Brief")
    page.page.keyboard.press("Enter")
    expect(preset.locator("option:checked")).to_have_text("Brief")
    page.ask("echo one")
    page.wait_answered()
    call = backend.calls[-1]
    assert (call.enable_thinking, [message.role for message in call.messages]) == (True, ["system", "user"])
    # The settings show the same, and what is changed there is seen here.
    page.open_settings().get_by_label("Think first").click()
    expect(think).to_have_attribute("aria-pressed", "false")
    expect(preset.locator("option:checked")).to_have_text("Preset")
    preset.select_option("Brief")
    expect(page.open_settings().get_by_label("Think first")).to_be_checked()

    narrow = open_page(viewport={"width": 320, "height": 640})
    expect(narrow.page.get_by_role("button", name="Think first")).to_be_hidden()
    narrow.page.get_by_role("button", name="Answer options").click()
    menu = narrow.page.get_by_role("group", name="Answer options")
    expect(menu.get_by_role("button")).to_have_count(2)
    box = menu.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
    expect(menu.get_by_role("button", name="Think first")).to_have_attribute("aria-pressed", "true")
    narrow.page.keyboard.press("Escape")
    expect(menu).to_be_hidden()


def test_escape_stops_and_up_edits_the_last_message(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.box.press("Escape")
    page.wait_answered()
    assert backend.active == 0
    page.box.press("ArrowUp")
    expect(page.box).to_have_value("slow")
    expect(page.page.locator(".editing")).to_be_visible()
    page.box.press("Escape")
    expect(page.box).to_have_value("")
