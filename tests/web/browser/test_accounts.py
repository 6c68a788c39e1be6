"""Logging in and out in a browser, another password, and what the browser keeps of people."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from qwen35mm.chat import accounts
from qwen35mm.chat.accounts import AccountFile
from qwen35mm.web import serve
from tests.chat.fake_backend import FakeBackend

pytestmark = pytest.mark.browser


def log_in(tab: Page, name: str, password: str) -> None:
    form = tab.locator("form.login")
    form.get_by_label("Name").fill(name)
    form.get_by_label("Password").fill(password)
    form.get_by_role("button", name="Log in").click()


def take(tab: Page, entry: str) -> None:
    """Takes an entry of the account's dialog."""
    tab.get_by_role("button", name="Account of ann").click()
    tab.locator("dialog[open]").get_by_role("button", name=entry, exact=True).click()


def test_who_logs_out_leaves_nothing_to_the_next(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "COST", (2, 8, 1))
    monkeypatch.setattr("qwen35mm.web.serving.server.is_shared", lambda host: True)
    path = tmp_path / "accounts"
    for name in ("ann", "bob"):
        AccountFile(path).add(name, f"{name}'s words")
    server = serve(FakeBackend(), port=0, auth_file=path, guests=True, data_dir=tmp_path / "data")
    with contextlib.closing(server), contextlib.closing(browser.new_context(reduced_motion="reduce")) as context:
        tab = context.new_page()
        tab.goto(server.url)
        box = tab.locator(".composer textarea")
        box.fill("echo a guest")
        box.press("Enter")
        expect(tab.locator(".message.assistant .answer")).to_have_text("a guest")
        of_the_guest = tab.url
        tab.locator(".side-foot").get_by_role("button", name="Log in").click()
        log_in(tab, "ann", "ann's words")
        expect(tab.get_by_role("button", name="Account of ann")).to_be_visible()
        expect(tab.locator(".chat")).to_have_count(0)
        tab.goto(of_the_guest)
        toasts = tab.locator(".toasts")
        expect(toasts).to_contain_text("chat no longer exists")
        expect(tab.locator(".message")).to_have_count(0)
        # Each has one answer at a time.
        box.fill("slow")
        box.press("Enter")
        expect(tab.locator(".message.assistant .answer")).to_contain_text("word word")
        tab.get_by_role("button", name="New chat").click()
        box.fill("echo too early")
        box.press("Enter")
        expect(tab.locator(".outbox")).to_contain_text("Waiting for another chat's answer")
        tab.locator(".chat a").click()
        tab.get_by_role("button", name="Stop", exact=True).click()
        expect(tab.locator(".chat")).to_have_count(2)
        tab.get_by_role("button", name="New chat").click()
        box.fill("a draft of ann's")

        take(tab, "Change password")
        dialog = tab.locator("dialog[open]")

        def change(old: str, new: str, again: str) -> None:
            dialog.get_by_label("Old password").fill(old)
            dialog.get_by_label("New password", exact=True).fill(new)
            dialog.get_by_label("Repeat new password").fill(again)
            dialog.get_by_role("button", name="Change password").click()

        change("ann's words", "fresh words", "other words")
        expect(dialog.get_by_role("alert")).to_have_text("The new passwords don't match.")
        change("a guess", "fresh words", "fresh words")
        expect(dialog.get_by_role("alert")).to_have_text("The old password is wrong.")
        change("ann's words", "fresh words", "fresh words")
        expect(dialog).to_contain_text("Password changed")
        dialog.get_by_role("button", name="Close").click()
        assert AccountFile(path).check("ann", "fresh words")

        other = context.new_page()
        other.goto(server.url)
        expect(other.get_by_role("button", name="Account of ann")).to_be_visible()
        # What isn't in front is drawn rarely, and each click waits for that.
        tab.bring_to_front()
        take(tab, "Log out")
        for each in (tab, other):
            expect(each.locator(".side-foot").get_by_role("button", name="Log in")).to_be_visible()
        expect(box).to_have_value("")
        expect(tab.locator(".chat")).to_have_count(1)
        assert "ann" not in tab.evaluate("JSON.stringify(localStorage)")
        # A session that ended by itself leaves what was written for the same person only.
        tab.locator(".side-foot").get_by_role("button", name="Log in").click()
        log_in(tab, "ann", "fresh words")
        expect(tab.get_by_role("button", name="Account of ann")).to_be_visible()
        box.fill("a draft of ann's")
        tab.evaluate("localStorage.removeItem('qwen35mm-session')")
        tab.goto("about:blank")
        tab.goto(server.url)
        expect(box).to_have_value("")
