"""The page in a browser, against a backend that answers as asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage

pytestmark = pytest.mark.browser


def test_an_answer_is_shown_with_its_thought_code_and_cost(page: ChatPage) -> None:
    page.ask("echo <img src=x onerror=alert(1)> **Hello** `there`")
    assert page.wait_answered() == "<img src=x onerror=alert(1)> Hello there"
    expect(page.questions.locator(".bubble")).to_have_text("echo <img src=x onerror=alert(1)> **Hello** `there`")
    expect(page.answers.locator("img")).to_have_count(0)
    expect(page.box).to_have_value("")
    # Its numbers are read by those who ask for them.
    expect(page.answers.last.locator(".cost")).to_be_hidden()
    expect(page.open_cost()).to_contain_text("40.0 tokens per second")
    # A thought is folded when it is done.
    page.ask("think Four")
    assert page.wait_answered(2) == "Four"
    thought = page.answers.nth(1).locator(".thinking")
    expect(thought.locator("summary")).to_have_text(re.compile(r"Thought for \d+\.\d s"))
    assert thought.evaluate("details => details.open") is False
    thought.locator("summary").click()
    expect(thought).to_contain_text("Let me see. That is it.")
    # Code, a table and a formula are drawn, and nothing else.
    page.ask("markdown")
    page.wait_answered(3)
    # Tools of earlier messages come with the pointer or the focus.
    tool = page.tool(page.answers.first, "Copy")
    expect(tool).to_have_css("opacity", "0")
    tool.focus()
    expect(tool).to_have_css("opacity", "1")
    page.box.focus()
    expect(tool).to_have_css("opacity", "0")
    page.answers.first.hover()
    expect(tool).to_have_css("opacity", "1")
    for message in (page.questions.last, page.answers.last):
        expect(page.tool(message, "Copy")).to_have_css("opacity", "1")
    answer = page.answers.last.locator(".answer")
    expect(answer.locator("pre code")).to_have_text('print("shapes")\n')
    expect(answer.locator("td").first).to_have_text("circle")
    expect(answer.locator("math")).to_have_count(1)
    expect(answer).to_contain_text("<b>not</b> markup")
    expect(answer.locator("img")).to_have_count(0)
    gaps = answer.evaluate(
        """answer => [...answer.children].map(block => block.getBoundingClientRect())
           .map(({ top }, at, all) => (at ? top - all[at - 1].bottom : null)).slice(1)"""
    )
    assert min(gaps) >= 10


def test_an_answer_that_fails_or_is_cut_says_why_and_is_asked_again(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("refuse It's <too> long")
    page.wait_answered()
    expect(page.answers.locator(".problem")).to_have_text("It's <too> long")
    again = page.tool(page.answers.last, "Try again")
    expect(again).to_have_text("Try again")
    again.click()
    page.wait_until(lambda: len(backend.calls) == 2)
    page.wait_answered()
    page.ask("length")
    assert page.wait_answered(2) == "no media"
    problem = page.answers.last.locator(".problem")
    expect(problem).to_contain_text("reached its limit")
    go_on = page.tool(page.answers.last, "Continue")
    expect(go_on).to_have_text("Continue")
    go_on.click()
    page.wait_ending("and its end.")
    expect(problem).to_be_hidden()
    assert backend.calls[-1].continue_reply
    assert backend.calls[-1].messages[-1].role == "assistant"
    # The engine, which counts for itself, may find a prompt too long.
    page.ask("too long")
    expect(page.dialog).to_contain_text("5,000 tokens")
    page.dialog.get_by_role("button", name="Edit message").click()
    page.wait_answered(3)


def test_a_chat_prints_whole_and_alone_dark_on_white(page: ChatPage) -> None:
    for number in range(3):
        page.ask("One of many words. " * 100)
        page.wait_answered(number + 1)
    page.page.emulate_media(media="print", color_scheme="dark")
    try:
        expect(page.page.locator(".sidebar")).to_be_hidden()
        expect(page.page.locator(".composer")).to_be_hidden()
        height = "document.querySelector('.app').getBoundingClientRect().height"
        assert page.page.evaluate(f"{height} >= document.querySelector('.messages').getBoundingClientRect().height")
        assert page.page.evaluate(f"{height} > innerHeight")
        assert page.page.evaluate("getComputedStyle(document.querySelector('.app')).color") == "rgb(29, 29, 34)"
    finally:
        page.page.emulate_media(media="null", color_scheme="null")


def test_media_cost_what_is_shown_and_are_seen_in_their_message(
    page: ChatPage, backend: FakeBackend, samples: Path, tmp_path: Path
) -> None:
    page.attach(samples / "moves-right.mp4")
    label = page.thumbnails.locator(".label")
    expect(label).to_have_text(re.compile(r"^\d+ frames, \d+ tokens$"))
    before = label.inner_text()
    slider = page.page.locator(".composer").get_by_label("Frames per video")
    expect(slider).to_have_count(0)
    label.press("Enter")
    expect(label).to_have_attribute("aria-expanded", "true")
    slider.fill("0")
    expect(label).not_to_have_text(before)
    expect(label).to_contain_text("2 frames")
    label.click()
    expect(slider).to_have_count(0)
    first, *others = [Image.new("RGB", (64, 48), colour) for colour in ("red", "green", "blue", "white")]
    first.save(tmp_path / "moves.gif", save_all=True, append_images=others, duration=200)
    page.page.set_viewport_size({"width": 1000, "height": 600})
    page.ask("which?", [samples / "one-shape.png", samples / "two-shapes.jpg", tmp_path / "moves.gif"])
    assert page.wait_answered() == "2 images, 2 videos"
    kinds = [type(part).__name__ for part in backend.calls[0].messages[0].media]
    assert kinds == ["Video", "Image", "Image", "Video"]
    # The answer is in sight below pictures that come in late.
    page.page.wait_for_function("() => [...document.querySelectorAll('.files img')].every(image => image.complete)")
    expect(page.answers.last.locator(".tools")).to_be_in_viewport(ratio=1)
    expect(page.questions.locator("img")).to_have_count(3)
    for picture in page.questions.locator("img").all():
        assert picture.evaluate("img => img.naturalWidth") > 0
    moving = page.questions.locator("img").last
    assert moving.evaluate("async img => (await fetch(img.src)).headers.get('content-type')") == "image/gif"
    video = page.questions.locator("video")
    video.evaluate("video => { video.preload = 'auto'; video.load(); }")
    page.wait_until(lambda: video.evaluate("video => video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA"))
    # A clip has a picture before it plays.
    response = page.context.request.get(video.evaluate("video => video.poster"))
    assert (response.status, response.headers["content-type"]) == (200, "image/jpeg")


def test_settings_reach_the_backend_stay_with_the_chat_and_make_presets(page: ChatPage, backend: FakeBackend) -> None:
    panel = page.open_settings()
    # Three settings are seen at once, the others where they are looked for.
    expect(panel.get_by_role("group", name="Answers").locator("> label")).to_have_count(3)
    expect(panel.get_by_label("Seed")).to_be_hidden()
    panel = page.open_settings(advanced=True)
    longest, presets = panel.get_by_label("Longest answer"), panel.get_by_label("Choose a preset")
    panel.get_by_label("Temperature").first.fill("0.25")
    longest.fill("77")
    panel.get_by_label("Seed").fill("5")
    panel.get_by_label("System prompt").fill("Be brief.")
    panel.get_by_label("Think first").check()
    # A wrong one is not taken.
    box = panel.get_by_role("spinbutton", name="Top k")
    box.fill("1000")
    box.press("Tab")
    assert box.evaluate("input => input.validity.valid") is False
    page.ask("echo Hello")
    page.wait_answered()
    call = backend.calls[0]
    assert (call.params.temperature, call.params.max_tokens, call.params.seed) == (0.25, 77, 5)
    assert (call.enable_thinking, call.params.top_k) == (True, 20)
    assert (call.messages[0].role, call.messages[0].text) == ("system", "Be brief.")
    page.page.reload()
    expect(page.open_settings().get_by_label("Longest answer")).to_have_value("77")
    panel = page.open_settings(advanced=True)
    panel.get_by_role("button", name="Save as preset").click()
    page.dialog.get_by_label("Name").fill("Short")
    page.dialog.get_by_role("button", name="Save", exact=True).click()
    panel.get_by_role("button", name="Reset to model defaults").click()
    expect(longest).to_have_value("")
    delete = panel.get_by_role("button", name="Delete preset")
    expect(delete).to_have_count(0)
    presets.select_option("Short")
    expect(longest).to_have_value("77")
    expect(presets).to_have_value("Short")
    longest.fill("34")
    expect(presets).to_have_value("")
    presets.select_option("Short")
    delete.click()
    expect(presets.locator("option")).to_have_text(["No presets yet"])


def test_a_phone_has_room_for_everything(open_page: OpenPage, samples: Path) -> None:
    page = open_page(viewport={"width": 375, "height": 667}, is_mobile=True, has_touch=True)
    page.ask("which?", [samples / "two-shapes.jpg", samples / "moves-right.mp4"])
    expect(page.box).to_have_value("which?\n")
    page.send_button.click()
    page.wait_answered()
    page.open_cost()
    outside = page.page.evaluate(
        """() => [...document.querySelectorAll('.main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
            .map(e => e.outerHTML.slice(0, 100))"""
    )
    assert outside == []
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 375
    expect(page.send_button).to_be_in_viewport()
    expect(page.chats).not_to_be_in_viewport()
    page.page.get_by_role("button", name="Chats").click()
    expect(page.chats).to_be_in_viewport()
    page.page.locator(".shade").click(position={"x": 350, "y": 300})
    expect(page.chats).not_to_be_in_viewport()


def test_a_photo_and_a_clip_from_the_camera(page: ChatPage, backend: FakeBackend) -> None:
    page.add("Take a photo or record a clip")
    page.dialog.get_by_role("button", name="Take a photo").click()
    expect(page.thumbnails).to_have_count(1)
    page.add("Take a photo or record a clip")
    page.dialog.get_by_role("button", name="Record a clip").click()
    page.page.wait_for_timeout(500)  # a clip has a length
    page.dialog.get_by_role("button", name="Stop recording").click()
    expect(page.thumbnails).to_have_count(2)
    expect(page.thumbnails.last.locator(".label")).to_contain_text("frames")
    page.ask("which?")
    assert page.wait_answered() == "1 image, 1 video"
