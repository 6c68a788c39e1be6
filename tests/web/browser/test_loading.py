"""The page while it is loaded: what is seen at once, how much it asks for, and what is said if it doesn't come."""

from __future__ import annotations

import contextlib
import re

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from qwen35mm.http import run
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import VIEWPORT, ChatPage, OpenPage

pytestmark = pytest.mark.browser

# The address, the page, its styles, script and icon, the session, and what the program tells: then it is drawn.
MOST_REQUESTS = 7


def places(page: Page) -> list[object]:
    return [page.locator(f".{name}").first.bounding_box() for name in ("sidebar", "brand", "top")]


def test_the_page_is_seen_before_its_script_which_is_one(
    browser: Browser, fake_server: tuple[FakeBackend, Server]
) -> None:
    with contextlib.closing(browser.new_context(viewport=VIEWPORT)) as context:
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(re.sub(r"http://[^/]+/|\?.*", "", request.url)))
        held: list[Route] = []
        page.route("**/*.js*", lambda route: held.append(route))
        with page.expect_request("**/page.js*"):
            page.goto(fake_server[1].address, wait_until="commit")
        expect(page.locator(".skeleton .composer")).to_be_in_viewport(ratio=1)
        before = places(page)
        assert all(re.fullmatch(r"(t/.*)?|icon\.svg|qwen35mm/web/page\.(css|js)", each) for each in asked), asked
        held[0].continue_()
        expect(page.locator(".composer textarea")).to_be_visible()
        assert places(page) == before, "nothing moves"
        assert len(held) == 1
        before_it_is_drawn = set(asked[: asked.index("qwen35mm/api/start") + 1])
        assert len(before_it_is_drawn) <= MOST_REQUESTS, asked


def test_a_program_that_does_not_answer_is_waited_for_in_words(open_page: OpenPage) -> None:
    page: ChatPage = open_page(locale="de-DE")
    page.server_ends = True
    held: list[Route] = []
    page.page.route("**/api/start", lambda route: held.append(route))
    page.page.clock.install()
    page.page.reload()
    status = page.page.locator(".skeleton [role=status]")
    expect(status).to_have_text("")
    page.wait_until(lambda: bool(held))
    page.page.clock.fast_forward(5000)
    expect(status).to_contain_text("Warten auf das Programm")
    held[0].abort()
    alert = page.page.get_by_role("alert")
    expect(alert).to_contain_text("Das Programm ist nicht erreichbar")
    page.page.unroute_all()
    page.page.get_by_role("button", name="Seite neu laden").click()
    expect(page.box).to_be_visible()
    # The same where a chat is opened; what was asked for in vain is told by the line's other words.
    page.ask("echo one")
    page.wait_answered()
    page.page.get_by_role("button", name="Neuer Chat").click()
    held.clear()
    page.page.route("**/api/open", lambda route: held.append(route))
    page.titles.click()
    page.wait_until(lambda: bool(held))
    line = page.page.locator(".connection [role=status]")
    page.page.clock.fast_forward(5000)
    expect(line).to_have_text(re.compile("^Warten auf das Programm"))
    held[0].continue_()
    expect(page.answers).to_have_count(1)
    expect(line).to_have_text("")


def test_other_devices_get_the_address_with_a_qr_code(
    page: ChatPage, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page.open_settings().locator("img.qr").count() == 0
    monkeypatch.setattr(run, "network_address", lambda *_: "http://192.168.1.7:7860")
    with contextlib.closing(serve(FakeBackend(), port=0)) as server:
        other = ChatPage(browser, server.address)
        settings = other.open_settings()
        code = settings.get_by_role("img", name="QR code of the address")
        code.scroll_into_view_if_needed()
        assert code.evaluate("img => img.decode().then(() => img.naturalWidth === img.naturalHeight)")
        expect(settings.get_by_role("textbox", name="Address")).to_have_value("http://192.168.1.7:7860")
        other.close()
