"""The whole way in a real browser: the page, the real engine, the bundled demo model."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.web import Server, serve
from qwen35mm.web.serving.examples import choose_examples, load_samples
from tests.preprocess.media_files import encode_video, scene
from tests.web.browser import ChatPage, chat_pages

pytestmark = pytest.mark.browser

SAMPLES = asset_path("samples")
# A picture and a clip in `make test`, others with the long tests.
SOME = ("two-shapes.jpg", "moves-right.mp4")
OTHERS = pytest.param(("one-shape.png", "moves-left.gif"), marks=pytest.mark.slow)
TURNS = {entry["file"]: entry["turns"] for entry in json.loads((SAMPLES / "samples.json").read_text())}


def demo_frames() -> int:
    """As many as the bundled model takes of a video."""
    return json.loads((demo_model_path() / "video_preprocessor_config.json").read_text())["max_frames"]


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalBackend]:
    backend = LocalBackend.load(demo_model_path())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def demo_server(demo: LocalBackend) -> Iterator[Server]:
    server = serve(demo, port=0)
    yield server
    server.close()


@pytest.fixture(scope="module")
def tab(browser: Browser, demo_server: Server) -> Iterator[ChatPage]:
    page = ChatPage(browser, demo_server.address)
    page.leave()
    yield page
    page.close()


@pytest.fixture
def page(tab: ChatPage, demo_server: Server) -> Iterator[ChatPage]:
    demo_server.store.delete_owner("local")
    tab.visit()
    yield tab
    tab.leave()


def test_the_page_says_that_this_is_for_practice_and_its_examples_are_answered_rightly(page: ChatPage) -> None:
    expect(page.page.locator(".top .model")).to_have_text("Practice model")
    expect(page.page.locator(".welcome.card")).to_contain_text("It only knows drawn shapes.")
    examples = choose_examples(load_samples())
    expect(page.examples).to_have_count(len(examples))
    # Each is seen whole, and a clip has a picture before it plays.
    shots = page.examples.locator("img, video")
    for shot in shots.evaluate_all("shots => shots.map(shot => [shot.src, shot.poster])"):
        for address in filter(None, shot):
            assert page.context.request.get(address).ok
    fits = page.examples.locator("img").evaluate_all("images => images.map(image => getComputedStyle(image).objectFit)")
    assert set(fits) == {"contain"}
    for index in (0, len(examples) - 1):
        expect(page.examples.nth(index)).to_contain_text(examples[index].question)
        page.examples.nth(index).click()
        assert page.wait_answered() == TURNS[examples[index].path.name][0]["answer"]
        page.new_chat()


@pytest.mark.parametrize("names", [SOME, OTHERS], ids=" ".join)
def test_uploads_are_answered_rightly_and_a_cut_one_is_explained(
    page: ChatPage, demo: LocalBackend, names: tuple[str, ...], tmp_path: Path
) -> None:
    cut = tmp_path / f"cut-{names[-1]}"
    content = (SAMPLES / names[-1]).read_bytes()
    cut.write_bytes(content[: len(content) // 8])
    page.page.locator(".composer input[type=file]").set_input_files(cut)
    explained = page.page.locator(".toast, .thumbnail.bad .label").filter(has_text=f"'cut-{names[-1]}'")
    expect(explained.first).to_be_visible()
    if names[-1].endswith(".mp4"):
        # It is not sent, and survives a reload with what is written.
        page.ask("What is this?")
        page.page.reload()
        page.page.get_by_role("button", name=f"Remove {cut.name}").click()
    for name in names:
        page.new_chat()
        files = [SAMPLES / name]
        for number, turn in enumerate(TURNS[name], start=1):
            page.ask(turn["question"], files)
            assert page.wait_answered(number) == turn["answer"]
            files = []
    expect(page.open_cost()).to_contain_text("tokens per second")
    # Several at once, and none, get an answer.
    page.new_chat()
    page.ask("Hello")
    assert page.wait_answered(1)
    page.ask("How many shapes are there?", [SAMPLES / "wide.jpg", SAMPLES / "tall.png", SAMPLES / "moves-down.webm"])
    assert page.wait_answered(2)
    expect(page.page.locator(".problem:visible")).to_have_count(0)
    page.wait_until(lambda: demo.engine.idle)


@pytest.mark.slow
def test_a_part_of_a_clip_is_asked_about_and_what_it_left_out_is_seen(page: ChatPage, tmp_path: Path) -> None:
    page.attach(SAMPLES / "moves-right.mp4")
    before = page.page.locator(".films .frames")
    before.get_by_label("From").locator("visible=true").last.fill("1")
    before.get_by_label("To").locator("visible=true").last.press("Enter")
    page.ask("Where does the shape move?")
    assert page.wait_answered() == "It moves to the right."
    expect(page.questions.locator(".frames summary")).to_contain_text("4 frames, 0:01–0:03")
    still = tmp_path / "still.mp4"
    still.write_bytes(encode_video([scene(index // 16) for index in range(32)], fps=4))
    page.attach(still)
    before.locator("summary").click()
    before.get_by_label("Leave out similar frames").check()
    same = min(demo_frames(), 16) - 6
    expect(before.locator(".same")).to_have_count(same)
    times = before.locator(".time").all_inner_texts()
    page.ask("What do you see?")
    page.wait_answered(2)
    after = page.questions.last.locator(".frames")
    expect(after.locator("summary")).to_contain_text("6 frames")
    after.locator("summary").click()
    expect(after.locator(".time")).to_have_text(times)
    expect(after.locator(".same")).to_have_count(same)


class StepByStep:
    """Lets an engine make one step for each permit while anybody waits for a reply, and counts these steps."""

    def __init__(self, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits = threading.Semaphore(0)
        self.num_begun = 0
        self._free = False
        self._engine = backend.engine._engine
        self._step = self._engine.step
        monkeypatch.setattr(self._engine, "step", self._wait_and_step)

    def let_go(self) -> None:
        """Steps need no permits from here on."""
        self._free = True
        self.permits.release()

    def _wait_and_step(self) -> object:
        # What the engine does for nobody, such as computing a conversation's history, goes on by itself.
        if self._engine.has_requests and not self._free:
            self.num_begun += 1
            self.permits.acquire()
        return self._step()


@pytest.fixture
def steps(demo: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepByStep]:
    steps = StepByStep(demo, monkeypatch)
    yield steps
    steps.let_go()


@pytest.mark.parametrize("num_steps", [2, *(pytest.param(num, marks=pytest.mark.slow) for num in (0, 8))])
def test_stop_ends_the_engine_within_one_step(
    page: ChatPage, demo: LocalBackend, steps: StepByStep, num_steps: int
) -> None:
    """Stopped before the image is encoded, while it is, and while the answer is written."""
    for _ in range(num_steps):
        steps.permits.release()
    page.ask("What is in this picture?", [SAMPLES / "three-shapes.png"])
    page.wait_until(lambda: steps.num_begun == num_steps + 1)
    page.stop_button.click()
    page.wait_answered()
    # The step in hand ends, and no other begins.
    steps.permits.release()
    page.wait_until(lambda: demo.engine.idle)
    assert steps.num_begun == num_steps + 1
    steps.let_go()
    page.ask("How many shapes are there?", [SAMPLES / "three-shapes.png"])
    assert page.wait_answered(2) == "There are three shapes."


def test_leaving_the_page_ends_the_engine(
    page: ChatPage, demo: LocalBackend, demo_server: Server, steps: StepByStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.ask("What is in this picture?", [SAMPLES / "three-shapes.png"])
    page.wait_until(lambda: steps.num_begun == 1)
    monkeypatch.setattr(demo_server.replies, "_grace_s", 0.1)
    closed, page.page = page.page, page.context.new_page()
    closed.close()
    # Steps go on until the server notices that nobody is there.
    page.wait_until(lambda: steps.permits.release() or demo.engine.idle)
    demo.engine._engine.check_integrity()


def test_stop_while_a_video_is_read_ends_the_reading(
    page: ChatPage, demo: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a video is: its reader notices with the next frame, and the engine answers the next question."""
    ended = threading.Event()

    def read_for_ever(source: Any, plan: Any, processing: Any, limits: Any, progress: Any) -> Any:
        try:
            while True:
                progress(1, 1000)
                time.sleep(0.01)
        finally:
            ended.set()

    with monkeypatch.context() as patch:
        patch.setattr("qwen35mm_preprocess.processor.video_patches", read_for_ever)
        page.ask("What happens in the video?", [SAMPLES / "moves-right.mp4"])
        expect(page.work).to_contain_text("Reading video, 1/1,000 frames")
        page.stop_button.click()
        page.wait_answered()
        page.wait_until(ended.is_set)
    expect(page.answers.locator(".problem")).to_contain_text("Stopped before the answer")
    assert demo.engine.idle
    page.ask("How many shapes are there?", [SAMPLES / "three-shapes.png"])
    assert page.wait_answered(2) == "There are three shapes."


