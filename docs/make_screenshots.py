"""Makes the pictures of docs/images: `python -m docs.make_screenshots`, with the bundled model and a Chromium."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, expect

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.chat.store.records import Attachment, Call, Conversation, Node
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tree import Tree
from qwen35mm.model_library import BackendOptions, BackendSwitch
from qwen35mm.web import serve
from tests.web.browser import ChatPage, open_browser

IMAGES = Path(__file__).resolve().parent / "images"
SAMPLES = asset_path("samples")

DESKTOP = {"viewport": {"width": 1240, "height": 860}, "device_scale_factor": 1.5}
# A call, its result and the next call.
TALL = {"viewport": {"width": 1080, "height": 1080}, "device_scale_factor": 1}
# Four of them are one picture.
SMALL = {"viewport": {"width": 992, "height": 688}, "device_scale_factor": 0.75}


def shoot(page: ChatPage, name: str) -> None:
    """Saves the page without the caret and the pointer's traces."""
    page.page.mouse.move(0, 0)
    page.box.blur()
    page.page.wait_for_function(
        "[...document.images].every(image => image.complete) && "
        "[...document.querySelectorAll('video[autoplay]')].every(video => video.readyState >= 2)"
    )
    page.page.screenshot(path=IMAGES / name, animations="disabled")
    page.close()
    print(f"docs/images/{name}")


def chat(page: ChatPage, name: str, questions: list[str]) -> ChatPage:
    """Asks the questions one after the other, the first one with the sample."""
    for number, question in enumerate(questions, start=1):
        if number == 1:
            page.attach(SAMPLES / name)
        page.box.fill(question)
        # On a phone Enter begins a line.
        page.send_button.click()
        page.wait_answered(number)
    return page


def add_marks(store: ConversationStore) -> None:
    """A conversation with boxes, as a larger Qwen3.5 writes them: the bundled model can't."""
    digest, num_bytes = store.media.add(io.BytesIO((SAMPLES / "two-shapes.jpg").read_bytes()), max_bytes=1 << 20)
    picture = Attachment(digest, "image", "two-shapes.jpg", num_bytes)
    boxes = [
        {"bbox_2d": [84, 53, 276, 307], "label": "green circle"},
        {"bbox_2d": [737, 21, 903, 339], "label": "purple diamond"},
    ]
    text, now_s = "```json\n[\n  " + ",\n  ".join(map(json.dumps, boxes)) + "\n]\n```", time.time()
    question = Node(new_id(), None, "user", now_s, "Where are the shapes?", attachments=(picture,))
    answer = Node(new_id(), question.id, "assistant", now_s, text, model="Qwen3.5-4B")
    conversation = Conversation(new_id(), question.text, now_s, now_s, answer.id)
    store.insert("local", [(conversation, Tree([question, answer]))])


def add_calls(store: ConversationStore) -> None:
    """A conversation with tools, as a larger Qwen3.5 writes it: the bundled model calls none."""
    digest, num_bytes = store.media.add(io.BytesIO((SAMPLES / "three-shapes.png").read_bytes()), max_bytes=1 << 20)
    picture = Attachment(digest, "image", "picture-1.png", num_bytes)
    path, model = "/home/ann/pictures/three-shapes", {"model": "Qwen3.5-4B"}
    text = "A blue star on the left, a yellow diamond above, and a red circle below it, on grey."
    look = Call("call_1", "files__read_media_file", {"path": f"{path}.png"})
    save = Call("call_2", "files__write_file", {"path": f"{path}.txt", "content": text})
    nodes: list[Node] = []

    def add(role: Any, text: str, **fields: Any) -> None:
        nodes.append(Node(new_id(), nodes[-1].id if nodes else None, role, time.time(), text, **fields))

    add("user", "What is in the newest of my pictures?")
    add("assistant", "", calls=(look,), reasoning="It is three-shapes.png. I look at it.", thinking_s=1.2, **model)
    add("tool", "", call=look.id, attachments=(picture,))
    add("assistant", text, **model)
    add("user", "Save that beside it.")
    add("assistant", "", calls=(save,), **model)
    conversation = Conversation(new_id(), "The newest picture", time.time(), time.time(), nodes[-1].id)
    store.insert("local", [(conversation, Tree(nodes))])


