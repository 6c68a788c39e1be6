"""How the page feels while an answer is written: it draws no more than that, doesn't jump, and scrolls along."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from qwen35mm.chat.store.records import Node
from qwen35mm.chat.store.store import new_id
from qwen35mm.web import Server
from tests.chat.fake_backend import MARKDOWN, FakeBackend
from tests.chat.helpers import create
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser


# Counts the drawings of the last message in `window.drawn`, and collects in `window.touched` what else was drawn.
OBSERVE = """() => {
    window.drawn = 0;
    window.touched = [];
    const message = [...document.querySelectorAll('.message')].at(-1);
    new MutationObserver((changes) => {
        window.drawn++;
        for (const { target } of changes)
            if (!message.contains(target)) window.touched.push(target.parentElement.outerHTML.slice(0, 100));
    }).observe(document.querySelector('.messages'), { childList: true, subtree: true, characterData: true });
}"""


def keep_a_long_one(server: Server, num_messages: int) -> str:
    """The id of a conversation of that many messages."""
    conversation = create(server.store, "local", title="A long one")
    parent = None
    for number in range(num_messages):
        role = "assistant" if number % 2 else "user"
        text = f"Message {number}. " + (MARKDOWN if number % 2 else "What is that? " * 20)
        node = Node(new_id(), parent, role, time.time() + number / 1000, text=text)
        server.store.add("local", conversation.id, node)
        parent = node.id
    return conversation.id


def test_the_page_does_not_jump_while_it_is_written_or_a_long_chat_opens(
    page: ChatPage, fake_server: tuple[FakeBackend, Server]
) -> None:
    """Nothing outside the answer moves, and the box keeps its place; a long chat is drawn from its end."""
    page.page.evaluate(
        """() => {
            window.shifts = [];
            new PerformanceObserver(list => {
                for (const entry of list.getEntries())
                    for (const source of entry.sources ?? [])
                        if (source.node?.closest?.('.composer, .top, .sidebar, .user')) window.shifts.push(entry.value);
            }).observe({ type: 'layout-shift', buffered: true });
        }"""
    )
    before = page.page.locator(".composer").bounding_box()
    page.ask("slow")
    answer = page.answers.locator(".answer")
    expect(answer).to_contain_text("word word")
    # What changes once with a new conversation, on a slow machine only now.
    expect(page.titles).to_have_text("slow")
    expect(page.page.locator(".gauge .parts")).to_contain_text("Cache")
    page.page.evaluate("window.shifts = []")
    length = len(answer.inner_text())
    page.wait_until(lambda: len(answer.inner_text()) > length + 1000)
    assert page.page.locator(".composer").bounding_box() == before
    assert page.page.evaluate("window.shifts") == []
    page.stop_button.click()
    page.wait_answered()
    page.new_chat()
    page.page.evaluate(
        """() => {
            window.seen = [];
            const [list, all] = [document.querySelector('.messages'), document.querySelector('.transcript')];
            new MutationObserver(() => window.seen.push([list.querySelectorAll('.message').length,
                all.scrollHeight - all.scrollTop - all.clientHeight])).observe(list, { childList: true });
        }"""
    )
    conversation = keep_a_long_one(fake_server[1], 150)
    page.page.evaluate("id => { location.hash = id; }", conversation)
    expect(page.page.locator(".message")).to_have_count(150)
    drawn, distances = zip(*page.page.evaluate("window.seen"), strict=True)
    assert 0 < drawn[0] < 100
    assert max(distances) < 2, "the end is what is seen"
    texts = page.page.locator(".message .body").evaluate_all("all => all.map(each => each.textContent)")
    assert [int(number) for text in texts for number in re.findall(r"Message (\d+)\.", text)] == list(range(150))


@pytest.mark.slow
def test_60_messages_stay_as_they_are_while_another_is_written(
    page: ChatPage, backend: FakeBackend, fake_server: tuple[FakeBackend, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "context_length", 1_000_000)
    conversation = keep_a_long_one(fake_server[1], 60)
    page.page.goto(f"{page.url}#{conversation}")
    page.page.reload()
    expect(page.questions).to_have_count(30)
    page.ask("slow")
    expect(page.answers.last.locator(".answer")).to_contain_text("word word")
    page.page.evaluate(OBSERVE)
    page.wait_until(lambda: page.page.evaluate("window.drawn") > 5)
    page.box.press_sequentially("typed while it goes on")
    expect(page.box).to_have_value("typed while it goes on")
    assert page.page.evaluate("window.touched") == []
    page.stop_button.click()
    page.wait_answered(31)


@pytest.mark.slow
def test_long_answers_scroll_along_unless_one_reads_above(page: ChatPage, samples: Path) -> None:
    page.ask("slow")
    transcript = page.page.locator(".transcript")
    page.wait_until(lambda: transcript.evaluate("e => e.scrollHeight > e.clientHeight + 300"))
    page.wait_until(lambda: transcript.evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight < 90"))
    transcript.evaluate("e => { e.scrollTop = 0; }")
    height = transcript.evaluate("e => e.scrollHeight")
    page.wait_until(lambda: transcript.evaluate("e => e.scrollHeight") > height + 50)
    assert transcript.evaluate("e => e.scrollTop") < 50
    # A button leads back, and says that there is more.
    page.page.get_by_role("button", name="New text below").click()
    page.wait_until(lambda: transcript.evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight < 90"))
    page.stop_button.click()
    page.wait_answered()
    to_end = page.page.get_by_role("button", name="To the end")
    expect(to_end).to_be_hidden()
    transcript.evaluate("e => { e.scrollTop = 0; }")
    to_end.click()
    expect(to_end).to_be_hidden()
    expect(transcript).to_be_focused()
