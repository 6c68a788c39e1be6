"""Makes the pictures of docs/images: `python -m docs.make_screenshots`, with the bundled model and a Chromium."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.web import serve
from tests.web.browser import ChatPage, open_browser

IMAGES = Path(__file__).resolve().parent / "images"
SAMPLES = asset_path("samples")

DESKTOP = {"viewport": {"width": 1240, "height": 860}, "device_scale_factor": 1.5}
PHONE = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


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
        page.ask(question, [SAMPLES / name] if number == 1 else [])
        page.wait_answered(number)
    return page


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    backend = LocalBackend.load(demo_model_path())
    server = serve(backend, port=0)
    try:
        with open_browser() as browser:
            page = ChatPage(browser, server.address, **DESKTOP)
            expect(page.examples).to_have_count(6)
            shoot(page, "start.png")
            page = ChatPage(browser, server.address, **DESKTOP)
            chat(page, "two-shapes.jpg", ["Describe the picture.", "How many shapes are there?"])
            shoot(page, "chat.png")
            page = ChatPage(browser, server.address, **DESKTOP)
            chat(page, "moves-right.mp4", ["What happens in the video?", "Which way does it move?"])
            page.cost.click()
            shoot(page, "chat-video.png")
            page = ChatPage(browser, server.address, **DESKTOP)
            page.attach(SAMPLES / "three-shapes.png", SAMPLES / "moves-up.mp4")
            page.box.fill("What do you see in the picture, and what happens in the clip?")
            page.open_settings()
            expect(page.page.locator(".room")).to_contain_text("room for")
            shoot(page, "before-sending.png")
            page = ChatPage(browser, server.address, color_scheme="dark", **DESKTOP)
            chat(page, "three-shapes.png", ["What do you see?", "How many shapes are there?"])
            page.tool(page.answers.last, "Answer again").click()
            expect(page.answers.last.locator(".branches")).to_contain_text("2/2")
            page.wait_answered(2)
            shoot(page, "chat-dark.png")
            page = ChatPage(browser, server.address, **PHONE)
            chat(page, "one-shape.png", ["What is in this picture?", "What color is it?"])
            shoot(page, "chat-phone.png")
    finally:
        server.close()
        backend.close()


if __name__ == "__main__":
    main()
