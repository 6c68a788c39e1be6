"""The connection is lost, and comes back; what is typed, sent and answered meanwhile."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

from qwen35mm.chat.quotas import ALONE
from qwen35mm.web import serve
from qwen35mm.web.serving import app
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, chat_pages

pytestmark = pytest.mark.browser

LOST = "The connection is lost."


def line(page: ChatPage) -> Locator:
    """What is said of the connection."""
    return page.page.locator(".connection")


def test_without_a_network_nothing_is_lost_and_all_goes_on(page: ChatPage, samples: Path) -> None:
    page.server_ends = True
    # A message whose answer was lost on the way is there once.
    page.page.route("**/api/send", lambda route: (route.fetch(), route.abort()), times=1)
    page.ask("echo only once")
    page.wait_ending("only once")
    expect(page.titles).to_have_count(1)
    expect(page.questions.locator(".bubble", has_text=re.compile("^echo only once$"))).to_have_count(1)
    page.ask("slow")
    expect(page.work).to_contain_text("Writing")
    page.context.set_offline(True)
    expect(line(page)).to_contain_text(LOST)
    expect(line(page)).to_contain_text(re.compile(r"Retrying in \d s|Connecting"))
    expect(page.work).to_have_text("Paused until the connection is back")
    # Only its words are read out, and not each second.
    assert line(page).locator(".countdown").evaluate("e => e.closest('[role=status], [aria-live]')") is None
    with page.page.expect_file_chooser() as chooser:
        page.add("Add files")
    chooser.value.set_files(str(samples / "one-shape.png"))
    page.box.fill("echo queued")
    page.box.press("Enter")
    expect(page.outbox).to_contain_text("Waiting for the connection")
    page.box.fill("typed meanwhile")
    page.page.get_by_role("button", name="Retry now").click()
    expect(line(page)).to_contain_text(LOST)
    # What can't be done now is said once, there.
    page.stop_button.click()
    expect(page.toasts.locator(".toast")).to_have_count(0)

    page.context.set_offline(False)
    expect(line(page)).to_contain_text("Reconnected")
    expect(page.work).to_contain_text("Writing")
    expect(page.outbox).to_contain_text("Waiting for the answer")
    page.stop_button.click()
    page.wait_ending("queued")
    expect(page.questions.last.locator("img")).to_have_count(1)
    expect(page.box).to_have_value("typed meanwhile")


@pytest.mark.slow
def test_a_program_that_was_started_again_is_found_again(browser: Browser, tmp_path: Path) -> None:
    first = serve(FakeBackend(), port=0, data_dir=tmp_path, token="the-first")
    port = int(first.url.split(":")[-1].strip("/"))
    with chat_pages(browser, first.address) as open_page:
        page = open_page()
        page.server_ends = True
        page.ask("slow")
        expect(page.work).to_contain_text("Writing")
        page.box.fill("still here")
        first.close()
        expect(line(page)).to_contain_text(LOST)

        second = serve(FakeBackend(), port=port, data_dir=tmp_path, token="the-first")
        expect(line(page)).to_contain_text("Reconnected")
        expect(page.tool(page.answers.last, "Continue")).to_be_visible()
        expect(page.box).to_have_value("still here")
        second.close()
        page.box.fill("echo sent while it was away")
        expect(line(page)).to_contain_text(LOST)
        page.box.press("Enter")

        third = serve(FakeBackend(), port=port, data_dir=tmp_path, token="another")
        expect(line(page)).to_contain_text("Open the address it printed")
        expect(page.outbox).to_contain_text("Waiting for the connection")
        page.box.fill("still here")
        other = page.context.new_page()
        other.goto(third.address)
        page.page.bring_to_front()
        page.wait_ending("sent while it was away")
        expect(page.box).to_have_value("still here")
        third.close()


@pytest.mark.slow
def test_who_was_logged_out_logs_in_and_goes_on(browser: Browser, tmp_path: Path) -> None:
    auth = [("ann", "secret")]
    first = serve(FakeBackend(), port=0, data_dir=tmp_path, auth=auth)
    port = int(first.url.split(":")[-1].strip("/"))

    def log_in(form: Locator) -> None:
        form.get_by_label("Name").fill("ann")
        form.get_by_label("Password").fill("secret")
        form.get_by_role("button", name="Log in").click()

    context = browser.new_context()
    page = context.new_page()
    page.goto(first.url)
    log_in(page.locator("form.login"))
    box = page.locator(".composer textarea")
    box.fill("echo hello again")
    first.close()
    second = serve(FakeBackend(), port=port, data_dir=tmp_path, auth=auth)
    box.press("Enter")
    said = page.locator(".connection")
    expect(said).to_contain_text("You are logged out. What you typed is still here.")
    said.get_by_role("button", name="Log in").click()
    log_in(page.locator("dialog form.login"))
    expect(page.locator(".message.assistant .answer")).to_have_text(re.compile(r"hello again\s*"))
    context.close()
    second.close()


@pytest.mark.slow
def test_a_stream_that_is_refused_says_why(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ALONE", replace(ALONE, watchers=0))
    server = serve(FakeBackend(), port=0)
    with chat_pages(browser, server.address) as open_page:
        page = open_page()
        page.ask("echo Hello")
        expect(page.toasts).to_contain_text("of your pages follow answers")
    server.close()
