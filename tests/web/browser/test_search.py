"""The sidebar's search in a browser: what it shows, and where a click goes."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from qwen35mm.web import Server
from tests.chat.fake_backend import FakeBackend
from tests.chat.helpers import chat, node, reply
from tests.web.browser import ChatPage, box_of

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
    page.page.get_by_label("Search chats").fill("STAR blu")
    expect(page.chats).to_have_count(1)
    expect(page.chats.locator("mark")).to_have_text(["blue", "star"])
    page.chats.locator("a").click()
    found = page.page.locator(".message.found")
    expect(found.locator(".answer")).to_have_text("the blue star is here")
    expect(found).to_be_in_viewport()
    expect(page.answers).to_have_count(1)
    page.tool(page.questions.first, "Next branch").click()
    expect(page.answers).to_have_count(3)
    page.page.get_by_label("Search chats").fill("another branch")
    expect(page.chats.locator("mark")).to_have_text(["another", "branch"])
    page.chats.locator("a").click()
    expect(found.locator(".answer")).to_have_text("another branch")
    expect(found).to_be_in_viewport()
    expect(page.answers.last).not_to_be_in_viewport()
    # A long conversation is drawn from its end.
    chat(fake_server[1].store, "local", title="Long", turns=60)
    page.page.get_by_label("Search chats").fill("answer 12")
    expect(page.titles).to_have_text(["Long"])
    page.chats.locator("a").click()
    expect(found.locator(".answer")).to_have_text("answer 12")
    expect(page.answers).to_have_count(60)
    expect(found).to_be_in_viewport()
    # What is after it is far longer than a browser takes it for, until it is near.
    store = fake_server[1].store
    conversation, last = chat(store, "local", title="Growing", turns=20)
    for text in ("the needle", *["a long line of words " * 300] * 2):
        store.add("local", conversation.id, question := node(last.id, "more"))
        store.add("local", conversation.id, last := reply(question.id, text))
    page.page.get_by_label("Search chats").fill("needle")
    expect(page.titles).to_have_text(["Growing"])
    page.chats.locator("a").click()
    expect(found.locator(".answer")).to_have_text("the needle")
    view = page.page.locator(".transcript")

    def top() -> float:
        return box_of(found)["y"] - box_of(view)["y"]

    page.wait_until(lambda: abs(top()) < 40)
    # It stays there whatever grows, until somebody scrolls.
    view.evaluate("view => { view.style.overflowAnchor = 'none'; }")
    view.evaluate("view => { for (const one of view.querySelectorAll('.message')) one.style.paddingTop = '90px'; }")
    page.wait_until(lambda: abs(top()) < 40)
    view.hover()
    page.page.mouse.wheel(0, 300)
    page.wait_until(lambda: top() < -200)
    page.page.locator(".messages").evaluate("list => { list.style.paddingBottom = '900px'; }")
    page.page.evaluate("() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert top() < -200
