"""The page for those who can't see it well, or are slow: notices, borders of fields, and what is said in words."""

from __future__ import annotations

import contextlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Locator, expect

from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage
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
    page.page.get_by_label("Options for echo Hello").click()
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
