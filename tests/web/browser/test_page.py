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


def test_a_question_is_answered(page: ChatPage) -> None:
    page.ask("echo Hello there")
    assert page.wait_answered() == "Hello there"
    expect(page.questions).to_contain_text("echo Hello there")
    expect(page.box).to_have_value("")
    expect(page.cost).to_contain_text("2 tokens · 40.0 tokens/s")


def test_tokens_and_speed_are_shown_while_it_writes_and_kept_when_it_is_stopped(page: ChatPage) -> None:
    page.ask("slow")
    pace = page.work.locator(".pace")
    expect(pace).to_have_text(re.compile(r"^\d+ tokens · 40\.0 tokens/s$"))
    # It is another one many times a second: nobody wants it read out.
    assert pace.evaluate("pace => pace.closest('[aria-live], [role=status], [role=alert]').ariaLive") == "off"
    expect(pace).not_to_have_text(pace.inner_text())
    page.stop_button.click()
    page.wait_answered()
    expect(page.cost).to_have_text(re.compile(r"^\d+ tokens · 40\.0 tokens/s · first after 0\.3 s · prompt of 3"))
    page.cost.click()
    expect(page.answers.last.locator(".cost dl")).not_to_contain_text("Memory")


def test_images_and_a_video_in_one_message(page: ChatPage, backend: FakeBackend, samples: Path) -> None:
    page.ask("which?", [samples / "one-shape.png", samples / "two-shapes.jpg", samples / "moves-right.mp4"])
    assert page.wait_answered() == "2 images, 1 video"
    expect(page.questions.locator("img")).to_have_count(2)
    expect(page.questions.locator("video")).to_have_count(1)
    assert [type(part).__name__ for part in backend.calls[0].messages[0].media] == ["Image", "Image", "Video"]
    for picture in page.questions.locator("img").all():
        page.wait_until(lambda picture=picture: picture.evaluate("img => img.naturalWidth > 0"))
    video = page.questions.locator("video")
    video.evaluate("video => { video.preload = 'auto'; video.load(); }")
    page.wait_until(lambda: video.evaluate("video => video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA"))


def test_the_answer_is_seen_below_pictures_that_come_in_late(open_page: OpenPage, samples: Path) -> None:
    page = open_page(viewport={"width": 1000, "height": 600})
    names = ("one-shape.png", "two-shapes.jpg", "moves-right.mp4", "one-shape.png")
    page.ask("which?", [samples / name for name in names])
    page.wait_answered()
    page.page.wait_for_function("() => [...document.querySelectorAll('.files img')].every(image => image.complete)")
    expect(page.answers.last.locator(".tools")).to_be_in_viewport(ratio=1)


def test_an_animated_gif_plays_in_its_message(page: ChatPage, backend: FakeBackend, tmp_path: Path) -> None:
    first, *others = [Image.new("RGB", (64, 48), colour) for colour in ("red", "green", "blue", "white")]
    first.save(tmp_path / "moves.gif", save_all=True, append_images=others, duration=200)
    page.ask("which?", [tmp_path / "moves.gif"])
    assert page.wait_answered() == "1 video"
    picture = page.questions.locator("img")
    page.wait_until(lambda: picture.evaluate("img => img.naturalWidth") == 64)
    assert picture.evaluate("async img => (await fetch(img.src)).headers.get('content-type')") == "image/gif"


def test_each_mediums_cost_is_shown_before_sending(page: ChatPage, samples: Path) -> None:
    page.attach(samples / "moves-right.mp4")
    label = page.thumbnails.locator(".label")
    expect(label).to_have_text(re.compile(r"^\d+ frames, \d+ tokens, \d+ (KiB|MiB) of cache$"))
    expect(page.page.locator(".room")).to_contain_text("available")
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


def test_thinking_is_open_while_it_is_written_and_folded_after_it(page: ChatPage) -> None:
    page.ask("think Four")
    assert page.wait_answered() == "Four"
    thought = page.answers.locator(".thinking")
    expect(thought.locator("summary")).to_have_text(re.compile(r"Thought for \d+\.\d s"))
    assert thought.evaluate("details => details.open") is False
    thought.locator("summary").click()
    expect(thought).to_contain_text("Let me see. That is it.")


def test_code_tables_and_formulas_are_rendered_and_nothing_else(page: ChatPage) -> None:
    page.ask("markdown")
    page.wait_answered()
    answer = page.answers.locator(".answer")
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


