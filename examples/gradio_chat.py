"""A chat about pictures and videos on a plain Gradio page, small enough to read and to fork.

    pip install 'qwen35mm[chat]'
    python examples/gradio_chat.py                           # the bundled demo model, which knows coloured shapes
    python examples/gradio_chat.py --model Qwen/Qwen3.5-2B
    python examples/gradio_chat.py --server http://127.0.0.1:8000/v1

The page is for one person on their own machine. It is Gradio's server with all of its routes, unprotected. Every user
and program of the machine reaches the port, and so does a website that gives 127.0.0.1 a name of its own. They can use
the model. They can read the files in the start folder and in the temporary folder, including uploads;
`launch(blocked_paths=[...])` excludes folders. They can have Gradio fetch addresses of the internet
(`/gradio_api/file=https://...`), which Gradio can't switch off. With `launch(auth=("me", "a password"))` all of this
needs a password. The browser loads pictures that an answer links to, and Gradio's button for sharing a picture or video
sends it to huggingface.co.

`qwen35mm chat --ui gradio` serves this same page behind guards; `qwen35mm chat` has a page of its own.

Past chats stay in the browser, encrypted with a key that is lost when this program ends.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import gradio as gr

from qwen35mm import (
    Finished,
    GenerationRequest,
    Image,
    LocalBackend,
    MediaPlan,
    MediaPlanned,
    Message,
    Progress,
    Qwen35mmError,
    RemoteBackend,
    Result,
    TextDelta,
    Video,
)
from qwen35mm.assets import asset_path, demo_model_path

EXAMPLES = (
    ("How many shapes are there?", "five-shapes.png"),
    ("Describe the picture.", "two-shapes.jpg"),
    ("What happens in the video?", "moves-right.mp4"),
)
PHASES = {"wait": "Waiting", "read": "Reading files", "encode": "Looking at them", "prefill": "Reading the prompt"}
# The browser redraws the whole answer at each update; more would leave it no time for the Stop button.
UPDATE_S = 0.1
# Files whose plans are kept; the sliders plan an older one anew.
MAX_PLANS = 1000


def build(model: LocalBackend | RemoteBackend) -> gr.ChatInterface:
    """The page for a model; its `launch()` serves it."""
    info, budget = model.info, model.media.budget
    plans: dict[str, MediaPlan] = {}

    def keep(path: str, plan: MediaPlan | None) -> None:
        plans.pop(path, None)
        if plan is not None:
            plans[path] = plan
        for oldest in list(plans)[:-MAX_PLANS]:
            plans.pop(oldest, None)

    async def answer(
        message: dict[str, Any],
        history: list[dict[str, Any]],
        system: str,
        think: bool,
        frames: int,
        video_tokens: int,
        image_tokens: int,
        answer_tokens: int,
        temperature: float,
        request: gr.Request,
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Yields the answer so far at each update."""
        limits = {"max_frames": frames, "max_video_tokens": video_tokens, "max_image_tokens": image_tokens}
        media = replace(model.media, budget=replace(budget, **limits))
        params = info.generation.with_overrides(max_tokens=answer_tokens, temperature=temperature)
        work, texts, result, shown_s = "", {"reasoning": "", "answer": ""}, None, 0.0

        def attach(path: str) -> Image | Video:
            plan = plans.pop(path, None) or media.plan(path)
            keep(path, plan)
            return Image(path, plan) if plan.kind == "image" else Video(path, plan)

        # New files are read by the sliders. Those of earlier turns keep their plans, which make cache hits possible.
        for path in message["files"]:
            plans.pop(path, None)
        try:
            messages = await asyncio.to_thread(read_chat, system, history, message, attach)
            # Stop, or closing the page, ends this generator; `aclosing` then stops the model too.
            asked = GenerationRequest(messages, params, enable_thinking=think, conversation=request.session_hash)
            async with aclosing(model.stream(asked)) as events:
                async for event in events:
                    if isinstance(event, Progress):
                        work = f"{PHASES[event.phase]}: {event.done} of {event.total}"
                    elif isinstance(event, MediaPlanned):
                        paths = [str(medium.source) for each in messages for medium in each.media]
                        for path, plan in zip(paths, event.plans, strict=True):
                            keep(path, plan)
                    elif isinstance(event, TextDelta):
                        texts[event.channel] += event.text
                    elif isinstance(event, Finished):
                        result = event.result
                    if result or time.monotonic() > shown_s + UPDATE_S:
                        shown_s = time.monotonic()
                        yield show(work, texts["reasoning"], texts["answer"], result)
        except Qwen35mmError as error:
            # Not gr.Error: after one, the page accepts no further question.
            yield [aside("That didn't work", str(error), None)]

    frames = budget.max_frames or model.media.video_processing.max_frames
    about = "The bundled demo model knows coloured shapes, and nothing else." if model.is_demo else info.name
    return gr.ChatInterface(
        answer,
        multimodal=True,
        title="qwen35mm",
        chatbot=gr.Chatbot(show_label=False, scale=1, buttons=["copy"], placeholder=about),
        textbox=gr.MultimodalTextbox(
            file_count="multiple", file_types=["image", "video"], stop_btn=True, autofocus=True, placeholder="Ask"
        ),
        additional_inputs=[
            gr.Textbox("", label="System prompt"),
            gr.Checkbox(info.default_enable_thinking, label="Think first"),
            gr.Slider(2, max(256, frames), frames, step=2, precision=0, label="Most frames of a video"),
            gr.Slider(64, 32_768, budget.max_video_tokens, step=64, precision=0, label="Most tokens of a video"),
            gr.Slider(64, 16_384, budget.max_image_tokens, step=64, precision=0, label="Most tokens of a picture"),
            gr.Slider(16, 16_384, 4_096, step=16, precision=0, label="Most tokens of an answer"),
            gr.Slider(0, 2, info.generation.temperature, step=0.05, label="Temperature"),
        ],
        additional_inputs_accordion=gr.Accordion("Settings", open=False),
        examples=[[{"text": text, "files": [str(asset_path("samples") / name)]}] for text, name in EXAMPLES],
        cache_examples=False,
        save_history=True,
        api_name="chat",
        concurrency_limit=None,  # the model has its own
        analytics_enabled=False,
    )


