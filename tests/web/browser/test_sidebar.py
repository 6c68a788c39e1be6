"""The sidebar in a browser: headings, pins, marks, a list without end, and what is deleted and had back."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from qwen35mm.chat.store.records import Conversation
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tree import Tree
from qwen35mm.web import Server
from tests.chat.fake_backend import FakeBackend
from tests.chat.helpers import node
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser

DAY_S = 86_400


def add(store: ConversationStore, title: str, days_ago: float, **values: Any) -> Conversation:
    """A conversation that was last changed so long ago."""
    message, then_s = node(text=f"about {title}"), time.time() - DAY_S * days_ago
    conversation = Conversation(new_id(), title, then_s, then_s, message.id, **values)
    store.insert("local", [(conversation, Tree([message]))])
    return conversation


def choose(page: ChatPage, title: str, entry: str) -> None:
    """Takes an entry of a conversation's menu."""
    more = page.page.get_by_role("button", name=f"Options for {title}", exact=True)
    more.click()
    more.locator("..").get_by_role("button", name=entry, exact=True).click()


def headings(page: ChatPage) -> Locator:
    return page.page.locator(".chats h2")


def test_chats_stand_under_their_days_and_are_found_pinned_renamed_and_deleted(
    page: ChatPage, fake_server: tuple[FakeBackend, Server]
) -> None:
    store = fake_server[1].store
    for title, days_ago in (("old", 400), ("month", 20), ("week", 5), ("new", 0)):
        add(store, title, days_ago)
    page.page.reload()
    expect(headings(page)).to_have_count(4)
    assert headings(page).all_inner_texts()[:3] == ["Today", "Last 7 days", "Last 30 days"]
    expect(headings(page).last).to_have_text(time.strftime("%B %Y", time.localtime(time.time() - 400 * DAY_S)))
    # The list is one stop of Tab; arrows lead through it, and through a chat's menu.
    keyboard, links = page.page.keyboard, page.chats.locator("a")
    page.page.get_by_label("Search chats").focus()
    keyboard.press("Tab")
    expect(links.first).to_be_focused()
    keyboard.press("ArrowDown")
    expect(links.nth(1)).to_be_focused()
    keyboard.press("End")
    keyboard.press("Tab")
    expect(page.page.locator(".side-foot button").first).to_be_focused()
    keyboard.press("Shift+Tab")
    expect(links.last).to_be_focused()
    for key in ("ArrowRight", "Enter"):
        keyboard.press(key)
    pin = page.chats.last.get_by_role("button", name="Pin")
    expect(pin).to_be_focused()
    for key in ("ArrowDown", "ArrowUp"):
        keyboard.press(key)
    expect(pin).to_be_focused()
    keyboard.press("Enter")
    expect(page.titles).to_have_text(["old", "new", "week", "month"])
    expect(headings(page).first).to_have_text("Pinned")
    expect(page.chats.first.locator("a")).to_be_focused()
    search = page.page.get_by_label("Search chats")
    search.fill("ABOUT mont")
    expect(page.titles).to_have_text(["month"])
    choose(page, "month", "Rename")
    page.page.get_by_label("Title").fill("Fruit")
    page.page.get_by_label("Title").press("Enter")
    expect(page.titles).to_have_text(["Fruit"])
    choose(page, "Fruit", "Delete")
    expect(page.chats).to_have_count(0)
    search.fill("")
    expect(page.titles).to_have_text(["old", "new", "week"])
    # What is deleted comes back with what was written in it.
    page.titles.get_by_text("new").click()
    expect(page.questions).to_have_text(re.compile("about new"))
    page.page.reload()
    expect(links.nth(1)).to_have_attribute("tabindex", "0")
    page.box.fill("for the next time")
    choose(page, "new", "Delete")
    expect(page.titles).to_have_text(["old", "week"])
    expect(page.page.locator(".welcome")).to_be_visible()
    expect(page.box).to_have_value("")
    expect(page.chats.nth(1).locator("a")).to_be_focused()
    page.toasts.get_by_role("button", name="Undo").last.click()
    expect(page.titles).to_have_text(["old", "new", "week"])
    expect(page.questions).to_have_text(re.compile("about new"))
    expect(page.box).to_have_value("for the next time")
    choose(page, "old", "Unpin")
    expect(page.titles).to_have_text(["new", "week", "old"])
    choose(page, "week", "Delete")
    expect(page.titles).to_have_text(["new", "old"])
    page.page.reload()
    expect(page.titles).to_have_text(["new", "old"])


