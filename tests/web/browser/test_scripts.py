"""Texts that would run are looked at in a real browser: none of them does."""

from __future__ import annotations

import httpx
from playwright.sync_api import Dialog, expect

from qwen35mm.web import Server
from tests.chat.fake_backend import FakeBackend
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
    for first in range(6):
        page.new_chat()
        page.ask("echo " + "\n\n".join(PAYLOADS[first::6]))
        page.wait_answered()
        assert page.answers.last.locator(".block").count() > 10
        found = page.answers.last.locator(f".block {active}").evaluate_all("(all) => all.map((each) => each.outerHTML)")
        assert found == []
    token = fake_server[1].token
    assert token is not None
    known = {"authorization": f"Bearer {token.value}", "x-qwen35mm": "1"}
    with httpx.Client(base_url=f"{fake_server[1].url}qwen35mm/api/", headers=known) as client:
        for title in PAYLOADS[:60:9]:
            chat = client.post("list", json={}).json()["conversations"][0]["id"]
            assert client.post("rename", json={"conversation": chat, "title": title}).status_code == 200
            assert client.post("save_preset", json={"name": title[:60], "settings": {}}).status_code == 200
            page.page.reload()
            expect(page.titles).not_to_have_count(0)
    file = {"name": '"><img src=x onerror=window.ran=1>.txt', "mimeType": "text/plain", "buffer": b"A note."}
    page.page.locator(".composer input[type=file]").first.set_input_files([file])  # pyright: ignore[reportArgumentType]
    expect(page.thumbnails).to_have_count(1)
    page.page.wait_for_timeout(200)
    assert page.page.evaluate(_RAN) is False
    assert dialogs == []
