"""Texts that would run are looked at in a real browser: none of them does."""

from __future__ import annotations

from playwright.sync_api import Dialog, expect

from tests.security.scripts import PAYLOADS
from tests.web.browser import ChatPage

# What a payload would do, where it ran, is to set `window.ran`.
_RAN = "() => [window, ...document.querySelectorAll('iframe')].some((each) => (each.contentWindow ?? each).ran)"


def test_no_message_title_or_name_runs(page: ChatPage) -> None:
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
    for title in PAYLOADS[:60:9]:
        page.page.evaluate(
            """async (title) => {
                const ask = (name, body) => fetch(`qwen35mm/api/${name}`, {method: "POST", body: JSON.stringify(body),
                    headers: {"x-qwen35mm": "1", "content-type": "application/json"}}).then((answer) => answer.json());
                const { conversations } = await ask("list", {});
                await ask("rename", { conversation: conversations[0].id, title });
                await ask("save_preset", { name: title.slice(0, 60), settings: {} });
            }""",
            title,
        )
        page.page.reload()
        expect(page.titles).not_to_have_count(0)
    file = {"name": '"><img src=x onerror=window.ran=1>.txt', "mimeType": "text/plain", "buffer": b"A note."}
    page.page.locator(".composer input[type=file]").first.set_input_files([file])  # pyright: ignore[reportArgumentType]
    expect(page.thumbnails).to_have_count(1)
    page.page.wait_for_timeout(200)
    assert page.page.evaluate(_RAN) is False
    assert dialogs == []