def shoot_first_minute(browser: Browser, address: str) -> None:
    """What a newcomer sees: the start, a first answer and the way to a real model."""
    seen: list[bytes] = []
    page = ChatPage(browser, address, **SMALL)

    def see() -> None:
        page.page.wait_for_function("[...document.images].every(image => image.complete)")
        seen.append(page.page.screenshot(animations="disabled"))

    expect(page.page.get_by_role("button", name="Get a real model")).to_be_visible()
    see()
    page.examples.first.click()
    page.wait_answered(1)
    see()
    page.page.get_by_role("button", name="Practice model").click()
    models = page.page.get_by_role("dialog", name="Models")
    model = models.get_by_role("button", name="Qwen/Qwen3.5-2B")
    expect(model).to_be_visible()
    see()
    model.click()
    expect(page.dialog.get_by_role("button", name="Download")).to_be_enabled()
    see()
    page.close()
    pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in seen]
    (width, height), gap = pictures[0].size, 6
    strip = Image.new("RGB", (2 * width + gap, 2 * height + gap), "#c8c8ce")
    for at, picture in enumerate(pictures):
        strip.paste(picture, (at % 2 * (width + gap), at // 2 * (height + gap)))
    strip.save(IMAGES / "first-minute.png", optimize=True)
    print("docs/images/first-minute.png")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    # As `qwen35mm chat` serves it, so that the first page offers a real model.
    options = BackendOptions(device="cpu")
    backend = BackendSwitch.of(options.load(demo_model_path()), options)
    server = serve(backend, port=0)
    try:
        with open_browser() as browser:
            shoot_first_minute(browser, server.address)
            page = ChatPage(browser, server.address, **DESKTOP)
            chat(page, "two-shapes.jpg", ["Describe the picture.", "How many shapes are there?"])
            shoot(page, "chat.png")
            page = ChatPage(browser, server.address, **DESKTOP)
            chat(page, "moves-right.mp4", ["What happens in the video?", "Which way does it move?"])
            page.open_cost()
            shoot(page, "chat-video.png")
            page = ChatPage(browser, server.address, **DESKTOP)
            page.attach(SAMPLES / "moves-right.mp4")
            expect(page.page.locator(".films .film li").first).to_be_visible()
            page.page.get_by_role("textbox", name="From").fill("0:00.8")
            page.page.get_by_role("textbox", name="To").fill("0:02.2")
            page.box.fill("Which way does it move?")
            expect(page.page.locator(".films .film li .time").first).to_have_text("0:00.8")
            shoot(page, "frames.png")
            add_marks(server.store)
            page = ChatPage(browser, server.address, **DESKTOP)
            page.chats.filter(has_text="Where are the shapes?").click()
            expect(page.answers.last.locator(".mark-box")).to_have_count(2)
            shoot(page, "marks.png")
            add_calls(server.store)
            for colours, name in (("light", "tools.png"), ("dark", "tools-dark.png")):
                page = ChatPage(browser, server.address, **TALL, color_scheme=colours)
                page.chats.filter(has_text="The newest picture").click()
                expect(page.page.get_by_role("button", name="Allow once")).to_be_visible()
                shoot(page, name)
            page = ChatPage(browser, server.address, **DESKTOP)
            chat(page, "three-shapes.png", ["Describe the picture."])
            page.tool(page.answers.last, "Compare").click()
            page.dialog.last.get_by_role("spinbutton", name="Temperature").fill("1.5")
            page.dialog.last.get_by_role("button", name="Answer", exact=True).click()
            expect(page.dialog.get_by_role("button", name="Another answer")).to_be_enabled()
            shoot(page, "compare.png")
            page = ChatPage(browser, server.address, **DESKTOP)
            page.attach(SAMPLES / "three-shapes.png", SAMPLES / "moves-up.mp4")
            page.box.fill("What do you see in the picture, and what happens in the clip?")
            page.open_settings()
            expect(page.page.locator(".thumbnail .label").last).to_contain_text("frames")
            shoot(page, "before-sending.png")
    finally:
        server.close()
        backend.close()


if __name__ == "__main__":
    main()
