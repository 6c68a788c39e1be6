"""Texts that would run are looked at in a real browser: none of them does."""

from __future__ import annotations

from playwright.sync_api import Dialog, expect

from qwen35mm.web import Server
from tests.chat.fake_backend import FakeBackend
from tests.chat.helpers import create
from tests.security.scripts import PAYLOADS
from tests.web.browser import ChatPage

# What a payload would do, where it ran, is to set `window.ran`.
_RAN = "() => [window, ...document.querySelectorAll('iframe')].some((each) => (each.contentWindow ?? each).ran)"


def test_no_message_title_or_name_runs(page: ChatPage, fake_server: tuple[FakeBackend, Server]) -> None:
    dialogs: list[str] = []

    def note(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.page.on("dialog", note)
    active = ":is(script, iframe, object, embed, form, style, img, video, svg:not(.icon[aria-hidden]))"
    for first in range(2):
        page.new_chat()
        page.ask("echo " + "\n\n".join(PAYLOADS[first::2]))
        page.wait_answered()
        assert page.answers.last.locator(".block").count() > 10
        found = page.answers.last.locator(f".block {active}").evaluate_all("(all) => all.map((each) => each.outerHTML)")
        assert found == []
    store = fake_server[1].store
    for title in PAYLOADS[::9]:
        create(store, "local", title=title)
        store.save_preset("local", title[:60], {})
    page.page.reload()
    expect(page.titles).to_have_count(2 + len(PAYLOADS[::9]))
    page.chats.first.locator("a").click()
    expect(page.page.locator("h1.title")).to_have_text(page.titles.first.inner_text())
    file = {"name": '"><img src=x onerror=window.ran=1>.txt', "mimeType": "text/plain", "buffer": b"A note."}
    page.page.locator(".composer input[type=file]").first.set_input_files([file])  # pyright: ignore[reportArgumentType]
    expect(page.thumbnails).to_have_count(1)
    page.page.wait_for_timeout(200)
    assert page.page.evaluate(_RAN) is False
    assert dialogs == []
