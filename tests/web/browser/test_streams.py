"""Streams of answers, as the browser asks for them."""

from __future__ import annotations

import pytest
from playwright.sync_api import Request, expect

from tests.web.browser import OpenPage

pytestmark = pytest.mark.browser


def test_every_stream_that_is_asked_for_is_read(open_page: OpenPage) -> None:
    """One that nobody reads would keep its answers going after the page was closed."""
    page = open_page()
    for _ in range(2):
        page.new_chat()
        page.ask("slow")
        expect(page.answers.last.locator(".answer")).to_contain_text("word")
    methods: list[str] = []

    def note(request: Request) -> None:
        if "/call/watch" in request.url:
            methods.append(request.method)

    page.page.on("request", note)
    page.page.reload()
    page.wait_until(lambda: sorted(methods) == ["GET", "GET", "POST", "POST"])
    for number in range(2):
        page.titles.nth(number).click()
        page.stop_button.click()
        page.wait_answered()
