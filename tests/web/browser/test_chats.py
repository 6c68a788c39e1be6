"""Conversations in a browser: branches, reloads, the sidebar."""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend
from tests.chat.helpers import full_disk
from tests.web.browser import ChatPage, chat_pages

pytestmark = pytest.mark.browser


def texts_of(backend: FakeBackend) -> list[str]:
    """The prompt's texts of the last call."""
    return [message.text.strip() for message in backend.calls[-1].messages]


def test_an_edited_message_keeps_its_files_and_begins_a_branch(
    page: ChatPage, backend: FakeBackend, samples: Path
) -> None:
    page.ask("first", [samples / "one-shape.png"])
    page.wait_answered()
    page.ask("echo more")
    page.wait_answered(2)
    page.tool(page.questions.first, "Edit").click()
    expect(page.box).to_have_value("first")
    expect(page.thumbnails).to_have_count(1)
    page.ask("changed")
    page.wait_answered(1)
    assert [type(part).__name__ for part in backend.calls[-1].messages[0].content] == ["Image", "Text"]
    assert texts_of(backend) == ["changed"]
    branches = page.questions.first.locator(".branches")
    expect(branches).to_contain_text("2/2")
    page.tool(page.questions.first, "Previous branch").click()
    expect(page.questions).to_have_count(2)
    expect(page.questions.first).to_contain_text("first")
    expect(branches).to_contain_text("1/2")
    page.tool(page.questions.first, "Next branch").click()
    expect(page.questions).to_have_count(1)
    expect(page.questions.first).to_contain_text("changed")


