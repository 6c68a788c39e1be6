"""Boxes and points of answers, drawn on their pictures, in a browser."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, expect

from tests.chat.fake_backend import FakeBackend
from tests.web.browser import ChatPage

pytestmark = pytest.mark.browser

MARKS = [
    {"bbox_2d": [100, 200, 500, 800], "label": "left"},
    {"bbox_2d": [150, 300, 250, 500], "label": "<b>small</b>", "colour": "red"},
    {"point_2d": [900, 100], "label": "dot"},
]


def place(mark: Locator, picture: Locator) -> list[float]:
    """Where a mark's box lies, in thousandths of its picture's sides."""
    box, whole = mark.locator(".mark-box").bounding_box(), picture.bounding_box()
    assert box is not None
    assert whole is not None
    edges = (
        (box["x"] - whole["x"]) / whole["width"],
        (box["y"] - whole["y"]) / whole["height"],
        (box["x"] + box["width"] - whole["x"]) / whole["width"],
        (box["y"] + box["height"] - whole["y"]) / whole["height"],
    )
    return [1000 * edge for edge in edges]


def answer(page: ChatPage, marks: Any, *files: Path, before: str = "") -> None:
    page.ask(f"echo {before}{json.dumps(marks)}", files)
    page.wait_until(lambda: page.answers.last.locator(".pointed").count() == len(marks))
    page.wait_answered(page.answers.count())


def saved(page: ChatPage, button: str) -> tuple[str, bytes]:
    with page.page.expect_download() as download:
        page.answers.last.get_by_role("button", name=button).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_marks_lie_on_the_turned_picture_light_up_and_are_saved(page: ChatPage, tmp_path: Path) -> None:
    lying, exif = Image.new("RGB", (800, 400), "white"), Image.Exif()
    exif[0x0112] = 6
    lying.save(tmp_path / "a.jpg", exif=exif)
    answer(page, MARKS, tmp_path / "a.jpg")
    figure = page.answers.locator(".grounding")
    image, marks, lines = figure.locator("img"), figure.locator(".pointed"), figure.locator(".mark-line")
    page.wait_until(lambda: bool(image.evaluate("image => image.naturalWidth === 320")))
    assert place(marks.first, image) == pytest.approx([100, 200, 500, 800], abs=8)
    expect(lines).to_have_text(["1left", "2<b>small</b>colour: red", "3dot"])
    expect(page.answers.locator("b")).to_have_count(0)
    # The small one lies in the other, and is above it.
    marks.nth(1).hover()
    expect(figure.locator("li.lit")).to_contain_text("small")
    lines.nth(2).focus()
    expect(figure.locator(".pointed.lit .mark-name")).to_have_text("3 dot")
    expect(figure.locator("li.lit")).to_contain_text("dot")
    name, data = saved(page, "JSON")
    kept = json.loads(data)
    assert (name, kept["width"], kept["height"], kept["unit"]) == ("a.json", 400, 800, "pixel")
    assert kept["objects"][0] == {"label": "left", "bbox_2d": [40, 160, 200, 640]}
    assert kept["objects"][1]["colour"] == "red"
    name, data = saved(page, "PNG")
    with Image.open(io.BytesIO(data)) as drawn:
        assert (name, drawn.format, drawn.size) == ("a.png", "PNG", (400, 800))
        assert drawn.convert("RGB").getpixel((120, 640)) != (255, 255, 255), "the lower edge of the first"
        assert drawn.convert("RGB").getpixel((300, 600)) == (255, 255, 255)
    # What was written down in other numbers lies elsewhere.
    figure.locator("xpath=../..").get_by_label("Coordinates").select_option("Pixels of the file")
    assert place(marks.first, image) == pytest.approx([250, 250, 1000, 1000], abs=8)


def test_marks_come_with_the_answer_and_are_looked_at_from_near_and_on_frames(
    page: ChatPage, backend: FakeBackend, samples: Path
) -> None:
    text = 'Look:\n```json\n[{"bbox_2d": [600, 600, 700, 700], "label": "box"}, {"bbox_2d": [0, 0, 10'
    page.ask(f"echo {text}", [samples / "one-shape.png", samples / "two-shapes.jpg"])
    expect(page.answers.locator(".mark-line")).to_have_text(["1box"])
    page.wait_answered()
    expect(page.answers.locator(".grounding figcaption")).to_contain_text("two-shapes.jpg")
    # The text is there, folded.
    expect(page.answers.get_by_text("Look:")).to_be_visible()
    code = page.answers.locator(".json code")
    expect(code).to_be_hidden()
    page.answers.locator(".json summary").click()
    expect(code).to_contain_text('"label": "box"')
    page.answers.locator(".mark-line").click()
    view, mark = page.dialog.locator(".view"), page.dialog.locator(".pointed")
    expect(view.locator("img")).to_be_visible()
    assert place(mark, view) == pytest.approx([600, 600, 700, 700], abs=4)
    expect(mark).to_have_class("pointed lit")
    before = view.bounding_box()
    assert before is not None
    page.dialog.locator(".mark-line").click()
    page.wait_until(lambda: (view.bounding_box() or before)["width"] > 2 * before["width"])
    box, stage = mark.bounding_box(), page.dialog.locator(".stage").bounding_box()
    assert box is not None
    assert stage is not None
    assert box["x"] + box["width"] / 2 == pytest.approx(stage["x"] + stage["width"] / 2, abs=2)
    page.page.keyboard.press("Escape")
    expect(page.answers.locator(".mark-line")).to_be_focused()
    marks = [
        {"bbox_2d": [100, 100, 200, 200], "label": "star", "time": "00:00.1"},
        {"bbox_2d": [700, 100, 900, 200], "label": "star", "time": 99},
    ]
    # Those of a video lie on the frames that were shown.
    answer(page, marks, samples / "moves-right.mp4")
    figures = page.answers.nth(1).locator(".grounding")
    expect(figures).to_have_count(2)
    expect(figures.first.locator("figcaption")).to_contain_text("moves-right.mp4, 0:00.0")
    sources = [figure.locator("img").get_attribute("src") or "" for figure in figures.all()]
    assert "?time_s=0&" in sources[0]
    assert sources[0] != sources[1]
    for figure in figures.all():
        image = figure.locator("img")
        page.wait_until(lambda image=image: bool(image.evaluate("image => image.naturalWidth > 0")))
    figures.first.locator(".picture").click()
    expect(page.dialog.locator("h2")).to_have_text("moves-right.mp4, 0:00.0, 1 of 2")
    page.page.keyboard.press("ArrowRight")
    expect(page.dialog.locator(".mark-line")).to_contain_text("star")
    # What is in a box is asked by one click, in the viewer as below the answer.
    page.dialog.get_by_role("button", name="What is this?").click()
    expect(page.dialog).to_have_count(0)
    page.wait_answered(3)
    figures.first.get_by_role("button", name="What is this?").dblclick()
    page.wait_answered(4)
    expect(page.outbox).to_have_count(0)
    expect(page.questions.last.locator(".place")).to_have_attribute("aria-label", re.compile("moves-right.mp4, 0:00.0"))
    assert [call.messages[-1].text for call in backend.calls[-2:]] == ["What is this?"] * 2
