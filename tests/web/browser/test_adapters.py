"""The menu of adapters beside the model's name: each chat keeps its choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from playwright.sync_api import expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage
from tests.web.browser.access import check_access

pytestmark = pytest.mark.browser


def test_a_chat_keeps_its_adapter_until_it_went_away(page: ChatPage, backend: FakeBackend) -> None:
    menu, plain = page.page.get_by_role("combobox", name="Adapter", exact=True), backend.info
    expect(menu).to_be_hidden()
    backend.info = replace(plain, adapters=("poet", "clerk"))
    try:
        page.visit()
        expect(menu.locator("option")).to_have_text(["No adapter", "poet", "clerk"])
        expect(menu).to_have_value("")
        check_access(page.page)
        menu.select_option("clerk")
        page.ask("words")
        page.wait_answered()
        assert [call.adapter for call in backend.calls] == ["clerk"]
        page.page.reload()
        page.wait_answered()
        expect(menu).to_have_value("clerk")
        # Another chat has its own choice, and gives this one back.
        page.new_chat()
        menu.select_option("poet")
        page.chats.locator("a").click()
        expect(menu).to_have_value("clerk")
        # Without it, the model alone answers; its name is kept for when it is back.
        backend.info = replace(plain, adapters=("poet",))
        page.page.reload()
        page.wait_answered()
        expect(menu).to_have_value("")
        page.ask("words")
        page.wait_answered(2)
        assert backend.calls[-1].adapter is None
        backend.info = replace(plain, adapters=("poet", "clerk"))
        page.page.reload()
        expect(menu).to_have_value("clerk")
    finally:
        backend.info = plain