def test_an_error_is_said_in_words_and_can_be_tried_again(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("refuse It's <too> long")
    page.wait_answered()
    expect(page.answers.locator(".problem")).to_have_text("It's <too> long")
    page.tool(page.answers.last, "Regenerate").click()
    page.wait_until(lambda: len(backend.calls) == 2)
    page.wait_answered()


def test_a_prompt_that_the_engine_finds_too_long_is_offered_help(page: ChatPage) -> None:
    page.ask("too long")
    expect(page.dialog).to_contain_text("5,000 tokens")
    page.dialog.get_by_role("button", name="Edit message").click()
    page.wait_answered()


def test_a_broken_file_is_explained_by_its_name_before_anything_is_sent(
    page: ChatPage, samples: Path, tmp_path: Path
) -> None:
    whole = (samples / "three-shapes.png").read_bytes()
    contents = (b"\x89PNG\r\n\x1a\n broken", b"\x00\x01 nothing", whole[: len(whole) // 2])
    for number, content in enumerate(contents):
        path = tmp_path / f"photo {number}.png"
        path.write_bytes(content)
        page.page.locator(".composer input[type=file]").set_input_files(path)
        expect(page.toasts).to_contain_text(f"photo {number}.png")
    expect(page.toasts).to_contain_text("damaged or cut off: its pixels could not all be decoded")
    expect(page.thumbnails).to_have_count(0)
    page.ask("echo all is well")
    assert page.wait_answered() == "all is well"


def test_an_answer_that_was_cut_says_so_and_is_continued(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("length")
    assert page.wait_answered() == "no media"
    expect(page.answers.locator(".problem")).to_contain_text("reached its limit")
    page.tool(page.answers.last, "Continue").click()
    page.wait_ending("and its end.")
    expect(page.answers.locator(".problem")).to_be_hidden()
    assert backend.calls[1].continue_reply
    assert backend.calls[1].messages[-1].role == "assistant"


def test_settings_reach_the_backend_and_stay_with_the_chat(page: ChatPage, backend: FakeBackend) -> None:
    panel = page.open_settings()
    panel.get_by_label("Temperature").first.fill("0.25")
    panel.get_by_label("Longest answer").fill("77")
    panel.get_by_label("Seed").fill("5")
    panel.get_by_label("System prompt").fill("Be brief.")
    panel.get_by_label("Think first").check()
    page.ask("echo Hello")
    page.wait_answered()
    call = backend.calls[0]
    assert (call.params.temperature, call.params.max_tokens, call.params.seed) == (0.25, 77, 5)
    assert call.enable_thinking is True
    assert (call.messages[0].role, call.messages[0].text) == ("system", "Be brief.")
    page.page.reload()
    expect(page.open_settings().get_by_label("Longest answer")).to_have_value("77")
    page.open_settings().get_by_role("button", name="Reset to model defaults").click()
    expect(page.open_settings().get_by_label("Longest answer")).to_have_value("")


def test_presets_are_saved_taken_and_deleted(page: ChatPage) -> None:
    panel = page.open_settings()
    panel.get_by_label("Longest answer").fill("33")
    panel.get_by_role("button", name="Save as preset").click()
    page.dialog.get_by_label("Name").fill("Short")
    page.dialog.get_by_role("button", name="Save", exact=True).click()
    panel.get_by_role("button", name="Reset to model defaults").click()
    expect(panel.get_by_label("Longest answer")).to_have_value("")
    delete = panel.get_by_role("button", name="Delete preset")
    expect(delete).to_have_count(0)
    panel.get_by_label("Choose a preset").select_option("Short")
    expect(panel.get_by_label("Longest answer")).to_have_value("33")
    expect(panel.get_by_label("Choose a preset")).to_have_value("Short")
    panel.get_by_label("Longest answer").fill("34")
    expect(panel.get_by_label("Choose a preset")).to_have_value("")
    panel.get_by_label("Choose a preset").select_option("Short")
    delete.click()
    expect(panel.get_by_label("Choose a preset").locator("option")).to_have_text(["No presets yet"])


def test_a_wrong_setting_is_not_taken(page: ChatPage, backend: FakeBackend) -> None:
    box = page.open_settings().get_by_role("spinbutton", name="Top k")
    box.fill("1000")
    box.press("Tab")
    assert box.evaluate("input => input.validity.valid") is False
    page.ask("echo Hello")
    page.wait_answered()
    assert backend.calls[0].params.top_k == 20


def test_markup_in_a_question_is_shown_as_typed(page: ChatPage) -> None:
    page.ask("echo <img src=x onerror=alert(1)> **a** `b`")
    page.wait_answered()
    expect(page.questions.locator(".bubble")).to_have_text("echo <img src=x onerror=alert(1)> **a** `b`")
    expect(page.answers.locator("img")).to_have_count(0)


def test_a_phone_has_room_for_everything(open_page: OpenPage, samples: Path) -> None:
    page = open_page(viewport={"width": 375, "height": 667}, is_mobile=True, has_touch=True)
    page.ask("which?", [samples / "two-shapes.jpg", samples / "moves-right.mp4"])
    expect(page.box).to_have_value("which?\n")
    page.send_button.click()
    page.wait_answered()
    page.cost.click()
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


def test_everything_to_press_has_a_name(page: ChatPage, samples: Path) -> None:
    page.ask("think Four", [samples / "one-shape.png"])
    page.wait_answered()
    page.open_settings()
    nameless = page.page.evaluate(
        """() => [...document.querySelectorAll('.app :is(button, input, textarea, select, summary, video)')]
            .filter(e => e.type !== 'file' && !e.ariaHidden)
            .filter(e => !(e.ariaLabel || e.textContent.trim() || e.closest('label')?.innerText.trim()))
            .map(e => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []


@pytest.mark.slow
def test_a_photo_and_a_clip_from_the_camera(page: ChatPage, backend: FakeBackend) -> None:
    page.page.get_by_role("button", name="Take a photo or record a clip").click()
    page.dialog.get_by_role("button", name="Take a photo").click()
    expect(page.thumbnails).to_have_count(1)
    page.page.get_by_role("button", name="Take a photo or record a clip").click()
    page.dialog.get_by_role("button", name="Record a clip").click()
    page.page.wait_for_timeout(1200)  # a clip has a length
    page.dialog.get_by_role("button", name="Stop recording").click()
    expect(page.thumbnails).to_have_count(2)
    expect(page.thumbnails.last.locator(".label")).to_contain_text("frames")
    page.ask("which?")
    assert page.wait_answered() == "1 image, 1 video"
