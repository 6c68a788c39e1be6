"""The page for all hands, eyes and ears: by keys, by fingers, read out, from right to left, in small windows."""

from __future__ import annotations

import contextlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

from qwen35mm.chat.store.records import Conversation, Node
from qwen35mm.chat.store.store import new_id
from qwen35mm.chat.store.tree import Tree
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage, box_of
from tests.web.browser.access import check_access
from tests.web.rendering.contrast import contrast

pytestmark = pytest.mark.browser

# Longer than any notice is shown.
LONG_MS = 60_000
# Of each field that is shown: what it is, its border, its ground, and the ground around it. Sliders and check boxes are
# drawn by the browser; the search and the composer are known by their drawings and their words.
BORDERS = """() => {
    const ground = (element) => {
        const colour = getComputedStyle(element).backgroundColor;
        return colour.startsWith("rgb(") ? colour : ground(element.parentElement);
    };
    const drawn = ({ type }) => !["range", "checkbox", "file"].includes(type);
    return [...document.querySelectorAll(".app :is(input, select, textarea)")]
        .filter((field) => drawn(field) && field.checkVisibility() && !field.closest(".search, .composer"))
        .map((field) => {
            const { borderTopColor, borderTopWidth, borderTopStyle } = getComputedStyle(field);
            const line = `${borderTopWidth} ${borderTopStyle}`;
            return [field.outerHTML.slice(0, 80), line, borderTopColor, ground(field), ground(field.parentElement)];
        });
}"""

# Whether a line runs to the left, wherever it stands: its last character is left of its first one.
RUNS_LEFT = """line => {
    const texts = document.createTreeWalker(document.querySelector(".app"), NodeFilter.SHOW_TEXT);
    const leftOf = (node, place) => {
        const range = document.createRange();
        range.setStart(node, place);
        range.setEnd(node, place + 1);
        return range.getBoundingClientRect().left;
    };
    const found = [];
    while (texts.nextNode()) {
        const node = texts.currentNode;
        const start = node.data.indexOf(line);
        if (start >= 0) found.push(leftOf(node, start + line.length - 1) < leftOf(node, start));
    }
    return found;
}"""


def as_hex(colour: str) -> str:
    """A computed colour; one that can be seen through isn't one of ours."""
    assert colour.startswith("rgb("), colour
    red, green, blue = map(int, re.findall(r"\d+", colour))
    return f"#{red:02x}{green:02x}{blue:02x}"


def toasts(page: ChatPage) -> Locator:
    return page.page.locator(".toast")


def close_button(toast: Locator) -> Locator:
    return toast.get_by_role("button", name="Dismiss")


def fail(page: ChatPage, name: str) -> None:
    """Has the page say that a file can't be read."""
    with page.page.expect_response(re.compile("/upload")):
        page.page.locator(".composer input[type=file]").set_input_files(
            {"name": name, "mimeType": "video/mp4", "buffer": b"\x00\x01 nothing"}
        )


def test_notices_go_by_themselves_and_errors_stay_until_they_are_closed(open_page: OpenPage) -> None:
    page = open_page()
    page.page.clock.install()
    # A notice stays under the pointer and with the focus.
    page.box.press("Enter")
    expect(toasts(page)).to_contain_text("Type a question")
    toasts(page).hover()
    page.page.clock.fast_forward(LONG_MS)
    expect(toasts(page)).to_have_count(1)
    close_button(toasts(page)).focus()
    page.page.mouse.move(0, 0)
    page.page.clock.fast_forward(LONG_MS)
    expect(toasts(page)).to_have_count(1)
    page.box.focus()
    page.page.clock.fast_forward(LONG_MS)
    expect(toasts(page)).to_have_count(0)
    # The same error is there once, and stays.
    for name in ("0.mp4", "1.mp4", "0.mp4"):
        fail(page, name)
    expect(toasts(page)).to_contain_text(["1.mp4", "0.mp4"])
    expect(toasts(page)).to_have_count(2)
    page.page.clock.fast_forward(LONG_MS)
    page.page.keyboard.press("Escape")
    expect(toasts(page)).to_have_count(2)
    # Closing one gives the focus to the next, and back to the box.
    expect(page.box).to_be_focused()
    close_button(toasts(page).last).focus()
    page.page.keyboard.press("Enter")
    expect(close_button(toasts(page))).to_be_focused()
    page.page.keyboard.press("Enter")
    expect(toasts(page)).to_have_count(0)
    expect(page.box).to_be_focused()
    # Of a handful the notice goes first, then the oldest error that nobody points at.
    fail(page, "0.mp4")
    page.box.press("Enter")
    for number in range(1, 4):
        fail(page, f"{number}.mp4")
    expect(toasts(page)).to_contain_text(["0.mp4", "1.mp4", "2.mp4", "3.mp4"])
    toasts(page).first.hover()
    fail(page, "4.mp4")
    expect(toasts(page)).to_contain_text(["0.mp4", "2.mp4", "3.mp4", "4.mp4"])
    expect(toasts(page)).to_have_count(4)