def test_another_answer_stands_beside_the_first(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("echo one")
    page.wait_answered()
    page.tool(page.answers.last, "Regenerate").click()
    page.wait_until(lambda: len(backend.calls) == 2)
    page.wait_answered()
    assert texts_of(backend) == ["echo one"]
    expect(page.answers.last.locator(".branches")).to_contain_text("2/2")
    page.tool(page.answers.last, "Previous branch").click()
    expect(page.answers.last.locator(".branches")).to_contain_text("1/2")


def test_a_deleted_message_is_gone_with_what_follows(page: ChatPage) -> None:
    page.ask("echo one")
    page.wait_answered()
    page.ask("echo two")
    page.wait_answered(2)
    page.tool(page.questions.last, "Delete").click()
    page.dialog.get_by_role("button", name="Delete").click()
    expect(page.questions).to_have_count(1)
    page.page.reload()
    expect(page.questions).to_have_count(1)


@pytest.mark.slow
def test_a_question_whose_answer_was_deleted_is_answered_by_a_button(page: ChatPage) -> None:
    page.ask("echo one")
    page.wait_answered()
    answer = page.tool(page.questions.last, "Answer this question")
    expect(answer).to_have_count(0)
    page.tool(page.answers.last, "Delete").click()
    page.dialog.get_by_role("button", name="Delete").click()
    expect(page.answers).to_have_count(0)
    page.ask("echo two")
    expect(page.toasts).to_contain_text("Answer it first")
    expect(page.box).to_have_value("echo two")
    page.toasts.get_by_role("button", name="Dismiss").click()
    answer.click()
    assert page.wait_answered() == "one"
    expect(answer).to_have_count(0)
    page.box.press("Enter")
    assert page.wait_answered(2) == "two"


def test_a_message_that_is_sent_during_an_answer_waits_for_its_end(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.ask("echo next")
    expect(page.outbox).to_contain_text("echo next")
    expect(page.box).to_have_value("")
    page.outbox.get_by_role("button", name="Edit before sending").click()
    expect(page.box).to_have_value("echo next")
    page.send_button.click()
    page.ask("echo last")
    expect(page.outbox).to_have_count(2)
    page.box.fill("the one after")
    page.stop_button.click()
    assert page.wait_answered(3) == "last"
    expect(page.outbox).to_have_count(0)
    expect(page.box).to_have_value("the one after")
    assert texts_of(backend)[2:] == ["echo next", "next", "echo last"]


def test_a_message_goes_to_the_chat_where_it_was_sent(page: ChatPage, backend: FakeBackend, samples: Path) -> None:
    """Also where its file comes later, and something else is shown and typed by then."""
    for name in ("other", "this"):
        page.new_chat()
        page.ask(f"echo {name}")
        page.wait_answered()
    held: list[Route] = []
    page.page.route("**/upload?*", lambda route: held.append(route))
    with page.page.expect_file_chooser() as chooser:
        page.page.get_by_role("button", name="Add pictures, videos, text files or PDFs").click()
    chooser.value.set_files(samples / "one-shape.png")
    page.ask("which?")
    expect(page.outbox).to_contain_text("which? · one-shape.png")
    page.box.fill("typed meanwhile")
    page.titles.get_by_text("echo other").click()
    expect(page.questions).to_have_text(re.compile("echo other"))
    expect(page.box).to_have_value("")
    page.box.fill("for the other")
    page.wait_until(lambda: bool(held))
    held[0].continue_()
    page.page.unroute("**/upload?*")
    page.wait_until(lambda: len(backend.calls) == 3)
    assert texts_of(backend) == ["echo this", "this", "which?"]
    expect(page.questions).to_have_count(1)
    page.titles.get_by_text("echo this").click()
    # Its answer may still be in progress, which the page is told of a moment after it has opened the chat.
    page.wait_ending("1 image")
    expect(page.answers).to_have_count(2)
    expect(page.box).to_have_value("typed meanwhile")
    page.titles.get_by_text("echo other").click()
    expect(page.box).to_have_value("for the other")


def test_what_is_written_and_its_files_are_there_after_a_reload(page: ChatPage, samples: Path) -> None:
    page.ask("echo one")
    page.wait_answered()
    page.attach(samples / "one-shape.png", samples / "moves-right.mp4")
    page.box.fill("which?")
    page.tool(page.questions.last, "Edit").click()
    page.box.fill("echo changed")
    page.page.reload()
    expect(page.box).to_have_value("echo changed")
    expect(page.page.locator(".editing")).to_be_visible()
    page.box.press("Enter")
    page.wait_ending("changed")
    expect(page.box).to_have_value("which?")
    expect(page.thumbnails).to_have_count(2)
    expect(page.thumbnails.last.locator(".label")).to_contain_text("frames")
    page.box.press("Enter")
    assert page.wait_answered(2) == "1 image, 1 video"


def test_stop_ends_the_work_and_keeps_the_text(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.stop_button.click()
    text = page.wait_answered()
    assert text.startswith("word word")
    assert backend.active == 0
    page.ask("echo on")
    page.wait_answered(2)
    assert texts_of(backend)[1] == text


def test_a_reload_in_the_middle_of_an_answer_loses_nothing(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    shown = page.answers.locator(".answer").inner_text().strip()
    page.page.reload()
    expect(page.answers.locator(".answer")).to_contain_text(shown)
    expect(page.stop_button).to_be_visible()
    length = len(page.answers.locator(".answer").inner_text())
    page.wait_until(lambda: len(page.answers.locator(".answer").inner_text()) > length)
    assert len(backend.calls) == 1
    page.stop_button.click()
    page.wait_answered()


def test_a_new_chat_during_an_answer_leaves_it_running(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.new_chat()
    page.ask("echo beside")
    assert page.wait_answered() == "beside"
    assert backend.active == 1
    page.chats.filter(has_text="slow").locator("a").click()
    expect(page.stop_button).to_be_visible()
    length = len(page.answers.locator(".answer").inner_text())
    page.wait_until(lambda: len(page.answers.locator(".answer").inner_text()) > length)
    page.stop_button.click()
    page.wait_answered()


def test_back_and_forward_walk_between_chats(page: ChatPage) -> None:
    for name in ("one", "two"):
        page.new_chat()
        page.ask(f"echo {name}")
        page.wait_answered()
    page.titles.get_by_text("echo one").click()
    expect(page.questions).to_have_text(re.compile("echo one"))
    page.box.fill("typed here")
    for walk, name in [("back", "two"), ("back", "one"), ("forward", "two"), ("forward", "one")]:
        page.page.evaluate(f"history.{walk}()")
        expect(page.questions).to_have_text(re.compile(f"echo {name}"))
        expect(page.box).to_have_value("typed here" if name == "one" else "")
        expect(page.page.locator(".chat.current")).to_have_text(re.compile(f"echo {name}"))
    page.page.evaluate("history.go(-2)")
    expect(page.questions).to_have_text(re.compile("echo one"))


def test_conversations_are_found_renamed_and_deleted(page: ChatPage) -> None:
    for text in ("echo apples", "echo pears"):
        page.ask(text)
        page.wait_answered()
        page.new_chat()
    expect(page.chats).to_have_count(2)
    page.page.get_by_label("Search chats").fill("APPLES")
    expect(page.titles).to_have_text(["echo apples"])
    page.page.get_by_label("Options for echo apples").click()
    page.page.get_by_role("button", name="Rename").click()
    page.page.get_by_label("Title").fill("Fruit")
    page.page.get_by_label("Title").press("Enter")
    expect(page.titles).to_have_text(["Fruit"])
    page.page.get_by_label("Options for Fruit").click()
    page.page.locator(".chat").get_by_role("button", name="Delete").click()
    expect(page.chats).to_have_count(0)
    page.page.get_by_label("Search chats").fill("")
    expect(page.titles).to_have_text(["echo pears"])


def test_an_export_can_be_taken_in_again(page: ChatPage, samples: Path, tmp_path: Path) -> None:
    page.ask("which?", [samples / "one-shape.png"])
    page.wait_answered()
    with page.page.expect_download() as download:
        page.page.get_by_role("button", name="Export all chats").click()
    path = tmp_path / "chats.zip"
    download.value.save_as(path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert any(name.startswith("media/") for name in names)
        (conversation,) = [json.loads(archive.read(name)) for name in names if name.startswith("conversations/")]
        assert "1 image" in json.dumps(conversation)
    with page.page.expect_file_chooser() as chooser:
        page.page.get_by_role("button", name="Import").click()
    chooser.value.set_files([str(path)])
    expect(page.toasts).to_contain_text("1 chat imported.")
    expect(page.chats).to_have_count(2)
    page.chats.first.locator("a").click()
    expect(page.questions.locator("img")).to_have_count(1)
    expect(page.answers.locator(".answer")).to_contain_text("1 image")


def test_a_conversation_is_saved_as_markdown(page: ChatPage, tmp_path: Path) -> None:
    page.ask("echo Hello there")
    page.wait_answered()
    page.page.get_by_label("Options for echo Hello there").click()
    with page.page.expect_download() as download:
        page.page.get_by_role("button", name="Export as Markdown").click()
    download.value.save_as(tmp_path / "chat.md")
    text = (tmp_path / "chat.md").read_text(encoding="utf-8")
    assert "echo Hello there" in text
    assert "Hello there" in text.split("echo Hello there")[-1]


@pytest.mark.slow  # chat/test_replies has the same without a browser
def test_an_answer_that_a_full_disk_cuts_off_stays_and_is_stored_later(
    page: ChatPage, fake_server: tuple[FakeBackend, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = page.answers.last.locator(".problem")
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    with full_disk(fake_server[1].store):
        expect(problem).to_contain_text("This answer isn't saved: The disk is full")
        # Only now: a slow page would have come too late to watch an answer that waits no longer for anybody.
        monkeypatch.setattr(fake_server[1].replies, "_grace_s", 0.5)
        page.stop_button.click()
        text = page.wait_answered()
        for _ in range(2):
            expect(problem).to_contain_text("This answer isn't saved: The disk is full")
            expect(page.answers.locator(".answer")).to_have_text(text)
            page.page.reload()
    expect(problem).to_be_hidden()
    page.page.reload()
    expect(page.answers.locator(".answer")).to_have_text(text)
    expect(problem).to_be_hidden()


def test_ending_the_server_keeps_what_was_shown(browser: Browser, tmp_path: Path) -> None:
    backend = FakeBackend()
    server = serve(backend, port=0, data_dir=tmp_path / "data")
    with chat_pages(browser, server.address) as open_page:
        page = open_page()
        page.ask("slow")
        expect(page.answers.locator(".answer")).to_contain_text("word word")
        shown = page.answers.locator(".answer").inner_text().strip()
        page.server_ends = True
        server.close()
        page.wait_until(lambda: backend.active == 0)
    with contextlib.closing(ConversationStore(tmp_path / "data")) as store:
        (conversation,) = store.find("local")
        _, tree = store.read("local", conversation.id)
        (answer,) = (node for node in tree.nodes.values() if node.role == "assistant")
    assert answer.text.startswith(shown)
