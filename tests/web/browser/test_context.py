"""What the context holds, and what can be done where a message doesn't fit."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_an_offer_holds_for_one_message_until_it_is_made_the_default(page: ChatPage, backend: FakeBackend) -> None:
    mark = page.page.get_by_text("Messages above are left out of the prompt")
    page.ask("echo " + "old words " * 700)
    page.wait_answered()
    page.ask("echo few")
    page.wait_answered(2)
    page.box.fill("new words " * 400)
    trouble = page.page.locator(".trouble")
    expect(trouble).to_contain_text("This doesn't fit")
    page.box.press("Enter")
    expect(page.dialog).to_contain_text("This chat would take")
    offer = "Leave the oldest 2 messages out of the prompt"
    page.dialog.get_by_role("button", name=offer).click()
    expect(trouble).to_be_hidden()
    taken = page.page.get_by_role("list", name="For this message only").get_by_role("listitem")
    expect(taken).to_contain_text(f"For this message only: {offer}")
    taken.get_by_role("button", name=f"Remove for this message: {offer}").click()
    expect(trouble).to_contain_text("and 128 are reserved for the answer")
    trouble.get_by_role("button", name=offer).click()
    expect(trouble).to_be_hidden()
    page.page.reload()
    expect(taken).to_contain_text(offer)
    page.box.press("Enter")
    page.wait_answered(3)
    assert len(backend.calls[-1].messages) == 3
    expect(page.questions.locator(".asked-without")).to_have_text(["Asked without the oldest 2 messages"])
    expect(taken).to_have_count(0)
    # The next one has all again.
    expect(page.page.locator(".message.left-out")).to_have_count(0)
    page.box.fill("echo more")
    expect(trouble).to_contain_text("This doesn't fit")
    trouble.get_by_role("button", name=offer).click()
    taken.get_by_role("button", name=f"Make default: {offer}").click()
    expect(taken).to_have_count(0)
    expect(trouble).to_be_hidden()
    expect(page.page.locator(".message.left-out")).to_have_count(2)
    expect(mark).to_have_count(1)
    page.box.press("Enter")
    page.wait_answered(4)
    assert len(backend.calls[-1].messages) == 5
    around = mark.evaluate("mark => [mark.previousElementSibling, mark.nextElementSibling].map(e => e.dataset.id)")
    ids = page.page.locator(".message").evaluate_all("rows => rows.map(row => row.dataset.id)")
    assert around == ids[1:3]
    colours = page.answers.locator(".answer p").evaluate_all("all => all.map(each => getComputedStyle(each).color)")
    assert colours[0] != colours[1] == colours[2] == colours[3]
    assert "Messages above are left out of the prompt" in page.page.locator(".messages").aria_snapshot()
    page.new_chat()
    expect(mark).to_have_count(0)


def test_the_context_is_a_ring_until_it_is_nearly_full_and_goes_on_with_a_summary(
    page: ChatPage, backend: FakeBackend
) -> None:
    ring = page.page.locator(".gauge > .row")
    percent = ring.locator(".percent")
    expect(percent).to_be_hidden()
    page.ask("echo " + "word " * 100)
    page.wait_answered()
    page.box.fill("Which words? " * 10)
    parts = page.page.locator(".gauge .parts")
    expect(parts.locator("dd").nth(1)).to_have_text("36")
    expect(parts).to_be_hidden()
    ring.focus()
    expect(parts).to_be_visible()
    names, values = (parts.locator(tag).all_inner_texts() for tag in ("dt", "dd"))
    assert names == ["Chat so far", "This message", "Reserved for the answer", "Available"]
    said, message, reserve, free = (int(value.replace(",", "")) for value in values)
    assert (message, reserve, said + message + reserve + free) == (36, 128, 4096)
    expect(ring).to_have_accessible_name(f"{said + message:,} of 4,096 context tokens")
    page.page.keyboard.press("Escape")
    expect(parts).to_be_hidden()
    ring.hover()
    expect(parts).to_contain_text("Cache: KV")
    # Where a message doesn't fit, a new chat begins with a summary.
    page.ask("echo " + "old words " * 600)
    page.wait_answered(2)
    page.box.fill("new words " * 400)
    expect(percent).to_be_visible()
    expect(percent).to_contain_text("%")
    page.page.locator(".trouble").get_by_role("button", name="Start a new chat with a summary of this one").click()
    expect(page.page.locator(".title")).to_contain_text("After:")
    page.wait_answered()
    page.box.fill("echo and then?")
    page.box.press("Enter")
    page.wait_answered(2)
    system, *rest = backend.calls[-1].messages
    assert system.role == "system"
    assert "A summary of the conversation so far" in system.text
    assert [message.role for message in rest] == ["user"]
