"""Streams of answers, as the browser asks for them."""

from __future__ import annotations

import pytest
from playwright.sync_api import Request, expect

from tests.web.browser import OpenPage

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_every_stream_that_is_asked_for_is_read(open_page: OpenPage) -> None:
    """One that nobody reads would keep its answers going after the page was closed."""
    page = open_page()
    for name in ("slow 1", "slow 2"):
        page.new_chat()
        page.ask(name)
        expect(page.answers.last.locator(".answer")).to_contain_text("word")
    methods: list[str] = []

    def note(request: Request) -> None:
        if "/call/watch" in request.url:
            methods.append(request.method)

    page.page.on("request", note)
    page.page.reload()
    page.wait_until(lambda: sorted(methods) == ["GET", "GET", "POST", "POST"])
    for name in ("slow 1", "slow 2"):
        page.titles.filter(has_text=name).click()
        # Until it is shown, the button is that of the conversation before it.
        expect(page.page.get_by_role("heading", level=1)).to_have_text(name)
        page.stop_button.click()
        page.wait_answered()
