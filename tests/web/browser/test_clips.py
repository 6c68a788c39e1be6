"""What the model sees of a video, what is chosen of it, and times in answers that play it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, expect

from qwen35mm.assets import demo_model_path
from qwen35mm.chat.media import strips
from qwen35mm_preprocess import MediaLimitError
from tests.chat.fake_backend import PHASES, FakeBackend
from tests.preprocess.media_files import HOUR_SCENES_S, encode_video, hour_video, scene
from tests.web.browser import ChatPage, OpenPage, box_of

pytestmark = pytest.mark.browser

# As many as the bundled model takes, or as there are: of a second at 15 a second, and of eight seconds at two.
MOST_FRAMES = json.loads((demo_model_path() / "video_preprocessor_config.json").read_text())["max_frames"]
IN_A_SECOND, IN_EIGHT_SECONDS = min(MOST_FRAMES, 16), min(MOST_FRAMES, 16)
SAME = IN_EIGHT_SECONDS - 6


@pytest.fixture
def video(samples: Path) -> Path:
    """Three seconds of 15 frames each; the demo takes a few of them by itself, and `MOST_FRAMES` at most."""
    return samples / "moves-right.mp4"


@pytest.fixture(autouse=True)
def reading(backend: FakeBackend) -> Iterator[None]:
    backend.completes_plans = True
    yield
    backend.completes_plans = False


def times(strip: Locator) -> list[str]:
    return strip.locator(".time").all_inner_texts()


def open_strip(strip: Locator) -> Locator:
    """Opens it, unless it is the first one of an empty chat."""
    if strip.get_attribute("open") is None:
        strip.locator("summary").click()
    expect(strip.locator(".film li").first).to_be_visible()
    return strip


def sent_times(backend: FakeBackend) -> list[str]:
    plan = backend.calls[-1].messages[-1].media[0].plan
    return [f"0:{time_s:04.1f}" for time_s in plan.frame_times_s]


def test_a_part_is_chosen_on_the_frames_and_the_model_is_shown_it(
    page: ChatPage, backend: FakeBackend, video: Path
) -> None:
    page.attach(video)
    strip = open_strip(page.page.locator(".films .frames"))
    label = page.thumbnails.locator(".label")
    # In an empty chat they take the examples' place.
    assert box_of(page.page.locator("form.composer"))["y"] < 80
    first = times(strip)
    expect(label).to_have_text(re.compile(f"^{len(first)} frames, "))
    assert (first[0], first[-1]) == ("0:00.0", "0:02.9")
    # Two handles, by keys: a step is a tenth of a second.
    start, end = strip.locator(".track input").all()
    start.focus()
    for _ in range(4):
        page.page.keyboard.press("ArrowRight")
    expect(start).to_be_focused()
    expect(start).to_have_attribute("aria-valuetext", "0:00.4")
    end.focus()
    page.page.keyboard.press("Home")
    expect(end).to_have_attribute("aria-valuetext", "0:00.5")
    expect(strip.locator(".film")).not_to_have_attribute("aria-busy", "true")
    # And as text.
    to = strip.get_by_label("To").locator("visible=true").last
    expect(to).to_have_value("0:00.5")
    to.fill("1,4")
    to.press("Enter")
    expect(end).to_have_attribute("aria-valuetext", "0:01.4")
    strip.get_by_label("Number of frames").fill("100")
    expect(label).to_have_text(re.compile(f"^{IN_A_SECOND} frames, "))
    expect(strip.locator(".film li")).to_have_count(IN_A_SECOND)
    expect(strip.locator(".time").last).to_have_text("0:01.4")
    chosen = times(strip)
    assert chosen[0] == "0:00.4"
    pictures = strip.locator(".film img").evaluate_all("images => images.map(image => image.src)")
    # A reload keeps it.
    page.box.fill("which?")
    page.visit()
    expect(label).to_have_text(re.compile(f"^{IN_A_SECOND} frames, "))
    strip = open_strip(page.page.locator(".films .frames"))
    assert times(strip) == chosen
    page.box.press("Enter")
    page.wait_answered()
    assert sent_times(backend) == chosen
    # What was sent shows the same, and a frame is seen on the whole screen.
    shown = page.questions.locator(".frames")
    expect(shown.locator("summary")).to_contain_text(f"{IN_A_SECOND} frames, 0:00.4–0:01.4")
    open_strip(shown)
    assert times(shown) == chosen
    assert shown.locator(".film img").evaluate_all("images => images.map(image => image.src)") == pictures
    shown.get_by_label("Frame at 0:01.4").click()
    expect(page.dialog).to_contain_text(f"moves-right.mp4, 0:01.4, {IN_A_SECOND} of {IN_A_SECOND}")
    page.page.keyboard.press("ArrowLeft")
    expect(page.dialog).to_contain_text(f"{IN_A_SECOND - 1} of {IN_A_SECOND}")
    page.page.keyboard.press("Escape")
    # An edit goes on with it, and gives it back.
    page.tool(page.questions, "Edit").click()
    strip = open_strip(page.page.locator(".films .frames"))
    assert times(strip) == chosen
    strip.get_by_role("button", name="Use whole video").click()
    expect(strip.locator(".time")).to_have_text(first)
    page.box.press("Enter")
    page.wait_until(lambda: len(backend.calls) == 2)
    assert sent_times(backend) == first


@pytest.mark.slow
def test_frames_that_show_the_same_are_seen_as_left_out(page: ChatPage, backend: FakeBackend, tmp_path: Path) -> None:
    still = tmp_path / "still.mp4"
    still.write_bytes(encode_video([scene(index // 16) for index in range(32)], fps=4))
    page.attach(still)
    strip = open_strip(page.page.locator(".films .frames"))
    expect(strip.locator(".same")).to_have_count(0)
    expect(strip.locator(".controls label").last).to_have_text(f"Leave out similar frames{SAME}")
    strip.get_by_label("Leave out similar frames").check()
    expect(strip.locator(".same")).to_have_count(SAME)
    shown = strip.get_by_text(f"Shown to the model: 6. Left out as similar: {SAME}.")
    expect(shown).to_be_visible()
    expect(strip.get_by_label("left out: same as before")).to_have_count(SAME)
    page.ask("which?")
    page.wait_answered()
    assert backend.calls[-1].messages[-1].media[0].plan.similar_difference


@pytest.mark.slow
def test_of_a_video_that_takes_too_long_a_part_can_be_chosen(
    page: ChatPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No test before has had its frames read.
    video = tmp_path / "long.mp4"
    video.write_bytes(encode_video([scene(index) for index in range(45)], fps=15))
    real = strips.sampled_frames

    def slow(path: Any, plan: Any, *how: Any) -> Any:
        if plan.frame_times_s[-1] > 2 and len(plan.frame_times_s) < 8:
            raise MediaLimitError("It takes too long.")
        return real(path, plan, *how)

    monkeypatch.setattr(strips, "sampled_frames", slow)
    page.attach(video)
    strip = page.page.locator(".films .frames")
    expect(strip.get_by_text("It takes too long.")).to_be_visible()
    expect(strip.locator(".behind img")).to_have_count(min(MOST_FRAMES, 12))
    strip.locator(".track input").last.fill("1")
    expect(strip.locator(".time").last).to_have_text("0:01.0")
    expect(strip.get_by_text("It takes too long.")).to_be_hidden()


@pytest.mark.slow
def test_several_videos_are_chosen_of_apart_and_fit_a_small_screen(open_page: OpenPage, video: Path) -> None:
    page = open_page(viewport={"width": 320, "height": 640})
    page.attach(video, video)
    one, two = page.page.locator(".films .frames").all()
    open_strip(two)
    two.locator(".track input").first.focus()
    page.page.keyboard.press("End")
    expect(two.locator("summary")).to_contain_text("0:02.9–0:03.0")
    expect(one.locator("summary")).not_to_contain_text("–")
    expect(page.thumbnails.locator(".label").last).to_contain_text("1 frame,")
    expect(page.thumbnails.locator(".label").first).not_to_contain_text("1 frame,")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 320
    films = page.page.locator(".films")
    assert films.evaluate("films => films.scrollWidth <= films.clientWidth")
    expect(page.send_button).to_be_in_viewport(ratio=1)


def test_an_hour_is_looked_at_as_a_whole_by_chapters_and_twice(
    page: ChatPage, backend: FakeBackend, tmp_path: Path
) -> None:
    video = tmp_path / "hour.mp4"
    video.write_bytes(hour_video())
    page.attach(video)
    # The frames stand in the place of the examples.
    strip = page.page.locator(".films .frames")
    expect(strip.locator(".film li")).to_have_count(MOST_FRAMES)
    expect(page.examples.first).to_be_hidden()
    assert box_of(page.page.locator(".films"))["height"] > 400
    assert box_of(strip.locator(".film img").first)["height"] > 80
    assert times(strip)[-1] == "59:59.0"
    chapters = strip.get_by_role("group", name="Chapters").get_by_role("button")
    expect(chapters).to_have_count(len(HOUR_SCENES_S))
    chapters.nth(1).click()
    expect(chapters.nth(1)).to_have_attribute("aria-pressed", "true")
    expect(strip.locator(".film .time").first).to_have_text("20:00.0")
    strip.get_by_role("button", name="Ask about this part").click()
    expect(page.box).to_be_focused()
    # Drawn over the pictures of the whole: from its middle to three quarters.
    behind = strip.locator(".behind")
    width, height = (box_of(behind)[side] for side in ("width", "height"))
    behind.hover(position={"x": width / 2, "y": height / 2})
    page.page.mouse.down()
    for share in (0.55, 0.65, 0.75):
        behind.hover(position={"x": width * share, "y": height / 2}, force=True)
    page.page.mouse.up()
    expect(strip.locator("summary")).to_contain_text(re.compile(r"(29:5|30:0)\S+–(44:5|45:0)"))
    strip.get_by_role("button", name="Use whole video").click()
    # A question for a time looks twice, at a price that is known before.
    twice = page.page.get_by_label("Then look closer at the times in the answer")
    page.box.fill("echo What comes? At 20:00.")
    expect(twice).not_to_be_checked()
    page.box.fill("phases When is it? At 20:00.")
    expect(twice).to_be_checked()
    expect(page.page.locator(".twice")).to_contain_text(re.compile(r"about [\d,]{3,} more tokens"))
    page.box.press("Enter")
    expect(page.stop_button).to_be_visible()
    page.wait_until(lambda: len(backend.calls) == 1)
    # Also if the page is loaded again meanwhile.
    page.page.reload()
    expect(page.stop_button).to_be_visible()
    for _ in range(2 * len(PHASES)):
        backend.next_phase()
    page.wait_answered(2)
    first, second = (call.messages[-1] for call in backend.calls)
    step_s = 3600 / MOST_FRAMES
    assert len(first.media[0].plan.frame_times_s) == MOST_FRAMES
    looked = second.media[0].plan.frame_times_s
    assert (looked[0], looked[-1]) == pytest.approx((1200 - step_s, 1200 + step_s), abs=1)
    assert second.text.startswith("phases When is it? At 20:00.\n\nLook closer: 1")
    expect(page.questions.last.locator("summary")).to_contain_text(f"{len(looked)} frames, 1")
    # By hand: the part comes into the message, which is sent when the person has seen what it costs.
    expect(page.answers.first.locator(".moment")).to_have_text("20:00")
    page.answers.first.get_by_role("button", name="Look closer at 1").click()
    expect(page.box).to_be_focused()
    expect(page.box).to_have_value(second.text)
    expect(page.thumbnails.locator(".label")).to_contain_text(f"{len(looked)} frames, ")
    expect(page.page.locator(".films .frames .film li")).to_have_count(len(looked))
    assert len(backend.calls) == 2
    page.box.fill("")
    page.page.get_by_role("button", name="Remove hour.mp4").click()
    page.questions.first.locator(".frames summary").click()
    page.questions.first.get_by_role("button", name="Ask about a part").click()
    expect(page.page.locator(".films .chapter")).to_have_count(len(HOUR_SCENES_S))


def moments(page: ChatPage) -> list[str]:
    return page.answers.last.locator(".answer .moment").all_inner_texts()


def test_times_in_an_answer_play_the_video(page: ChatPage, video: Path) -> None:
    page.ask("echo At 1 s, see 0:01", [])
    page.wait_answered()
    assert moments(page) == [], "no video precedes"
    page.ask("echo At **1.5 s** and from 0.2 s to 0.6 s, not 0:09 or `0:01`: <2.0 seconds>", [video])
    page.wait_answered(2)
    assert moments(page) == ["1.5 s", "0.2 s to 0.6 s", "<2.0 seconds>"]
    player = page.questions.last.locator("video")
    assert box_of(player)["width"] > 320, "a video alone has room"
    alone, span, marked = page.answers.nth(1).locator(".moment").all()
    expect(marked).to_have_attribute("title", "Play from 0:02.0")
    alone.click()
    page.wait_until(lambda: player.evaluate("video => video.currentTime >= 1.5 && !video.seeking"))
    # A range is played to its end, and it rests there, however late a busy page notices.
    span.focus()
    page.page.keyboard.press("Enter")
    ended = "video => video.paused && !video.seeking && Math.abs(video.currentTime - 0.6) < 0.01"
    page.wait_until(lambda: player.evaluate(ended))
    expect(page.page.locator(".player")).to_be_hidden()
    # Where the player is out of sight, it comes to the answer, which stays where it is.
    page.ask("echo " + "\n\nfurther down\n\n" * 30 + "at 1 s")
    page.wait_answered(3)
    transcript = page.page.locator(".transcript")
    before = transcript.evaluate("element => element.scrollTop")
    page.answers.last.locator(".moment").click()
    above = page.page.locator(".player")
    page.wait_until(lambda: above.locator("video").evaluate("video => video.currentTime >= 1"))
    assert transcript.evaluate("element => element.scrollTop") == before
    page.page.keyboard.press("Escape")
    expect(above).to_be_hidden()
    assert transcript.evaluate("element => element.scrollTop") == before
    page.page.reload()
    expect(page.answers.nth(1).locator(".moment")).to_have_count(3)


@pytest.mark.slow
def test_times_are_those_of_the_video_that_is_named(page: ChatPage, samples: Path, tmp_path: Path) -> None:
    first, *others = [Image.new("RGB", (64, 48), colour) for colour in ("red", "green", "blue", "white")]
    first.save(tmp_path / "blinks.gif", save_all=True, append_images=others, duration=500)
    (tmp_path / "old.avi").write_bytes(encode_video([scene(index) for index in range(20)], container="avi"))
    page.attach(samples / "moves-right.mp4", tmp_path / "blinks.gif", tmp_path / "old.avi")
    page.ask("echo In moves-right at 1 s. In the second video at 0.5 s. In old.avi at 1.5 s, and at 2.5 s.")
    page.wait_answered()
    assert moments(page) == ["1 s", "0.5 s", "1.5 s"], "the last one has two seconds"
    playable, *others = page.answers.last.locator(".moment").all()
    playable.click()
    player = page.questions.locator("video").first
    page.wait_until(lambda: player.evaluate("video => video.currentTime >= 1"))
    # What no player plays is shown as its frame.
    for moment, words in zip(others, ("blinks.gif, 0:00.5", "old.avi, 0:01.5"), strict=True):
        moment.click()
        expect(page.dialog).to_contain_text(words)
        page.wait_until(lambda: page.dialog.locator("img").evaluate("image => image.naturalWidth > 0"))
        page.page.keyboard.press("Escape")
        expect(page.page.locator(".player")).to_be_hidden()