@pytest.mark.slow
def test_a_larger_context_where_the_memory_allows(browser: Browser) -> None:
    from qwen35mm.engine import EngineSettings
    from qwen35mm.model_library import BackendOptions, BackendSwitch

    options = BackendOptions(settings=EngineSettings(context_length=256))
    switch = BackendSwitch.of(options.load(demo_model_path()), options)
    server = serve(switch, port=0)
    try:
        with chat_pages(browser, server.address) as opener:
            page = opener()
            page.box.fill("Describe the picture. " * 60)
            trouble = page.page.locator(".trouble")
            expect(trouble).to_contain_text("This doesn't fit")
            # The page is loaded again once the model is there; what is pressed before that is lost with the old one.
            trouble.get_by_role("button", name="Raise the context").click()
            expect(page.dialog).to_contain_text("available")
            with page.page.expect_navigation():
                page.dialog.get_by_role("button", name="Apply").click()
            assert switch.context_length > 256
            expect(page.box).to_have_value("Describe the picture. " * 60)
            expect(trouble).to_be_hidden()
            page.box.press("Enter")
            page.wait_answered()
    finally:
        server.close()
        switch.close()


@pytest.mark.slow
def test_weights_in_another_format(browser: Browser) -> None:
    from qwen35mm.engine import EngineSettings
    from qwen35mm.model_library import BackendOptions, BackendSwitch

    options = BackendOptions(device="cpu", settings=EngineSettings(context_length=512))
    switch = BackendSwitch.of(options.load(demo_model_path()), options)
    server = serve(switch, port=0)
    try:
        with chat_pages(browser, server.address) as opener:
            page = opener()
            page.open_settings().get_by_role("button", name="Context and memory").click()
            formats = page.dialog.get_by_label("Weights")
            expect(formats.locator("option")).to_have_text(
                [
                    "Automatic: bf16",
                    "bf16, 11 MiB",
                    re.compile(r"^int8, \d\.\d MiB(, up to 1\.\d times as fast)?$"),
                    re.compile(r"^int4, \d\.\d MiB(, up to \d\.\d times as fast)?$"),
                ]
            )
            expect(formats).to_have_value("auto")
            formats.select_option("int4")
            with page.page.expect_navigation():
                page.dialog.get_by_role("button", name="Apply").click()
            assert (switch.loaded.weights, switch.context_length) == ("int4", 512)
            page.ask("How many shapes are there?", [SAMPLES / "three-shapes.png"])
            assert page.wait_answered() == "There are three shapes."
            expect(page.open_settings()).to_contain_text("Weights: int4")
            # The same question with others, beside it.
            page.tool(page.answers.last, "Compare").click()
            page.dialog.get_by_label("Weights").select_option("int8")
            expect(page.dialog).to_contain_text("The model is loaded first")
            with page.page.expect_navigation():
                page.dialog.get_by_role("button", name="Answer", exact=True).click()
            expect(page.dialog.locator(".made").first).to_have_text("Weightsint4")
            expect(page.dialog.locator(".made").last).to_have_text("Weightsint8")
            expect(page.dialog.locator(".side .answer").last).to_have_text("There are three shapes.")
            expect(page.dialog.get_by_role("button", name="Another answer")).to_be_enabled()
    finally:
        server.close()
        switch.close()
