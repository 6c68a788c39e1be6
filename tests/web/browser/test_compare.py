"""Answers to one question beside each other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from playwright.sync_api import APIResponse, Locator, Route, expect

from tests.chat.fake_backend import PHASES, FakeBackend
from tests.web.browser import ChatPage, box_of

pytestmark = pytest.mark.browser


def ask_another(page: ChatPage, temperature: str) -> None:
    """Fills in the form, and has the question answered again."""
    form = page.dialog.last
    form.get_by_role("spinbutton", name="Temperature").fill(temperature)
    form.get_by_role("button", name="Answer", exact=True).click()


def sides(page: ChatPage, num_answers: int) -> tuple[Locator, Locator]:
    """Both sides, once that many answers are there and none is written."""
    expect(page.dialog.get_by_role("button", name="Another answer")).to_be_enabled()
    found = page.dialog.locator(".side")
    expect(found).to_have_count(2)
    expect(found.first.locator("header")).to_contain_text(f"/{num_answers}")
    return found.nth(0), found.nth(1)


@pytest.mark.slow
def test_an_answer_is_compared_with_one_of_other_settings(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("echo **Hello**")
    page.wait_ending("Hello")
    page.ask("echo below")
    page.wait_ending("below")
    asked = page.answers.first
    page.tool(asked, "Compare").click()
    ask_another(page, "1.5")
    first, second = sides(page, 2)
    assert first.locator("strong").first.inner_text() == second.locator("strong").first.inner_text() == "Fake-1B"
    assert [side.locator(".made").inner_text().split("\n") for side in (first, second)] == [
        ["Temperature", "0.7"],
        ["Temperature", "1.5"],
    ]
    expect(second.locator(".answer strong")).to_have_text("Hello")
    expect(second.locator(".cost")).to_contain_text("40.0 tokens per second")
    left, right = box_of(first), box_of(second)
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    assert backend.calls[-1].params.temperature == 1.5
    # Closed, all is as it was; the other answer is a branch.
    page.dialog.press("Escape")
    expect(page.answers.last.locator(".answer")).to_have_text("below")
    expect(page.answers.first.locator(".count")).to_have_text("1/2")
    page.page.reload()
    page.tool(page.answers.first, "Compare").click()
    first, second = sides(page, 2)
    # On a phone one stands below the other.
    page.page.set_viewport_size({"width": 320, "height": 640})
    top, below = box_of(first), box_of(second)
    assert top["x"] == below["x"]
    assert top["y"] + top["height"] < below["y"]
    assert page.page.evaluate("document.querySelector('dialog').scrollWidth") <= 320
    page.page.set_viewport_size({"width": 1200, "height": 850})
    second.get_by_role("button", name="Continue with this answer").click()
    expect(page.answers).to_have_count(1)
    expect(page.answers.first.locator(".count")).to_have_text("2/2")
    page.ask("echo on")
    page.wait_ending("on")
    # The chat's own settings are as they were.
    assert backend.calls[-1].params.temperature == 0.7
    assert [message.text.strip() for message in backend.calls[-1].messages] == [
        "echo **Hello**",
        "**Hello**",
        "echo on",
    ]


def test_several_answers_are_walked_through_and_one_is_seen_while_it_is_written(
    page: ChatPage, backend: FakeBackend
) -> None:
    page.ask("think Four")
    page.wait_ending("Four")
    page.tool(page.answers.last, "Regenerate").click()
    expect(page.answers.last.locator(".count")).to_have_text("2/2")
    page.wait_ending("Four")
    page.tool(page.answers.last, "Compare").click()
    first, second = sides(page, 2)
    expect(first).to_contain_text("Same model and settings")
    page.dialog.get_by_role("button", name="Another answer").click()
    ask_another(page, "0")
    first, second = sides(page, 3)
    expect(second.locator(".made")).to_have_text("Temperature0")
    picker = second.get_by_label("Choose an answer")
    expect(picker.locator("option").nth(0)).to_be_disabled()
    picker.select_option(index=1)
    expect(first).to_contain_text("Same model and settings")
    expect(second.get_by_label("Choose an answer")).to_be_focused()
    expect(second.locator(".cost")).to_contain_text("40.0 tokens per second")
    assert box_of(first)["y"] == box_of(second)["y"]
    # While one is written, closing stays with it.
    expect(first.get_by_role("button", name="Continue with this answer")).to_be_enabled()
    page.dialog.get_by_role("button", name="Close comparison").click()
    expect(page.answers.last.locator(".count")).to_have_text("2/3")
    page.tool(page.answers.last, "Compare").click()
    page.dialog.get_by_role("button", name="Continue with this answer").last.click()
    expect(page.answers.last.locator(".count")).to_have_text("3/3")

    held: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        response = route.fetch()
        if "running" in (each["status"] for each in response.json()["answers"]):
            held.append((route, response))
        else:
            route.fulfill(response=response)

    def go_on() -> None:
        for _ in PHASES:
            backend.next_phase()
        page.wait_answered(2)

    # One that ends while the comparison is on its way.
    page.ask("phases")
    go_on()
    page.page.route("**/api/answers", hold)
    page.tool(page.answers.last, "Compare").click()
    ask_another(page, "1.5")
    page.wait_until(lambda: len(held) == 1)
    go_on()
    for route, response in held:
        route.fulfill(response=response)
    page.page.unroute("**/api/answers")
    sides(page, 2)


@pytest.mark.slow
def test_a_comparison_goes_on_where_another_model_was_loaded_for_it(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("slow")
    expect(page.answers.last.locator(".answer")).to_contain_text("word")
    page.stop_button.click()
    page.wait_answered()
    answer = page.answers.last.get_attribute("data-id")
    chat = page.page.url.rpartition("#")[2]
    # What the page leaves itself when it is loaded again with the other model.
    asked = json.dumps({"conversation": chat, "answer": answer, "before": answer, "own": {"temperature": 0.25}})
    page.page.evaluate("asked => sessionStorage.setItem('qwen35mm.compare', asked)", asked)
    backend.info, backend.is_demo = replace(backend.info, name="Other-1B"), True
    try:
        page.page.reload()
        second = page.dialog.locator(".side").nth(1)
        # It is written in sight, and ends when the page is left with it.
        expect(second.locator(".answer")).to_contain_text("word word")
        expect(second.get_by_role("button", name="Continue with this answer")).to_be_disabled()
        expect(second.locator("strong").first).to_have_text("Practice model")
        page.dialog.press("Escape")
        page.stop_button.click()
        page.wait_answered()
    finally:
        backend.info, backend.is_demo = replace(backend.info, name="Fake-1B"), False
    expect(page.answers.last.locator(".count")).to_have_text("2/2")
    assert backend.calls[-1].params.temperature == 0.25
    assert page.page.evaluate("sessionStorage.length") == 0
