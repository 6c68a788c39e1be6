"""Pictures and videos on the whole screen, in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.preprocess.media_files import encode_video, scene
from tests.web.browser import ChatPage, OpenPage, box_of

pytestmark = pytest.mark.browser


def is_whole(page: ChatPage) -> bool:
    """Whether all of the picture lies on the stage, in its middle."""
    box, stage = box_of(page.dialog.locator(".view")), box_of(page.dialog.locator(".stage"))
    middles = [(each["x"] + each["width"] / 2, each["y"] + each["height"] / 2) for each in (box, stage)]
    is_inside = box["width"] <= stage["width"] + 1 and box["height"] <= stage["height"] + 1
    return is_inside and max(abs(a - b) for a, b in zip(*middles, strict=True)) < 1


@pytest.fixture
def files(samples: Path, tmp_path: Path) -> list[Path]:
    """A wide picture, a clip and a small picture."""
    Image.effect_noise((2400, 800), 60).save(tmp_path / "wide.png")
    return [tmp_path / "wide.png", samples / "moves-right.mp4", samples / "one-shape.png"]


@pytest.mark.slow
def test_pictures_are_looked_at_by_keys(page: ChatPage, files: list[Path]) -> None:
    page.ask("which?", files)
    page.wait_answered()
    opener = page.questions.get_by_role("button", name="wide.png")
    opener.click()
    title, percent, keys = page.dialog.locator("h2"), page.dialog.locator(".percent"), page.page.keyboard
    expect(title).to_have_text("wide.png, 1 of 3")
    expect(page.dialog.locator(".view img")).to_be_visible()
    assert is_whole(page)
    keys.press("1")
    expect(percent).to_have_text("100 %")
    assert box_of(page.dialog.locator(".view"))["width"] == pytest.approx(2400, abs=1)
    left = box_of(page.dialog.locator(".view"))["x"]
    keys.press("Shift+ArrowRight")
    assert box_of(page.dialog.locator(".view"))["x"] == pytest.approx(left - 80, abs=1)
    keys.press("+")
    expect(percent).to_have_text("140 %")
    keys.press("-")
    expect(percent).to_have_text("100 %")
    keys.press("0")
    page.wait_until(lambda: is_whole(page))
    expect(page.dialog.get_by_role("button", name="Previous")).to_be_hidden()
    keys.press("ArrowRight")
    expect(title).to_have_text("moves-right.mp4, 2 of 3")
    assert box_of(page.dialog.locator("video")) == box_of(page.dialog.locator(".stage"))
    expect(page.dialog.get_by_role("button", name="Zoom in")).to_be_hidden()
    page.dialog.get_by_role("button", name="Next").click()
    expect(title).to_have_text("one-shape.png, 3 of 3")
    page.wait_until(lambda: is_whole(page))
    keys.press("Home")
    expect(title).to_have_text("wide.png, 1 of 3")
    with page.page.expect_download() as saved:
        page.dialog.get_by_role("link", name="Save").click()
    assert (saved.value.suggested_filename, Path(saved.value.path()).read_bytes()) == (
        "wide.png",
        files[0].read_bytes(),
    )
    keys.press("Escape")
    expect(page.dialog).to_have_count(0)
    expect(opener).to_be_focused()


def test_media_are_looked_at_before_and_after_sending(page: ChatPage, files: list[Path], tmp_path: Path) -> None:
    Image.new("RGB", (60, 30), "red").save(tmp_path / "a.tiff")
    (tmp_path / "a.avi").write_bytes(encode_video([scene(index) for index in range(4)], container="avi", codec="mpeg4"))
    # Before they are sent: of a clip that browsers don't play its first frame, of which a part can be asked about, too.
    page.attach(files[0], tmp_path / "a.tiff", tmp_path / "a.avi")
    page.page.get_by_role("button", name="View wide.png").click()
    title, image = page.dialog.locator("h2"), page.dialog.locator(".view img")
    expect(title).to_have_text("wide.png, 1 of 3")
    page.page.keyboard.press("End")
    expect(title).to_have_text("a.avi, 0:00.0, 3 of 3")
    page.wait_until(lambda: bool(image.evaluate("image => image.naturalWidth === 64")))
    expect(page.dialog.get_by_role("button", name="Look closer")).to_be_visible()
    page.page.keyboard.press("Escape")
    page.ask("which?")
    page.wait_answered()
    page.questions.get_by_role("button", name="wide.png").click()
    view, percent, mouse = page.dialog.locator(".view"), page.dialog.locator(".percent"), page.page.mouse
    expect(view.locator("img")).to_be_visible()
    whole = box_of(view)
    at = (whole["x"] + whole["width"] / 4, whole["y"] + whole["height"] / 4)
    mouse.dblclick(*at)
    expect(percent).to_have_text("100 %")
    box = box_of(view)
    assert at[0] - box["x"] == pytest.approx(2400 / 4, abs=2), "what was clicked stays below the mouse"
    mouse.down()
    mouse.move(at[0] - 100, at[1])
    mouse.up()
    assert box_of(view)["x"] == pytest.approx(box["x"] - 100, abs=1)
    mouse.wheel(0, 300)
    page.wait_until(lambda: box_of(view)["width"] < 2000)
    page.dialog.get_by_role("button", name="Fit").click()
    assert is_whole(page)
    for key, shown in (("1", "100 %"), ("+", "140 %"), ("-", "100 %")):
        page.page.keyboard.press(key)
        expect(percent).to_have_text(shown)
    page.page.keyboard.press("0")
    page.wait_until(lambda: is_whole(page))
    # Browsers don't show it by themselves.
    page.page.keyboard.press("ArrowRight")
    page.wait_until(lambda: bool(view.locator("img").evaluate("image => image.naturalWidth === 60")))
    page.dialog.get_by_role("button", name="Close", exact=True).click()
    expect(page.dialog).to_have_count(0)


@pytest.mark.slow
def test_many_pictures_stand_in_a_grid(page: ChatPage, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(12)]
    for number, path in enumerate(files):
        Image.new("RGB", (40 + 20 * number, 100)).save(path)
    page.ask("which?", files)
    page.wait_answered()
    pictures = page.questions.locator(".files img")
    boxes = [box_of(each) for each in pictures.all()]
    assert {(each["width"], each["height"]) for each in boxes} == {(72, 72)}
    assert len({each["y"] for each in boxes}) == 2
    pictures.last.click()
    expect(page.dialog.locator("h2")).to_have_text("11.png, 12 of 12")


def test_a_finger_swipes_and_two_pinch_on_a_narrow_screen(open_page: OpenPage, files: list[Path]) -> None:
    page = open_page(viewport={"width": 320, "height": 560}, has_touch=True, is_mobile=True)
    page.attach(files[0], files[2])
    page.send_button.click()
    page.wait_answered()
    page.questions.get_by_role("button", name="wide.png").click()
    title, view = page.dialog.locator("h2"), page.dialog.locator(".view")
    expect(view.locator("img")).to_be_visible()
    assert page.page.evaluate("document.querySelector('.viewer').scrollWidth") <= 320
    touch = page.context.new_cdp_session(page.page)

    def fingers(kind: str, *points: tuple[float, float]) -> None:
        places = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    fingers("touchStart", (250, 300))
    fingers("touchMove", (150, 304))
    fingers("touchMove", (60, 306))
    fingers("touchEnd")
    expect(title).to_contain_text("one-shape.png, 2 of 2")
    page.wait_until(lambda: is_whole(page))
    before = box_of(view)["width"]
    fingers("touchStart", (140, 300), (180, 300))
    fingers("touchMove", (100, 300), (220, 300))
    fingers("touchEnd")
    page.wait_until(lambda: box_of(view)["width"] > 2 * before)
    fingers("touchStart", (100, 300))
    fingers("touchMove", (280, 300))
    fingers("touchEnd")
    expect(title).to_contain_text("one-shape.png, 2 of 2")
