"""Several pages at once: tabs of one person, and several people."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage, chat_pages

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


def test_two_people_do_not_see_each_other(browser: Browser, monkeypatch: pytest.MonkeyPatch, samples: Path) -> None:
    monkeypatch.setattr("qwen35mm.web.serving.server.is_shared", lambda host: True)
    backend = FakeBackend()
    server: Server = serve(backend, port=0)
    try:
        with chat_pages(browser, server.address) as open_page:
            ann, ben = open_page(), open_page()
            ann.ask("which secret?", [samples / "one-shape.png"])
            ann.wait_answered()
            picture = ann.questions.locator("img").get_attribute("src")
            ben.page.reload()
            ben.ask("echo mine")
            ben.wait_answered()
            expect(ben.titles).to_have_text(["echo mine"])
            expect(ann.titles).to_have_text(["which secret?"])
            address = ann.page.url
            assert backend.calls[0].tenant != backend.calls[1].tenant
            assert ann.context.request.get(str(picture)).status == 200
            session = "() => JSON.parse(localStorage.getItem('qwen35mm-session')).ticket"
            tickets = [each.page.evaluate(session) for each in (ann, ben)]
            assert ben.context.request.get(str(picture).replace(*tickets)).status == 404
            assert ben.context.request.get(str(picture).partition("?")[0]).status == 401
            ben.page.goto(address)
            expect(ben.toasts).to_contain_text("chat no longer exists")
            expect(ben.questions).to_have_count(0)
            # Where strangers share the page, each has one answer at a time.
            ann.ask("slow")
            expect(ann.answers.last.locator(".answer")).to_contain_text("word word")
            ann.new_chat()
            ann.ask("echo too much")
            expect(ann.toasts).to_contain_text("You already have an answer in progress")
            expect(ann.box).to_have_value("echo too much")
    finally:
        server.close()
