"""The sidebar's search in a browser: what it shows, and where a click goes."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from qwen35mm.web import Server
from tests.chat.fake_backend import FakeBackend
from tests.chat.helpers import chat
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser


def test_a_search_shows_the_hit_and_opens_its_message(page: ChatPage, fake_server: tuple[FakeBackend, Server]) -> None:
    page.ask("echo the blue star is here")
    page.wait_answered()
    page.tool(page.questions.first, "Edit").click()
    page.ask("echo another branch")
    page.wait_until(lambda: page.answers.last.locator(".answer").inner_text().strip() == "another branch")
    for number in range(2, 4):
        page.ask("echo " + "a long line of words " * 150)
        page.wait_answered(number)
    page.new_chat()
    page.page.get_by_label("Search the conversations").fill("STAR blu")
    expect(page.chats).to_have_count(1)
    expect(page.chats.locator("mark")).to_have_text(["blue", "star"])
    page.chats.locator("a").click()
    found = page.page.locator(".message.found")
    expect(found.locator(".answer")).to_have_text("the blue star is here")
    expect(found).to_be_in_viewport()
    expect(page.answers).to_have_count(1)
    page.tool(page.questions.first, "The next branch").click()
    expect(page.answers).to_have_count(3)
    page.page.get_by_label("Search the conversations").fill("another branch")
    expect(page.chats.locator("mark")).to_have_text(["another", "branch"])
    page.chats.locator("a").click()
    expect(found.locator(".answer")).to_have_text("another branch")
    expect(found).to_be_in_viewport()
    expect(page.answers.last).not_to_be_in_viewport()
    # A long conversation is drawn from its end.
    chat(fake_server[1].store, "local", title="Long", turns=60)
    page.page.get_by_label("Search the conversations").fill("answer 12")
    expect(page.titles).to_have_text(["Long"])
    page.chats.locator("a").click()
    expect(found.locator(".answer")).to_have_text("answer 12")
    expect(page.answers).to_have_count(60)
    expect(found).to_be_in_viewport()
