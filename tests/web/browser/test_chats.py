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
from tests.chat.fake_backend import PHASES, FakeBackend
from tests.chat.helpers import full_disk
from tests.web.browser import ChatPage, chat_pages

pytestmark = pytest.mark.browser


def texts_of(backend: FakeBackend) -> list[str]:
    """The prompt's texts of the last call."""
    return [message.text.strip() for message in backend.calls[-1].messages]


def test_edits_and_other_answers_are_branches_and_what_is_deleted_is_gone(
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
    # Another answer stands beside the first.
    page.tool(page.answers.last, "Regenerate").click()
    page.wait_until(lambda: len(backend.calls) == 4)
    page.wait_answered(2)
    assert texts_of(backend) == ["first", "1 image", "echo more"]
    expect(page.answers.last.locator(".branches")).to_contain_text("2/2")
    page.tool(page.answers.last, "Previous branch").click()
    expect(page.answers.last.locator(".branches")).to_contain_text("1/2")
    # An answer in one's own words is a branch, too, and the next prompt is built on it.
    page.tool(page.answers.last, "Edit").click()
    field = page.answers.last.get_by_label("Answer", exact=True)
    expect(field).to_be_focused()
    expect(field).to_have_value("more ")
    field.fill("a slip")
    field.press("Escape")
    expect(page.answers.last.locator(".answer")).to_have_text("more")
    page.tool(page.answers.last, "Edit").click()
    field.fill("my **own** words")
    page.page.reload()
    expect(field).to_have_value("my **own** words")
    field.press("Control+Enter")
    expect(page.answers.last.locator(".answer strong")).to_have_text("own")
    expect(page.answers.last.locator(".edited")).to_have_text("Edited")
    expect(page.box).to_be_focused()
    page.ask("echo two")
    page.wait_answered(3)
    assert texts_of(backend)[2:] == ["echo more", "my **own** words", "echo two"]
    page.tool(page.questions.last, "Delete").click()
    page.dialog.get_by_role("button", name="Delete").click()
    expect(page.questions).to_have_count(2)
    page.page.reload()
    expect(page.questions).to_have_count(2)
    expect(page.answers.last.locator(".edited")).to_have_text("Edited")


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


def test_an_answer_shows_its_speed_goes_on_after_a_reload_and_ends_by_stop(
    page: ChatPage, backend: FakeBackend
) -> None:
    page.ask("slow")
    pace, answer = page.work.locator(".pace"), page.answers.first.locator(".answer")
    expect(pace).to_have_text(re.compile(r"^\d+ tokens · 40\.0 tokens/s$"))
    # It is another one many times a second: nobody wants it read out.
    assert pace.evaluate("pace => pace.closest('[aria-live], [role=status], [role=alert]').ariaLive") == "off"
    expect(pace).not_to_have_text(pace.inner_text())
    shown = answer.inner_text().strip()
    assert shown.startswith("word word")
    page.page.reload()
    expect(answer).to_contain_text(shown)
    length = len(answer.inner_text())
    page.wait_until(lambda: len(answer.inner_text()) > length)
    # What is sent meanwhile waits for its end.
    page.ask("echo next")
    expect(page.outbox).to_contain_text("echo next")
    expect(page.box).to_have_value("")
    page.outbox.get_by_role("button", name="Edit before sending").click()
    expect(page.box).to_have_value("echo next")
    page.send_button.click()
    page.ask("echo last")
    expect(page.outbox).to_have_count(2)
    page.box.fill("the one after")
    assert (len(backend.calls), backend.active) == (1, 1)
    page.stop_button.click()
    assert page.wait_answered(3) == "last"
    assert backend.active == 0
    expect(page.outbox).to_have_count(0)
    expect(page.box).to_have_value("the one after")
    assert texts_of(backend) == ["slow", answer.inner_text().strip(), "echo next", "next", "echo last"]
    page.tool(page.answers.first, "Cost of this answer").click()
    cost = page.answers.first.locator(".cost")
    expect(cost).to_contain_text("First token after")
    expect(cost).not_to_contain_text("Memory")


def test_a_draft_survives_a_reload_with_its_files(page: ChatPage, samples: Path) -> None:
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


def test_a_message_its_answer_and_a_draft_stay_with_their_chat(
    page: ChatPage, backend: FakeBackend, samples: Path
) -> None:
    page.ask("slow")
    expect(page.answers.locator(".answer")).to_contain_text("word word")
    page.new_chat()
    page.ask("echo this")
    assert page.wait_answered() == "this"
    # A message whose file comes late, when something else is shown and typed.
    held: list[Route] = []
    page.page.route("**/upload?*", lambda route: held.append(route))
    with page.page.expect_file_chooser() as chooser:
        page.add("Add files")
    chooser.value.set_files(samples / "one-shape.png")
    page.ask("which?")
    expect(page.outbox).to_contain_text("which? · one-shape.png")
    page.box.fill("typed meanwhile")
    page.titles.get_by_text("slow").click()
    expect(page.questions).to_have_text(re.compile("slow"))
    expect(page.box).to_have_value("")
    page.box.fill("for the other")
    page.wait_until(lambda: bool(held))
    held[0].continue_()
    page.page.unroute("**/upload?*")
    page.wait_until(lambda: len(backend.calls) == 3)
    assert texts_of(backend) == ["echo this", "this", "which?"]
    # The other answer went on all the time.
    assert backend.active >= 1
    expect(page.stop_button).to_be_visible()
    length = len(page.answers.locator(".answer").inner_text())
    page.wait_until(lambda: len(page.answers.locator(".answer").inner_text()) > length)
    page.stop_button.click()
    page.wait_answered()
    page.titles.get_by_text("echo this").click()
    # Its answer may still be in progress, which the page is told of a moment after it has opened the chat.
    page.wait_ending("1 image")
    expect(page.answers).to_have_count(2)
    # Back and Forward walk between them: this, slow, this.
    drafts = {"slow": "for the other", "echo this": "typed meanwhile"}
    for walk, name in [("back", "slow"), ("back", "echo this"), ("forward", "slow"), ("forward", "echo this")]:
        page.page.evaluate(f"history.{walk}()")
        expect(page.questions.first).to_have_text(re.compile(name))
        expect(page.box).to_have_value(drafts[name])
        expect(page.page.locator(".chat.current")).to_have_text(re.compile(name))
    page.page.evaluate("history.go(-2)")
    expect(page.questions.first).to_have_text(re.compile("echo this"))
    # The list marks what is being answered, and answers that nobody has seen.
    page.new_chat()
    page.ask("phases")
    page.wait_until(lambda: backend.active == 1)
    page.new_chat()
    answering, new = (page.chats.get_by_role("img", name=name) for name in ("Answering", "New answer"))
    expect(answering).to_have_count(1)
    for _ in PHASES:
        backend.next_phase()
    expect(new).to_have_count(1)
    expect(answering).to_have_count(0)
    page.titles.get_by_text("phases").click()
    expect(new).to_have_count(0)


def test_an_export_can_be_taken_in_again(page: ChatPage, samples: Path, tmp_path: Path) -> None:
    page.ask("which?", [samples / "one-shape.png"])
    page.wait_answered()
    with page.page.expect_download() as download:
        page.open_settings().get_by_role("button", name="Export").click()
    path = tmp_path / "chats.zip"
    download.value.save_as(path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert any(name.startswith("media/") for name in names)
        (conversation,) = [json.loads(archive.read(name)) for name in names if name.startswith("conversations/")]
        assert "1 image" in json.dumps(conversation)
    page.page.get_by_role("button", name="Options for which?").click()
    with page.page.expect_download() as download:
        page.page.get_by_role("button", name="Export as Markdown").click()
    text = Path(download.value.path()).read_text("utf-8")
    assert "1 image" in text.split("which?")[-1]
    with page.page.expect_file_chooser() as chooser:
        page.open_settings().get_by_role("button", name="Import").click()
    chooser.value.set_files([str(path)])
    expect(page.toasts).to_contain_text("1 chat was already here.")
    expect(page.chats).to_have_count(1)
    page.page.get_by_role("button", name="Options for which?").click()
    page.page.locator(".chat").get_by_role("button", name="Delete").click()
    expect(page.chats).to_have_count(0)
    with page.page.expect_file_chooser() as chooser:
        page.page.get_by_role("button", name="Import").click()
    chooser.value.set_files([str(path)])
    expect(page.toasts).to_contain_text("1 chat imported.")
    page.chats.first.locator("a").click()
    expect(page.questions.locator("img")).to_have_count(1)
    expect(page.answers.locator(".answer")).to_contain_text("1 image")


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
    expect(problem).to_have_text("Stopped")
    page.page.reload()
    expect(page.answers.locator(".answer")).to_have_text(text)
    expect(problem).to_have_text("Stopped")


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
