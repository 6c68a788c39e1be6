"""Parts of pictures and of videos' frames: drawn in the viewer, asked about, shown with their place, in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage, OpenPage

pytestmark = pytest.mark.browser

CLOSER = "Look closer"
QUESTION = "What do you want to know about this part?"


def drag(page: ChatPage, start: tuple[float, float], end: tuple[float, float]) -> None:
    """By mouse, between two points of the picture in the viewer, in shares of its sides."""
    box = page.dialog.locator(".view").bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end)]
    page.page.mouse.move(*places[0])
    page.page.mouse.down()
    page.page.mouse.move(*places[1], steps=3)
    page.page.mouse.up()


def open_closer(page: ChatPage, message: Locator) -> None:
    message.get_by_role("button", name=CLOSER).first.click()
    expect(page.dialog.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
    expect(page.dialog.locator(".view.placed")).to_be_visible()


def source(backend: FakeBackend) -> Path:
    """The file of the last question's picture."""
    return Path(str(backend.calls[-1].messages[-1].media[-1].source))


@pytest.mark.slow
def test_a_part_of_a_turned_picture_is_asked_about_and_shown_in_its_place(
    page: ChatPage, backend: FakeBackend, tmp_path: Path
) -> None:
    lying, exif = Image.new("RGB", (800, 400), "white"), Image.Exif()
    # Upright, it is red from 25 to 75 % across and from 50 to 75 % down.
    lying.paste("red", (400, 100, 600, 300))
    exif[0x0112] = 6
    lying.save(tmp_path / "a.jpg", exif=exif)
    page.ask("which?", [tmp_path / "a.jpg"])
    page.wait_answered()
    page.box.fill("something else")
    open_closer(page, page.questions)
    drag(page, (0.2, 0.2), (0.6, 0.6))
    # Pulled at its corner, and moved.
    drag(page, (0.6, 0.6), (0.7, 0.45))
    drag(page, (0.4, 0.3), (0.45, 0.6))
    page.dialog.get_by_label(QUESTION).fill("What is it?")
    page.dialog.get_by_role("button", name="Ask", exact=True).click()
    expect(page.dialog).to_have_count(0)
    page.wait_answered(2)
    expect(page.questions.last).to_contain_text("What is it?")
    expect(page.box).to_have_value("something else")
    assert len(backend.calls[-1].messages[-1].media) == 1
    with Image.open(source(backend)) as part:
        assert part.size == pytest.approx((200, 200), abs=6)
        red, green, blue = np.asarray(part.convert("RGB")).mean(axis=(0, 1))
        assert red > 240 > 60 > max(green, blue)
    # After a reload too.
    page.visit()
    page.chats.first.click()
    place = page.questions.last.get_by_role("button", name="Show where this is in a.jpg")
    image, spot = place.locator("img").bounding_box(), place.locator(".cut").bounding_box()
    assert image is not None
    assert spot is not None
    assert (spot["x"] - image["x"]) / image["width"] == pytest.approx(0.25, abs=0.03)
    assert (spot["y"] - image["y"]) / image["height"] == pytest.approx(0.5, abs=0.03)
    place.click()
    expect(page.dialog.locator(".mark-line")).to_contain_text("Part of a.jpg")
    expect(page.dialog.locator(".pointed.lit")).to_be_visible()


