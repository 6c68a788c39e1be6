"""/docs of `qwen35mm serve` in a browser that reaches nothing but that server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect

from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Keys
from tests.server.conftest import serving
from tests.server.instant import Instant
from tests.web.browser import PATIENCE_MS
from tests.web.browser.access import TARGET_PX, check_access, walk

pytestmark = pytest.mark.browser

KEY = "a-key-of-another-program"


@contextmanager
def docs_of(browser: Browser, demo: LoadedModel, keys: list[str]) -> Iterator[Page]:
    """The page at /docs; nothing but the server may be asked for, and nothing go wrong but a refused key."""
    outside: list[str] = []
    problems: list[str] = []

    def pass_on(route: Route) -> None:
        if route.request.url.startswith((address, "data:")):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and "status of 401" not in message.text:
            problems.append(message.text)

    with serving(create_app(Instant(demo), keys=Keys(keys))) as address:
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_MS)
        context.route("**/*", pass_on)
        context.on("weberror", lambda error: problems.append(str(error.error)))
        context.on("console", note)
        page = context.new_page()
        page.goto(f"{address}/docs")
        yield page
        context.close()
    assert (outside, problems) == ([], [])


def test_operations_are_listed_and_tried_with_a_key_without_any_other_machine(
    browser: Browser, demo: LoadedModel
) -> None:
    with docs_of(browser, demo, [KEY]) as page:
        field, operations = page.get_by_label("API key"), page.locator(".opblock")
        check_access(page)
        field.fill("another-key-of-nobody")
        field.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("Wrong key")
        expect(operations).to_have_count(0)
        field.fill(KEY)
        field.press("Enter")
        expect(operations.filter(has_text="/v1/chat/completions")).to_have_count(1)
        assert operations.count() > 10
        expect(field).to_be_hidden()
        # Its colours are its own.
        assert walk(page, least_px=TARGET_PX)[1] == []
        # What stands behind an operation is drawn, too.
        operations.filter(has_text="/detokenize").locator(".opblock-summary").click()
        expect(page.locator(".opblock-body")).to_contain_text("As many requests wait as may.")
        ready = operations.filter(has_text="/ready")
        ready.locator(".opblock-summary").click()
        ready.get_by_role("button", name="Try it out").click()
        ready.get_by_role("button", name="Execute").click()
        expect(ready.locator(".live-responses-table tbody .response-col_status")).to_contain_text("200")
