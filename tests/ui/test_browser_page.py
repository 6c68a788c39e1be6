"""The page in a real browser, over a backend whose answers the tests decide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from qwen35mm.prompt import Image, Video
from tests.ui.browser import ChatPage, OpenPage
from tests.ui.fake_backend import FakeBackend

pytestmark = pytest.mark.browser


def test_a_question_is_answered(page: ChatPage) -> None:
    page.ask("echo Hello there")
    assert page.wait_answered() == "Hello there"
    expect(page.questions).to_have_text("echo Hello there")
    expect(page.status).to_contain_text("2 tokens · 40.0 tokens/s")
    assert page.box.input_value() == ""
    assert page.page.title() == "qwen35mm"


def test_enter_sends_and_shift_enter_begins_a_line(page: ChatPage, backend: FakeBackend) -> None:
    page.box.fill("first")
    page.box.press("Shift+Enter")
    page.box.press_sequentially("second")
    assert backend.calls == []
    page.box.press("Enter")
    page.wait_answered()
    assert backend.calls[0].messages[-1].text == "first\nsecond"


def test_images_and_a_video_in_one_message(page: ChatPage, backend: FakeBackend, samples: Path) -> None:
    page.ask("What is this?", [samples / "one-shape.png", samples / "wide.jpg", samples / "moves-right.mp4"])
    assert page.wait_answered() == "2 images, 1 video"
    parts = [type(part) for part in backend.calls[0].messages[0].media]
    assert parts == [Image, Image, Video]
    expect(page.questions.locator("img")).to_have_count(2)
    expect(page.questions.locator("video")).to_have_count(1)


def test_an_animated_gif_is_a_video(page: ChatPage, samples: Path) -> None:
    page.ask("What is this?", [samples / "moves-left.gif"])
    assert page.wait_answered() == "1 video"


def test_progress_of_each_phase(page: ChatPage, backend: FakeBackend, samples: Path) -> None:
    page.ask("phases", [samples / "moves-up.mp4"])
    for words in (
        "Waiting in line, 1 ahead",
        "Reading video, 12/24 frames",
        "Encoding video, 50%",
        "Reading the prompt, 512/1,024 tokens",
    ):
        expect(page.status).to_contain_text(words)
        backend.next_phase()
    assert page.wait_answered() == "1 video"


def test_thinking_is_folded_after_it(page: ChatPage) -> None:
    page.ask("think It is red.")
    assert "It is red." in page.wait_answered()
    title = page.answers.get_by_text(re.compile(r"Thought for \d+\.\d s"))
    expect(title).to_be_visible()
    expect(page.answers).not_to_contain_text("Let me see.")
    title.click()
    expect(page.answers).to_contain_text("Let me see. That is it.")


def test_an_error_is_said_in_words_and_can_be_tried_again(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("refuse The file 'my_photo_1.png' *is* <too> large.")
    assert "The file 'my_photo_1.png' *is* <too> large." in page.wait_answered()
    expect(page.questions).to_have_count(1)
    page.page.get_by_label("Retry").click()
    page.wait_until(lambda: len(backend.calls) == 2)
    page.wait_answered(1)
    page.ask("echo still here")
    assert page.wait_answered(2) == "still here"
    assert len(backend.calls[-1].messages) == 1


def test_a_bug_shows_no_detail(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("break")
    answer = page.wait_answered()
    assert "Something went wrong inside the program" in answer
    assert "secret" not in page.page.content()
    assert "Traceback" not in page.page.content()
    page.ask("echo still here")
    assert page.wait_answered(2) == "still here"


def test_a_broken_file_is_explained(page: ChatPage, tmp_path: Path) -> None:
    broken = tmp_path / "holiday.png"
    broken.write_bytes(b"this is no picture")
    page.ask("What is this?", [broken])
    answer = page.wait_answered()
    assert "'holiday.png' is not an image or a video that is read here" in answer
    assert str(tmp_path) not in page.page.content()
    page.ask("echo still here")
    assert page.wait_answered(2) == "still here"


def test_a_text_file_is_not_taken(page: ChatPage, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with page.page.expect_file_chooser() as chooser:
        page.page.locator("#box .upload-button").click()
    chooser.value.set_files(str(tmp_path / "notes.txt"))
    expect(page.toasts).to_contain_text("Invalid file type")
    page.ask("echo still here")
    assert page.wait_answered() == "still here"


def test_an_answer_that_was_cut_says_so(page: ChatPage) -> None:
    page.ask("length")
    page.wait_answered()
    expect(page.status).to_contain_text("Cut at its limit")


def test_nothing_is_not_sent(page: ChatPage, backend: FakeBackend) -> None:
    page.box.fill("   ")
    page.box.press("Enter")
    expect(page.toasts).to_contain_text("Type a question, or add a picture or a video.")
    assert backend.calls == []


def test_drawing_is_10_to_20_times_a_second(page: ChatPage) -> None:
    """The model writes 500 words a second here, and more often than 20 times is not drawn."""
    page.ask("slow")
    expect(page.answers).to_contain_text("word")
    num_changes, seconds = page.page.evaluate(
        """() => new Promise(resolve => {
            const answer = [...document.querySelectorAll('#chat [data-testid=bot]')].pop();
            let num = 0, last = answer.innerText, start = performance.now();
            const look = () => {
                if (answer.innerText !== last) { num += 1; last = answer.innerText; }
                const seconds = (performance.now() - start) / 1000;
                num >= 20 ? resolve([num, seconds]) : setTimeout(look, 5);
            };
            look();
        })"""
    )
    page.stop_button.click()
    page.wait_answered()
    assert num_changes / seconds <= 21


def test_settings_reach_the_backend(page: ChatPage, backend: FakeBackend) -> None:
    page.ask("echo before")
    page.wait_answered(1)
    assert (backend.calls[0].params, backend.calls[0].enable_thinking) == (backend.loaded.generation, False)
    page.page.locator("#settings button").first.click()
    page.page.get_by_label("Think first").check()
    page.page.get_by_label("Longest answer").fill("64")
    page.page.get_by_label("Seed").fill("7")
    page.page.get_by_label("number input for Temperature").fill("0.25")
    page.ask("echo after")
    page.wait_answered(2)
    params = backend.calls[1].params
    assert (params.max_tokens, params.seed, params.temperature, params.top_k) == (64, 7, 0.25, 20)
    assert backend.calls[1].enable_thinking is True


def test_a_wrong_setting_keeps_the_message(page: ChatPage, backend: FakeBackend) -> None:
    page.page.locator("#settings button").first.click()
    page.page.get_by_label("Longest answer").fill("many")
    page.ask("echo Hello")
    expect(page.toasts).to_contain_text("The longest answer in the settings must be a whole number")
    assert page.box.input_value() == "echo Hello"
    assert backend.calls == []


def test_markup_in_a_question_is_shown_and_a_strange_picture_is_not_loaded(page: ChatPage) -> None:
    page.ask("echo <b>bold</b> ![](https://example.invalid/spy.png) <script>document.title = 'x'</script>")
    page.wait_answered()
    expect(page.questions).to_contain_text("<b>bold</b>")
    assert page.page.title() == "qwen35mm"
    assert any("Content Security Policy" in problem for problem in page.problems)
    assert page.page.evaluate("document.querySelector('#chat .bot-row img')?.naturalWidth ?? 0") == 0
    page.problems.clear()


def test_long_pasted_text_is_sent_as_text(page: ChatPage, backend: FakeBackend) -> None:
    text = "echo " + "long " * 2000
    page.box.evaluate(
        """(box, text) => {
            const data = new DataTransfer();
            data.setData('text/plain', text);
            box.focus();
            const paste = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
            if (box.dispatchEvent(paste)) document.execCommand('insertText', false, text);
        }""",
        text,
    )
    page.box.press("Enter")
    page.wait_answered()
    assert backend.calls[0].messages[0].text == text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_room_for_everything(open_page: OpenPage, scheme: str) -> None:
    page = open_page(viewport={"width": 360, "height": 700}, color_scheme=scheme, is_mobile=True, has_touch=True)
    expect(page.examples.first).to_be_visible()
    page.ask("echo Hello " + "wide " * 100)
    page.wait_answered()
    width, background = page.page.evaluate(
        "[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
    )
    assert width <= 360
    brightness = sum(int(part) for part in re.findall(r"\d+", background)[:3]) / 3
    assert (brightness < 64) == (scheme == "dark")
    assert page.send_button.bounding_box()["y"] < 700  # pyright: ignore[reportOptionalSubscript]


def test_the_page_does_not_jump_while_it_is_written(page: ChatPage) -> None:
    before = page.page.locator("#box").bounding_box()
    page.ask("slow")
    expect(page.answers).to_contain_text("word word")
    assert page.page.locator("#box").bounding_box() == before
    page.stop_button.click()
    page.wait_answered()
    assert page.page.locator("#box").bounding_box() == before