def test_borders_of_fields_can_be_seen(page: ChatPage) -> None:
    """WCAG 2.2, 1.4.11: 3 to 1 against what is on either side, in both colours of the page."""

    def borders() -> list[list[str]]:
        found = []
        for scheme in ("dark", "light"):
            page.page.emulate_media(color_scheme=scheme)
            found += page.page.evaluate(BORDERS)
        return found

    page.ask("echo Hello")
    page.wait_answered()
    page.page.get_by_role("button", name="Options for echo Hello").click()
    page.page.get_by_role("button", name="Rename").click()
    fields = borders()
    page.page.get_by_label("Title").press("Escape")
    page.open_settings(advanced=True).get_by_role("button", name="Save as preset").click()
    page.dialog.get_by_label("Name").blur()
    fields += borders()
    assert len(fields) > 20
    assert len({ground for *_, ground in fields}) > 2
    for field, line, border, inside, outside in fields:
        assert line == "1px solid", field
        for ground in (inside, outside):
            assert contrast(as_hex(border), as_hex(ground)) >= 3, (field, border, ground)


def open_strip(page: ChatPage) -> None:
    """Shows what the model will see of the video in the message."""
    page.page.locator(".films .frames").evaluate("strip => { strip.open = true; }")
    expect(page.page.locator(".film img").first).to_be_visible()


def test_what_the_eye_doesn_t_see_the_keyboard_doesn_t_reach(page: ChatPage, samples: Path) -> None:
    tab = page.page
    names = check_access(tab)
    assert "Skip to message" in names
    assert "Log in" not in names
    tab.get_by_role("button", name="Skip to message").press("Enter")
    expect(page.box).to_be_focused()
    page.attach(samples / "two-shapes.jpg", samples / "moves-right.mp4")
    open_strip(page)
    check_access(tab)
    page.ask("markdown")
    page.wait_answered()
    tab.get_by_role("button", name="Options for markdown").click()
    check_access(tab)
    page.open_settings()
    tab.emulate_media(color_scheme="dark")
    check_access(tab)
    tab.keyboard.press("Control+/")
    check_access(tab)
    tab.keyboard.press("Escape")
    tab.get_by_role("button", name="Close settings").click()
    tab.locator(".message .picture").click()
    check_access(tab)
    tab.keyboard.press("Escape")
    page.tool(page.answers, "Compare").click()
    page.dialog.get_by_role("button", name="Answer", exact=True).click()
    expect(page.dialog.get_by_role("button", name="Continue with this answer").last).to_be_enabled()
    check_access(tab)


def test_a_finger_reaches_everything_on_a_phone(open_page: OpenPage, samples: Path) -> None:
    page = open_page(viewport={"width": 375, "height": 667}, is_mobile=True, has_touch=True)
    tab = page.page
    check_access(tab, finger=True)
    page.attach(samples / "moves-right.mp4")
    open_strip(page)
    check_access(tab, finger=True)
    page.box.fill("markdown")
    page.send_button.click()
    page.wait_answered()
    check_access(tab, finger=True)
    tab.get_by_role("button", name="Chats", exact=True).click()
    check_access(tab, finger=True)
    page.page.keyboard.press("Escape")
    page.open_settings()
    check_access(tab, finger=True)


