"""Text files in a message: their encodings, and what they begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser


def test_texts_come_in_any_encoding_with_a_preview(page: ChatPage, backend: FakeBackend, tmp_path: Path) -> None:
    (tmp_path / "orte.csv").write_bytes("Name;Straße\nMüller;<i>Weg</i>\n".encode("cp1252"))
    (tmp_path / "size.py").write_bytes(b'print("r\xf3\xbfne")\n')
    page.attach(tmp_path / "orte.csv", tmp_path / "size.py")
    cards = page.thumbnails
    expect(cards.first.get_by_label("Encoding of orte.csv")).to_have_value("Windows-1252")
    cards.first.get_by_role("button", name="Preview").click()
    preview = page.page.get_by_role("dialog", name="Preview of orte.csv")
    expect(preview.locator("th")).to_have_text(["Name", "Straße"])
    expect(preview.locator("td")).to_have_text(["Müller", "<i>Weg</i>"])
    page.page.keyboard.press("Escape")
    # What was judged wrongly is put right by hand.
    encoding = cards.nth(1).get_by_label("Encoding of size.py")
    encoding.select_option("KOI8-R")
    expect(encoding).to_have_value("KOI8-R")
    cards.nth(1).get_by_role("button", name="Preview").click()
    expect(page.page.get_by_role("dialog", name="Preview of size.py").locator("code")).to_contain_text("rС©ne")
    page.page.keyboard.press("Escape")
    encoding.select_option("UTF-8")
    expect(page.toasts).to_contain_text('"size.py" isn\'t text in "UTF-8". Choose another encoding.')
    expect(encoding).to_have_value("KOI8-R")

    # A drawing is a picture, or its source.
    svg = "<svg xmlns='http://www.w3.org/2000/svg' width='90' height='60'><circle r='40' fill='red'/></svg>"
    (tmp_path / "sign.svg").write_text(svg)
    page.attach(tmp_path / "sign.svg")
    expect(cards.nth(2).locator("img")).to_have_js_property("naturalWidth", 512)
    cards.nth(2).get_by_role("button", name="Use its source").click()
    expect(cards.nth(2).get_by_label("Encoding of sign.svg")).to_have_value("UTF-8")
    page.page.get_by_role("button", name="Remove sign.svg").click()

    page.ask("echo read")
    page.wait_answered()
    prompt = backend.calls[0].messages[0].text
    assert "orte.csv" in prompt
    assert "Müller;<i>Weg</i>" in prompt
    assert "rС©ne" in prompt
    files = page.questions.locator(".text-file")
    expect(files.locator("th")).to_have_text(["Name", "Straße"])
    expect(files.nth(1).locator("code .hl-nb")).to_have_text("print")
    binary = tmp_path / "data.txt"
    binary.write_bytes(bytes(range(1, 256)) * 20)
    page.page.locator(".composer input[type=file]").set_input_files(binary)
    expect(page.toasts).to_contain_text("data.txt")
    expect(page.thumbnails).to_have_count(0)