@pytest.mark.slow
def test_the_list_goes_on_as_one_scrolls_or_walks_through_it(
    page: ChatPage, fake_server: tuple[FakeBackend, Server]
) -> None:
    for number in range(250):
        add(fake_server[1].store, f"chat {number}", number / 10)
    page.page.reload()
    expect(page.chats).to_have_count(100)
    page.chats.last.scroll_into_view_if_needed()
    expect(page.chats).to_have_count(200)
    page.page.get_by_label("Search chats").fill("about")
    expect(page.chats.locator("mark").first).to_be_visible()
    expect(page.chats).to_have_count(100)
    page.chats.last.locator("a").focus()
    expect(page.chats).to_have_count(200)
    expect(page.chats.nth(99).locator("a")).to_be_focused()
    page.chats.last.locator("a").focus()
    expect(page.chats).to_have_count(250)
    assert page.titles.all_inner_texts() == [f"chat {number}" for number in range(250)]
    expect(page.page.get_by_role("button", name="Show more")).to_be_hidden()
    # What happens elsewhere takes nobody to the beginning.
    page.chats.nth(240).locator("a").focus()
    choose(page, "chat 230", "Pin")
    expect(page.titles.first).to_have_text("chat 230")
    expect(page.chats).to_have_count(250)


def test_the_model_s_title_is_shown_when_it_comes(
    page: ChatPage, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "idles", True)
    monkeypatch.setattr(backend, "title", "The blue star")
    page.page.reload()
    page.ask("echo one")
    page.wait_answered()
    expect(page.titles).to_have_text(["The blue star"])
    expect(page.page.locator("h1.title")).to_have_text("The blue star")
    page.open_settings().get_by_label("Generate chat titles").uncheck()
    page.new_chat()
    page.ask("echo two")
    page.wait_answered()
    page.wait_until(lambda: backend.active == 0)
    expect(page.titles).to_have_text(["echo two", "The blue star"])


def test_a_temporary_chat_leaves_nothing(
    page: ChatPage, backend: FakeBackend, fake_server: tuple[FakeBackend, Server], samples: Path
) -> None:
    page.box.fill("a draft of a new chat")
    page.page.get_by_role("button", name="Temporary chat").click()
    expect(page.page.locator(".welcome")).to_contain_text("This chat isn't saved.")
    expect(page.page.locator(".temporary-mark")).to_be_visible()
    expect(page.box).to_have_value("")
    page.ask("which secret?", [samples / "one-shape.png"])
    page.wait_answered()
    expect(page.questions.locator("img")).to_have_js_property("complete", True)
    assert page.questions.locator("img").evaluate("image => image.naturalWidth") > 0
    page.ask("echo more secrets")
    page.wait_ending("more secrets")
    page.box.fill("a secret draft")
    page.tool(page.answers.last, "Edit").click()
    page.answers.last.get_by_label("Answer", exact=True).fill("a secret edit")
    expect(page.chats).to_have_count(0)
    expect(page.page).to_have_url(page.url)
    assert "secret" not in page.page.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
    assert {call.retain for call in backend.calls} == {"memory"}
    page.page.get_by_role("button", name="New chat").click()
    expect(page.page.locator(".temporary-mark")).to_be_hidden()
    expect(page.box).to_have_value("a draft of a new chat")
    page.ask("echo kept")
    page.wait_ending("kept")
    expect(page.titles).to_have_text(["echo kept"])
    page.page.get_by_role("button", name="Temporary chat").click()
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.page.reload()
    expect(page.titles).to_have_text(["echo kept"])
    page.wait_until(lambda: backend.active == 0)
    assert fake_server[1].store.find("local", limit=9)[0].title == "echo kept"
