"""Sessions in a real browser: turns that follow each other, Stop, new chats, several people, pages that go away."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from qwen35mm.ui import serve
from tests.ui.browser import ChatPage, OpenPage
from tests.ui.fake_backend import FakeBackend

pytestmark = pytest.mark.browser


def test_a_follow_up_brings_the_conversation(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("echo One")
    page.wait_answered(1)
    page.ask("echo Two")
    assert page.wait_answered(2) == "Two"
    roles = [(message.role, message.text.strip()) for message in backend.calls[-1].messages]
    assert roles == [("user", "echo One"), ("assistant", "One"), ("user", "echo Two")]


def test_later_turns_get_the_plans_of_earlier_ones(page: ChatPage, backend: FakeBackend, samples: Path) -> None:
    page.ask("What is this?", [samples / "one-shape.png"])
    page.wait_answered(1)
    page.ask("And its colour?")
    page.wait_answered(2)
    first, second = (call.messages[0].media[0] for call in backend.calls)
    assert first.plan is None
    assert second.plan is not None
    assert second.plan.digest == "00" * 32


def test_media_are_not_sent_again(page: ChatPage, samples: Path) -> None:
    page.ask("What is this?", [samples / "one-shape.png", samples / "moves-right.mp4"])
    page.wait_answered(1)
    page.page.wait_for_function("[...document.querySelectorAll('#chat img')].every(image => image.complete)")
    page.page.wait_for_function("document.querySelector('#chat video').readyState === 4")
    requests: list[str] = []
    page.page.on("request", lambda request: requests.append(f"{request.method} {request.url}"))
    page.ask("echo more " * 50)
    page.wait_answered(2)
    assert requests
    assert [request for request in requests if "file=" in request or "upload" in request] == []


def test_the_message_box_keeps_what_is_typed_during_an_answer(page: ChatPage) -> None:
    page.ask("slow")
    expect(page.stop_button).to_be_visible()
    page.box.fill("next question")
    text = page.answers.last.inner_text()
    expect(page.answers.last).not_to_have_text(text)
    page.box.press("Enter")
    assert page.box.input_value().strip() == "next question"
    page.stop_button.click()
    expect(page.send_button).to_be_visible()
    assert page.box.input_value().strip() == "next question"
    expect(page.questions).to_have_count(1)


def test_stop_ends_the_work_and_keeps_the_text(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers).to_contain_text("word word")
    assert backend.active == 1
    page.stop_button.click()
    page.wait_until(lambda: backend.active == 0)
    assert page.wait_answered().startswith("word word")
    expect(page.status).to_have_text("Stopped.")
    page.ask("echo on")
    assert page.wait_answered(2) == "on"
    assert backend.calls[-1].messages[1].text.startswith("word word")


def test_stop_before_the_answer(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("phases")
    expect(page.status).to_contain_text("Waiting in line, 1 ahead")
    page.stop_button.click()
    page.wait_until(lambda: backend.active == 0)
    assert page.wait_answered() == "Stopped before the answer."
    expect(page.status).to_contain_text("The model won't see this question again.")
    page.ask("echo on")
    page.wait_answered(2)
    assert len(backend.calls[-1].messages) == 1


def test_new_chat_forgets(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("echo One")
    page.wait_answered()
    page.page.locator("#new-chat").click()
    expect(page.answers).to_have_count(0)
    expect(page.examples.first).to_be_visible()
    page.ask("echo Two")
    page.wait_answered()
    assert len(backend.calls[-1].messages) == 1


def test_new_chat_during_an_answer(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers).to_contain_text("word word")
    page.page.locator("#new-chat").click()
    page.wait_until(lambda: backend.active == 0)
    expect(page.send_button).to_be_visible()
    expect(page.answers).to_have_count(0)
    page.ask("echo Two")
    assert page.wait_answered() == "Two"


def test_closing_the_page_ends_the_work(open_page: OpenPage, backend: FakeBackend) -> None:
    leaving, staying = open_page(), open_page()
    leaving.ask("slow")
    expect(leaving.answers).to_contain_text("word word")
    leaving.close()
    staying.wait_until(lambda: backend.active == 0)


def test_closing_the_page_before_the_answer_ends_the_work(open_page: OpenPage, backend: FakeBackend) -> None:
    leaving, staying = open_page(), open_page()
    leaving.ask("phases")
    expect(leaving.status).to_contain_text("Waiting in line")
    leaving.close()
    staying.wait_until(lambda: backend.active == 0)


@pytest.mark.parametrize("question", ["slow", "phases"])
def test_ending_the_server_in_the_middle_ends_the_work_and_deletes_the_uploads(
    browser: Browser, samples: Path, question: str
) -> None:
    backend = FakeBackend()
    server = serve(backend, port=0)
    page = ChatPage(browser, server.url)
    page.ask(question, [samples / "wide.jpg"])
    page.wait_until(lambda: backend.active == 1)
    upload = backend.calls[0].messages[0].media[0].source
    assert isinstance(upload, Path)
    assert upload.is_file()
    server.close()
    page.wait_until(lambda: backend.active == 0)
    assert not upload.exists()
    page.close()


def test_two_people_do_not_see_each_other(open_page: OpenPage, backend: FakeBackend) -> None:
    one, other = open_page(), open_page()
    one.ask("slow")
    expect(one.answers).to_contain_text("word word")
    other.ask("echo Mine")
    assert other.wait_answered() == "Mine"
    expect(other.questions).to_have_text("echo Mine")
    assert backend.active == 1
    one.stop_button.click()
    one.wait_answered()
    expect(one.questions).to_have_text("slow")
