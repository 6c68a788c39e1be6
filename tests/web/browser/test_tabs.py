"""Several tabs of one person at once."""

from __future__ import annotations

import pytest
from playwright.sync_api import Route, expect

from qwen35mm.web import Server
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage

pytestmark = pytest.mark.browser


def test_two_tabs_show_the_same_chat_as_it_grows(page: ChatPage) -> None:
    page.ask("echo one")
    page.wait_answered()
    other = page.context.new_page()
    other.goto(page.page.url)
    expect(other.locator(".message.assistant .answer")).to_have_text("one")
    page.ask("slow")
    expect(other.locator(".message.user")).to_have_count(2)
    expect(other.locator(".message.assistant .answer").last).to_contain_text("word word")
    other.get_by_role("button", name="Stop", exact=True).click()
    page.wait_answered(2)
    page.new_chat()
    page.ask("echo another")
    expect(other.locator(".chat")).to_have_count(2)
    expect(other.locator(".message.user")).to_have_count(2)
    other.close()
    page.wait_answered()


def test_messages_queued_in_two_tabs_follow_each_other(open_page: OpenPage) -> None:
    page = open_page()
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    other = page.context.new_page()
    other.goto(page.page.url)
    held: list[Route] = []
    other.route("**/api/send", lambda route: held.append(route))
    box = other.locator(".composer textarea")
    for tab, words in ((page.box, "slow first"), (box, "echo other"), (page.box, "echo second")):
        tab.fill(words)
        tab.press("Enter")
    page.stop_button.click()
    expect(page.answers.last.locator(".answer")).to_contain_text("first first")
    page.wait_until(lambda: bool(held))
    held[0].continue_()
    other.unroute("**/api/send")
    # The other tab's message was too late, and waits on where it is seen.
    expect(other.locator(".outbox li")).to_contain_text("Waiting for the answer")
    page.stop_button.click()
    page.wait_answered(4)
    assert sorted(page.questions.locator(".bubble").all_text_contents()[2:]) == ["echo other", "echo second"]
    expect(other.locator(".outbox li")).to_have_count(0)
    expect(box).to_have_value("")


@pytest.mark.slow  # chat/test_replies has the same without a browser
def test_another_tab_of_the_same_person_keeps_it_going(
    open_page: OpenPage, backend: FakeBackend, fake_server: tuple[FakeBackend, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, other = open_page(), open_page()
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    other.page.reload()
    other.chats.locator("a").click()
    expect(other.answers.locator(".answer")).to_contain_text("word word")
    monkeypatch.setattr(fake_server[1].replies, "_grace_s", 0.1)
    page.close()
    length = len(other.answers.locator(".answer").inner_text())
    other.wait_until(lambda: len(other.answers.locator(".answer").inner_text()) > length + 2000)
    assert backend.active == 1
    other.stop_button.click()
    other.wait_answered()


@pytest.mark.slow
def test_an_answer_can_be_stopped_before_there_is_news_of_it(open_page: OpenPage, backend: FakeBackend) -> None:
    """A page knows at its start which answers are in progress; a slow machine tells of them later."""
    page, other = open_page(), open_page()
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    other.page.route("**/watch", lambda route: None)
    other.page.reload()
    other.chats.locator("a").click()
    expect(other.answers.locator(".answer")).to_contain_text("word word")
    other.stop_button.click()
    page.wait_answered()
    assert backend.active == 0
    other.page.unroute_all(behavior="ignoreErrors")