@pytest.mark.parametrize("size", [(320, 256), (600, 425)])
def test_a_low_window_leaves_the_conversation_room(open_page: OpenPage, samples: Path, size: tuple[int, int]) -> None:
    """320 x 256 is 400% of 1280 x 1024 (WCAG 1.4.10), 600 x 425 is 200% of 1200 x 850."""
    page = open_page(viewport={"width": size[0], "height": size[1]})
    page.ask("echo Hello")
    page.wait_answered()
    page.attach(samples / "moves-right.mp4")
    open_strip(page)
    assert box_of(page.page.locator(".transcript"))["height"] >= min(200, size[1] / 2)
    page.send_button.scroll_into_view_if_needed()
    expect(page.send_button).to_be_in_viewport(ratio=1)
    page.answers.locator(".answer").scroll_into_view_if_needed()
    expect(page.answers.locator(".answer")).to_be_in_viewport(ratio=1)
    page.page.keyboard.press("Control+k")
    expect(page.chats.first).to_be_visible()
    assert box_of(page.page.locator(".chats"))["height"] >= min(200, size[1] / 2)
    for part in page.page.locator("html, .main, .sidebar").all():
        assert part.evaluate("part => part.scrollWidth - part.clientWidth") == 0


def test_keys_search_begin_edit_and_stop_from_anywhere(page: ChatPage) -> None:
    keyboard = page.page.keyboard
    page.ask("slow")
    expect(page.answers).to_contain_text("word")
    keyboard.press("Control+k")
    search = page.page.get_by_label("Search chats")
    expect(search).to_be_focused()
    # What only looks like one is typed.
    keyboard.type("k/o")
    expect(search).to_have_value("k/o")
    # It empties the field, and stops the answer where there is nothing to empty.
    keyboard.press("Escape")
    expect(search).to_have_value("")
    expect(page.answers.locator(".problem")).to_be_hidden()
    keyboard.press("Escape")
    page.wait_answered()
    keyboard.press("Control+Shift+E")
    expect(page.box).to_be_focused()
    expect(page.box).to_have_value("slow")
    keyboard.press("Control+/")
    expect(page.dialog).to_contain_text("Keyboard shortcuts")
    expect(page.dialog.locator("dt").first).to_have_text("CtrlK")
    # A dialog has the keys for itself.
    keyboard.press("Control+Shift+O")
    keyboard.press("Escape")
    expect(page.dialog).to_have_count(0)
    expect(page.answers).to_have_count(1)
    expect(page.box).to_be_focused()
    keyboard.press("Control+Shift+O")
    expect(page.page.locator(".welcome")).to_be_visible()
    # The keyboard of another script: where the letter would be.
    page.page.evaluate(
        "() => document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ל', code: 'KeyK', ctrlKey: true }))"
    )
    expect(search).to_be_focused()


def test_who_listens_hears_whole_sentences_once(page: ChatPage) -> None:
    heard, answer = page.page.locator(".unseen[role=log] p"), page.answers.last.locator(".answer")
    page.ask("slow All is well. And")
    page.wait_until(lambda: heard.count() > 2)
    page.stop_button.click()
    page.wait_answered()
    expect(heard.last).to_have_text("The answer is complete.")
    *sentences, rest, _ = heard.all_inner_texts()
    assert all(text.endswith("well.") for text in sentences)
    assert " ".join([*sentences, rest]) == answer.inner_text().strip()
    # Code is no sentence.
    page.ask("markdown")
    page.wait_answered(2)
    expect(heard).to_have_text([re.compile("^Look: shape number circle 2 The area"), "The answer is complete."])
    # What stood there already is not read again where it is continued.
    page.ask("length")
    page.wait_answered(3)
    page.page.reload()
    page.tool(page.answers.last, "Continue").click()
    page.wait_ending("its end.")
    expect(heard).to_have_text(["and its end.", "The answer is complete."])


