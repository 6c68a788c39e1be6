"""The example's chat over the bundled model, without a browser: what Gradio calls, with what Gradio gives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.engine import EngineSettings
from qwen35mm.http.run import ServerThread
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.web.serving.gradio_chat import build
from tests.chat.fake_backend import FakeBackend

SAMPLES = asset_path("samples")
# A system prompt, thinking, frames, tokens of a video, of a picture and of an answer, and the temperature.
SETTINGS: tuple[Any, ...] = ("", False, 32, 4096, 1280, 200, 0.0)


class Chat:
    """The page's function, with a history that goes through Gradio's chatbot as on the page."""

    def __init__(self, backend: Any) -> None:
        self._page = build(backend)
        self.history: list[Any] = []

    def begin(self, text: str, *files: Path, settings: tuple[Any, ...] = SETTINGS) -> AsyncGenerator[list[Any], None]:
        message = {"text": text, "files": [str(file) for file in files]}
        return self._page.fn(message, list(self.history), *settings, gr.Request(session_hash="here"))

    async def ask(self, text: str, *files: Path, settings: tuple[Any, ...] = SETTINGS) -> list[Any]:
        """The messages of the whole answer."""
        answer = [shown async for shown in self.begin(text, *files, settings=settings)][-1]
        content: list[Any] = [{"path": str(file)} for file in files]
        self.keep([{"role": "user", "content": [*content, text]}, *answer])
        return answer

    def keep(self, messages: list[Any]) -> None:
        chatbot = self._page.chatbot
        self.history = chatbot.preprocess(chatbot.postprocess([*self.history, *messages]))


def texts(answer: list[Any]) -> list[str]:
    return [message["content"][0]["text"] for message in answer if not message.get("metadata")]


def cached(answer: list[Any]) -> int:
    """Tokens of the prompt that came from the cache."""
    words = answer[-1]["content"][0]["text"].split()
    return int(words[words.index("read,") + 1])


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Iterator[LocalBackend]:
    with LocalBackend(demo, settings=EngineSettings(slots=2), min_segment=16) as backend:
        yield backend


async def test_a_second_turn_reads_the_new_message_alone(backend: LocalBackend) -> None:
    chat = Chat(backend)
    answer = await chat.ask("What do you see?", SAMPLES / "moves-right.mp4")
    assert len(texts(answer)) == 1
    backend.wait_idle()
    read = int(answer[-1]["content"][0]["text"].split()[0])
    # Other sliders by now: the file stays as it was read.
    again = await chat.ask("What color is it?", settings=("", False, 4, 64, 64, 200, 0.0))
    assert cached(again) >= read - 1


async def test_whoever_leaves_the_generator_ends_the_answer(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = backend.engine._engine
    step, num_steps = engine.step, 0

    def count_and_step() -> object:
        nonlocal num_steps
        num_steps += engine.has_requests
        return step()

    monkeypatch.setattr(engine, "step", count_and_step)
    # Any token, since one after the answer's end would have no text.
    endless = replace(backend.info, generation=replace(backend.info.generation, ignore_eos=True, seed=1))
    monkeypatch.setattr(backend, "info", endless)
    answer = Chat(backend).begin("Describe it.", SAMPLES / "two-shapes.jpg", settings=(*SETTINGS[:5], 7_000, 2.0))
    while not texts(await anext(answer)):
        pass
    assert not backend.engine.idle
    await answer.aclose()
    assert backend.wait_idle(60)
    assert num_steps < 1_000, "of 7,000"


async def test_a_server_answers_as_well(backend: LocalBackend) -> None:
    with closing(ServerThread(create_app(backend), host="127.0.0.1", port=0)) as served:
        async with RemoteBackend(served.url) as server:
            await server.connect()
            chat = Chat(server)
            answer = await chat.ask("Describe the picture.", SAMPLES / "two-shapes.jpg")
            assert texts(answer) == ["A green circle at the top left, a purple diamond at the top right."]
            answer = await chat.ask("How many shapes are there?")
            assert texts(answer) == ["There are two shapes."]
            assert cached(answer) > 0


async def test_the_sliders_are_of_new_files_and_old_ones_keep_their_plans() -> None:
    fake = FakeBackend()
    chat = Chat(fake)
    clip = SAMPLES / "moves-right.mp4"
    for frames in (4, 6):
        await chat.ask("What?", clip, settings=("Be brief.", False, frames, 4096, 1280, 50, 0.5))
    await chat.ask("And now?", settings=("Be brief.", True, 2, 64, 64, 50, 0.5))
    counts = [[len(part.plan.frame_indices) for m in call.messages for part in m.media] for call in fake.calls]
    assert counts == [[4], [6, 6], [6, 6]]
    last = fake.calls[-1]
    assert [message.role for message in last.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert (last.params.max_tokens, last.params.temperature, last.params.top_k) == (50, 0.5, 20)
    assert (last.enable_thinking, last.conversation) == (True, "here")


@pytest.mark.parametrize(("most", "frames"), [(1, 2), (2, 4)])
async def test_the_plans_of_the_newest_files_are_kept(most: int, frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeBackend()
    chat = Chat(fake)
    monkeypatch.setitem(chat._page.fn.__globals__, "MAX_PLANS", most)
    await chat.ask("What?", SAMPLES / "moves-right.mp4", settings=("", False, 4, 4096, 1280, 50, 0.5))
    await chat.ask("What?", SAMPLES / "one-shape.png", settings=("", False, 4, 4096, 1280, 50, 0.5))
    await chat.ask("And now?", settings=("", False, 2, 4096, 1280, 50, 0.5))
    clip, _ = [medium for message in fake.calls[-1].messages for medium in message.media]
    assert len(clip.plan.frame_indices) == frames


async def test_what_stands_beside_an_answer_is_not_for_the_model() -> None:
    fake = FakeBackend()
    chat = Chat(fake)
    thought, answer, cost = await chat.ask("think so:\n    it is")
    assert (thought["metadata"], thought["content"][0]["text"]) == (
        {"title": "Thinking", "status": "done"},
        "Let me see. That is it.",
    )
    assert cost["metadata"] == {"title": "9 tokens written", "status": "done"}
    (refused,) = await chat.ask("refuse this time")
    assert (refused["metadata"], refused["content"][0]["text"]) == ({"title": "That didn't work"}, "this time")
    await chat.ask("echo on")
    said = [(message.role, message.text) for message in fake.calls[-1].messages]
    assert said[1:] == [("assistant", answer["content"][0]["text"]), ("user", "refuse this time"), ("user", "echo on")]
    assert "\n    it" in said[1][1], "with its indentation"


async def test_a_file_that_is_none_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_text("no picture")
    (refused,) = await Chat(FakeBackend()).ask("What?", tmp_path / "a.jpg")
    assert "a.jpg" in refused["content"][0]["text"]
    assert str(tmp_path) not in refused["content"][0]["text"]


async def test_an_answer_that_was_cut_off_says_so() -> None:
    answer = await Chat(FakeBackend()).ask("length")
    assert answer[-1]["metadata"]["title"] == "2 tokens written, then cut off by the limit"