def read_chat(
    system: str, history: list[dict[str, Any]], message: dict[str, Any], attach: Callable[[str], Image | Video]
) -> list[Message]:
    """The model's messages from Gradio's chat history; leaves out messages made by `aside`."""
    messages = [Message("system", system)] if system else []
    for each in history:
        if not each["metadata"]:
            parts = each["content"]
            content = [part["text"] if part["type"] == "text" else attach(part["file"]["path"]) for part in parts]
            messages.append(Message(each["role"], content))
    return [*messages, Message("user", [*map(attach, message["files"]), message["text"]])]


def show(work: str, thought: str, text: str, result: Result | None) -> list[dict[str, Any]]:
    """An answer as Gradio's messages."""
    shown = []
    if thought:
        shown.append(aside("Thinking", thought, "done" if text or result else "pending"))
    elif work and not text and not result:
        shown.append(aside(work, "", "pending"))
    if text:
        # As a list: Gradio removes a string's indentation, and the next turn's text would differ.
        shown.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
    if result:
        cut_off = ", then cut off by the limit" if result.finish_reason == "length" else ""
        read = f"{result.num_prompt_tokens} tokens read, {result.cache.num_cached_tokens} of them from the cache"
        shown.append(aside(f"{result.num_generated_tokens} tokens written{cut_off}", read, "done"))
    return shown


def aside(title: str, text: str, status: str | None) -> dict[str, Any]:
    """A message for the user alone, under a title; folded once "done", always open without a status."""
    metadata = {"title": title} if status is None else {"title": title, "status": status}
    return {"role": "assistant", "content": [{"type": "text", "text": text}], "metadata": metadata}


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat about pictures and videos on a plain Gradio page.")
    parser.add_argument("--model", default=demo_model_path(), help="a folder, or an id of the Hugging Face Hub")
    parser.add_argument("--server", metavar="URL", help="an OpenAI-compatible server, which answers instead")
    parser.add_argument("--port", type=int, default=7860)
    options = parser.parse_args()
    with RemoteBackend(options.server) if options.server else LocalBackend.load(options.model) as model:
        if isinstance(model, RemoteBackend):
            asyncio.run(model.connect())
        build(model).launch(server_name="127.0.0.1", server_port=options.port, share=False)


if __name__ == "__main__":
    main()