def test_arabic_and_hebrew_run_from_the_right(page: ChatPage, fake_server: tuple[FakeBackend, Server]) -> None:
    question = Node(new_id(), None, "user", 0.0, "מה יש בתמונה?\nTwo cats.")
    text = "في الصورة قطتان.\n\n1. القطة الأولى.\n2. The cat sleeps.\n\n`git pull` أمر.\n\n```py\n# قط\n```\n\n> نعم!"
    answer = Node(new_id(), question.id, "assistant", 1.0, text)
    conversation = Conversation(new_id(), "قطط.", 0.0, 1.0, answer.id)
    fake_server[1].store.insert("local", [(conversation, Tree([question, answer]))])
    page.page.reload()
    page.titles.click()
    expect(page.page.locator("h1")).to_have_text("قطط.")
    page.box.fill("שלום, עולם!")
    assert page.box.evaluate("box => box.matches(':dir(rtl)')")
    runs = {
        "قطط.": [True, True],
        "מה יש בתמונה?": [True],
        "Two cats.": [False],
        "في الصورة قطتان.": [True],
        "القطة الأولى.": [True],
        "The cat sleeps.": [False],
        "git pull": [False],
        "أمر.": [True],
        "نعم!": [True],
    }
    assert {line: page.page.evaluate(RUNS_LEFT, line) for line in runs} == runs
    sides = "items => items.map((item) => getComputedStyle(item).textAlign)"
    assert page.answers.locator("li").evaluate_all(sides) == ["right", "right"]
    directions = "element => getComputedStyle(element).direction"
    for part, direction in (("ol", "rtl"), ("p:has(code)", "rtl"), ("pre", "ltr"), ("blockquote", "rtl")):
        assert page.answers.locator(part).evaluate(directions) == direction


def test_buttons_say_what_they_have_opened(page: ChatPage) -> None:
    page.page.set_viewport_size({"width": 600, "height": 800})
    menu = page.page.get_by_role("button", name="Chats", exact=True)
    settings = page.page.locator(".top").get_by_role("button", name="Settings")
    inside = page.page.locator(".side-foot button", has_text="Settings")

    def opened(*names: str) -> None:
        for name, button in (("menu", menu), ("settings", settings), ("settings", inside)):
            expect(button).to_have_attribute("aria-expanded", "true" if name in names else "false")
            part = page.page.locator(f"#{button.get_attribute('aria-controls')}")
            expect(part).to_be_visible() if name in names else expect(part).to_be_hidden()

    opened()
    settings.click()
    opened("settings")
    page.page.keyboard.press("Escape")
    opened()
    menu.click()
    opened("menu")
    page.page.keyboard.press("Escape")
    opened()
    menu.click()
    page.page.get_by_role("button", name="New chat").click()
    opened()
    menu.click()
    inside.click()
    opened("settings")
    page.page.get_by_role("button", name="Close settings").click()
    opened()


def test_a_login_lets_in_who_knows_the_password(browser: Browser) -> None:
    with contextlib.closing(serve(FakeBackend(), port=0, auth=[("ann", "secret")])) as server:
        tab = browser.new_context().new_page()
        tab.goto(server.url)
        tab.get_by_label("Name").fill("ann")
        check_access(tab)
        tab.get_by_label("Password").fill("a guess")
        tab.get_by_role("button", name="Log in").click()
        expect(tab.get_by_role("alert")).to_have_text("Wrong name or password.")
        tab.get_by_label("Password").fill("secret")
        tab.get_by_label("Password").press("Enter")
        expect(tab.locator(".composer textarea")).to_be_focused()
        tab.context.close()


def test_a_page_of_another_port_reads_nothing_and_may_only_lead_here(
    page: ChatPage, fake_server: tuple[FakeBackend, Server]
) -> None:
    url, tab = fake_server[1].url, page.page

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f"<a href='{url}'>chat</a>".encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other, contextlib.ExitStack() as stack:
        threading.Thread(target=other.serve_forever).start()
        stack.callback(other.shutdown)
        assert tab.url == url, "its token isn't kept in the history"
        tab.goto(f"http://127.0.0.1:{other.server_port}/")
        asked = "{method: 'POST', credentials: 'include', headers: {'x-qwen35mm': '1'}, body: '{}'}"
        read = f"fetch('{url}qwen35mm/api/start', {asked}).then(answer => answer.text(), () => 'refused')"
        picture = "new Promise(done => {const i = new Image(); i.onload = i.onerror = e => done(e.type); i.src = '%s'})"
        assert (tab.evaluate(read), tab.evaluate(picture % f"{url}qwen35mm/poster/0")) == ("refused", "error")
        page.forgive()
        tab.get_by_text("chat").click()
        page.box.wait_for()