def test_a_part_by_keys_goes_into_the_message(page: ChatPage, backend: FakeBackend, samples: Path) -> None:
    page.ask("which?", [samples / "one-shape.png"])
    page.wait_answered()
    file = source(backend)
    page.questions.locator(".picture").click()
    keys = page.page.keyboard
    page.dialog.get_by_role("button", name=CLOSER).click()
    keys.press("Enter")
    keys.press("ArrowLeft")
    keys.press("Shift+ArrowDown")
    status = page.dialog.locator(".stage-words")
    expect(status).to_have_text("From 23 to 73 % across, from 25 to 77 % down")
    keys.press("Enter")
    expect(page.dialog.get_by_label(QUESTION)).to_be_focused()
    keys.press("Escape")
    expect(page.dialog.get_by_label(QUESTION)).to_be_hidden()
    keys.press("Escape")
    expect(page.dialog).to_have_count(0)
    page.questions.locator(".picture").click()
    page.dialog.get_by_role("button", name=CLOSER).click()
    keys.press("Enter")
    page.dialog.get_by_role("button", name="Add to the message").click()
    expect(page.thumbnails.locator(".name")).to_have_text("Part of one-shape.png")
    expect(page.thumbnails.locator(".label")).to_contain_text("tokens")
    # It is kept like any other file, with its place.
    page.visit()
    page.chats.first.click()
    expect(page.thumbnails).to_have_count(1)
    page.ask("this one?")
    page.wait_answered(2)
    expect(page.questions.last.locator(".place")).to_be_visible()
    with Image.open(samples / "one-shape.png") as whole, Image.open(source(backend)) as part:
        width, height = whole.size
        middle = whole.convert("RGB").crop((width // 4, height // 4, width - width // 4, height - height // 4))
        assert np.array_equal(np.asarray(part.convert("RGB")), np.asarray(middle))
    # Why a part can't be had is seen, and the question stays.
    open_closer(page, page.questions.first)
    drag(page, (0.2, 0.2), (0.6, 0.6))
    page.dialog.get_by_label(QUESTION).fill("What is it?")
    file.unlink()
    page.page.keyboard.press("Enter")
    close = page.toasts.get_by_role("button", name="Dismiss")
    expect(page.toasts).to_contain_text("This file is no longer stored.")
    close.click()
    expect(close).to_have_count(0)
    page.page.keyboard.press("Escape")
    page.dialog.get_by_role("button", name="Close", exact=True).click()
    open_closer(page, page.questions.first)
    expect(page.dialog.get_by_label(QUESTION)).to_have_value("What is it?")
    page.page.keyboard.press("Escape")
    page.page.keyboard.press("Escape")
    expect(page.toasts).to_be_attached()


def test_a_videos_frame_has_parts_and_pictures_are_searched(
    page: ChatPage, backend: FakeBackend, samples: Path
) -> None:
    page.ask("which?", [samples / "moves-right.mp4"])
    page.wait_answered()
    page.questions.locator("video").evaluate(
        """async video => {
            video.preload = 'auto';
            const seeked = new Promise(resolve => video.addEventListener('seeked', resolve, { once: true }));
            video.currentTime = 2.5;
            await seeked;
        }"""
    )
    open_closer(page, page.questions)
    drag(page, (0.5, 0.0), (1.0, 1.0))
    page.dialog.get_by_role("button", name="What is this?").click()
    page.wait_answered(2)
    expect(page.questions.last).to_contain_text("What is this?")
    place = page.questions.last.locator(".place")
    expect(place).to_have_attribute("aria-label", "Show where this is in moves-right.mp4, 0:02.5")
    with Image.open(source(backend)) as part:
        assert part.width < part.height
    # Things are looked for in a picture.
    page.new_chat()
    page.ask("which?", [samples / "one-shape.png", samples / "two-shapes.jpg"])
    page.wait_answered()
    pictures = page.questions.locator(".medium")
    for at, num_media in ((1, 0), (0, 1)):
        pictures.nth(at).hover()
        pictures.nth(at).get_by_role("button", name="Find something in this picture").click()
        page.dialog.get_by_label("What to find").fill('star, "circle"')
        page.dialog.get_by_role("button", name="Find", exact=True).click()
        page.wait_answered(2 + (1 - at))
        question = backend.calls[-1].messages[-1]
        assert "categories: \"star, 'circle'\". Report bbox coordinates in JSON format." in question.text
        # The last picture that was shown needs not be shown again.
        assert len(question.media) == num_media
    # From the viewer, with points.
    page.questions.first.locator(".picture").first.click()
    page.dialog.get_by_role("button", name="Find something in this picture").click()
    page.dialog.last.get_by_label("Show as").select_option("Points")
    page.dialog.last.get_by_label("What to find").fill("star")
    page.page.keyboard.press("Enter")
    page.wait_answered(4)
    expect(page.dialog).to_have_count(0)
    assert '{"point_2d": [x, y], "label": "category"}' in backend.calls[-1].messages[-1].text


@pytest.mark.slow
def test_a_finger_draws_on_a_phone(open_page: OpenPage, samples: Path) -> None:
    page = open_page(viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    page.attach(samples / "one-shape.png")
    page.send_button.click()
    page.wait_answered()
    open_closer(page, page.questions)
    box = page.dialog.locator(".view").bounding_box()
    assert box is not None
    touch = page.context.new_cdp_session(page.page)
    for kind, share in (("touchStart", 0.2), ("touchMove", 0.5), ("touchMove", 0.8), ("touchEnd", None)):
        at = [] if share is None else [{"x": box["x"] + share * box["width"], "y": box["y"] + share * box["height"]}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})
    expect(page.dialog.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    part = page.dialog.locator(".cut").bounding_box()
    assert part is not None
    assert part["width"] == pytest.approx(0.6 * box["width"], abs=3)
    assert page.page.evaluate("document.querySelector('.viewer').scrollWidth") <= 320
    expect(page.dialog.get_by_role("button", name="Ask", exact=True)).to_be_in_viewport(ratio=1)
