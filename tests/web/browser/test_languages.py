"""What Python says, written by the page in the person's language."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, expect

from qwen35mm.assets import asset_path
from qwen35mm_preprocess.say import decimal, english, percent, say, size, tokens
from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage

pytestmark = pytest.mark.browser

WORDS = [
    "photo of me.png: it can't be read",
    1234,
    decimal(40, 1),
    decimal(1234.56, 1),
    percent(0.5),
    *(size(number) for number in (0, 1, 1023, 1024, 10 * 1024, 18 * 2**20, 5000 * 2**30)),
    say("Writing"),
    say("Only {n} of {m} {m|page|pages} {n|is|are} used.", n=1, m=1000),
    say("{work}, {done}/{total} tokens", work=say("Reading the prompt"), done=512, total=1024),
    say("{first}, {rest}", first=tokens(1), rest=size(1.5 * 2**30)),
    say("Downloading {name}, {done} of {total}", name="Qwen/{n}", done=size(0), total=size(2**40)),
]


def write(page: ChatPage, words: Any) -> str:
    """What the page's `said` makes of it."""
    script = (
        "async (words) => (await import(new URL('./qwen35mm/web/common/words.js', document.baseURI).href)).said(words)"
    )
    return page.page.evaluate(script, words)


@pytest.mark.slow
def test_a_german_page_is_german_where_python_speaks(open_page: OpenPage, backend: FakeBackend, samples: Path) -> None:
    page = open_page(locale="de-DE")
    page.page.locator(".composer input[type=file]").set_input_files(samples / "moves-right.mp4")
    cost = re.compile(r"^\d+ Einzelbilder, [\d.]+ Tokens$")
    expect(page.thumbnails.locator(".label")).to_have_text(cost)
    page.box.fill("phases")
    page.box.press("Enter")
    for words in (
        "In der Warteschlange, 1 davor",
        "Liest das Video, 12/24 Einzelbilder",
        re.compile(r"^Kodiert das Video, 50\s%$"),
        "Liest den Prompt, 512/1.024 Tokens",
    ):
        expect(page.work.locator("span")).to_have_text(words)
        backend.next_phase()
    page.answers.last.get_by_role("button", name="Kosten dieser Antwort").click()
    rows = page.answers.last.locator(".cost")
    expect(rows).to_contain_text("40,0 Tokens pro Sekunde")
    expect(rows).to_contain_text("Prompt3 Tokens, davon 3 berechnet")
    expect(rows).to_contain_text("Aus dem Cachenichts")
    expect(page.page.locator(".gauge .parts")).to_contain_text("Cache: KV 1,0 MiB von 2,0 MiB, Zustä")
    page.box.fill("echo " + "alte Worte " * 900)
    page.box.press("Enter")
    expect(page.answers).to_have_count(2)
    expect(page.answers.last.locator(".cost")).to_contain_text("Tokens")
    page.box.fill("neue Worte " * 400)
    offers = page.page.locator(".trouble button")
    expect(offers).to_contain_text(["Neuen Chat mit einer Zusammenfassung von diesem beginnen"])


# All words of a page, those for a screen reader and under the pointer too.
SEEN = """() => {
    const names = ["aria-label", "title", "placeholder"];
    const said = [...document.querySelectorAll("*")].flatMap((each) => names.map((name) => each.getAttribute(name)));
    return [document.body.innerText, ...said.filter(Boolean)].join("\\n");
}"""


def english_in(text: str) -> list[str]:
    """English texts of several words that stand in a page's text, by the German table's own keys."""
    table = json.loads((asset_path("web") / "languages/de.json").read_text("utf-8"))
    found = []
    for source, german in table.items():
        words = re.sub(r"\{\w+(\|[^{}]*)?\}", "", source)
        if source != german and len(re.findall(r"[a-z]{2,}", words)) >= 3:
            pattern = "".join(
                ".{0,80}?" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{[^{}]*\})", source)
            )
            if re.search(pattern, text):
                found.append(source)
    return found


def test_a_page_writes_what_python_says_and_no_english_once_german_is_chosen(page: ChatPage) -> None:
    assert [write(page, words) for words in WORDS] == [english(words) for words in WORDS]
    with page.page.expect_navigation():
        page.open_settings().get_by_label("Language").select_option("de")
    page.box.wait_for()
    seen = [page.page.evaluate(SEEN)]
    for name, content in (("kaputt.png", b"\x89PNG\r\n\x1a\n broken"), ("nichts.mp4", b"\x00\x01 nothing")):
        file: FilePayload = {"name": name, "mimeType": "image/png", "buffer": content}
        page.page.locator(".composer input[type=file]").set_input_files(file)
        expect(page.toasts.filter(has_text=name)).to_have_count(1)
    for text, status in (("break late", "schiefgegangen"), ("length", "Höchstlänge")):
        page.box.fill(text)
        page.box.press("Enter")
        expect(page.answers.last.locator(".problem")).to_contain_text(status)
        seen.append(page.page.evaluate(SEEN))
    page.page.locator(".top button").last.click()
    seen.append(page.page.evaluate(SEEN))
    assert english_in("\n".join(seen)) == []
    assert english_in("This chat no longer exists.") != []
