"""The page's layout: what is where, and which handler each event goes to."""

from __future__ import annotations

import html

import gradio as gr

from qwen35mm.assets import asset_path
from qwen35mm.ui.examples import example_messages, load_samples
from qwen35mm.ui.handlers import ChatHandlers
from qwen35mm.ui.protocol import ChatBackend
from qwen35mm.ui.render import status_line
from qwen35mm.ui.settings import add_settings
from qwen35mm.ui.state import Conversation
from qwen35mm.ui.theme import ICON

TITLE = "qwen35mm"
# Chosen by type, so that a phone offers its camera and its gallery, and by name for what browsers know no type of.
# What a file really is, the preprocessing finds out from its content.
FILE_TYPES = ["image", "video", ".mkv", ".ts", ".avif"]
MAX_TEXT_LENGTH = 1_000_000
# Replies at work or in line at one time; the engine serves them in order.
MAX_CONCURRENT_REPLIES = 32
MAX_WAITING_EVENTS = 256
# Uploads are copies in a temporary folder: looked over every hour, deleted after a week and when the server ends.
DELETE_UPLOADS = (3600, 7 * 86400)

WELCOME = "## Ask about pictures and videos\nAdd one below, or try an example."
DEMO_BANNER = """
<details class="banner">
<summary><b>Demo model.</b> It knows coloured shapes in drawn pictures and short clips, and nothing else.</summary>
<p>The model bundled with qwen35mm is small and trained from scratch on scenes that a program drew, so that everything
can be tried without a download. It names shapes, their colours, places and number, and says how a shape moves or
changes its colour. It doesn't know photographs, people, writing, or the world.</p>
<p>For a real one, end this with Ctrl-C and start: <code>make chat MODEL=Qwen/Qwen3.5-2B</code></p>
</details>
"""


def build_app(backend: ChatBackend, *, shared: bool = False) -> gr.Blocks:
    """The chat page over a backend; `launch` serves it with its theme and style.

    Args:
        backend: answers.
        shared: whether strangers use the page too, so that each session needs a cache of its own.
    """
    examples = example_messages(load_samples())
    # Shown from where they are: a copy in Gradio's shared cache goes when any other server on this machine ends.
    gr.set_static_paths(asset_path("samples"))
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True, delete_cache=DELETE_UPLOADS) as app:
        conversation = gr.State(Conversation())  # each session gets a copy
        with gr.Row(elem_id="header", equal_height=True):
            gr.HTML(_header(backend), elem_id="brand")
            new_chat = gr.Button("New chat", size="sm", variant="secondary", scale=0, min_width=110, elem_id="new-chat")
        if backend.is_demo:
            gr.HTML(DEMO_BANNER, elem_id="banner")
        chat = gr.Chatbot(
            elem_id="chat",
            show_label=False,
            label="Conversation",
            scale=1,
            height=None,
            layout="bubble",
            placeholder=WELCOME,
            examples=examples,  # pyright: ignore[reportArgumentType]
            buttons=["copy"],
            allow_file_downloads=False,
            latex_delimiters=[
                {"left": "$$", "right": "$$", "display": True},
                {"left": "\\[", "right": "\\]", "display": True},
                {"left": "\\(", "right": "\\)", "display": False},
            ],
        )
        status = gr.HTML(status_line(Conversation()), elem_id="status")
        box = gr.MultimodalTextbox(
            elem_id="box",
            show_label=False,
            label="Message",
            placeholder="Ask about a picture or a video",
            file_types=FILE_TYPES,
            file_count="multiple",
            max_lines=12,
            max_plain_text_length=MAX_TEXT_LENGTH,
            autofocus=True,
            stop_btn=False,
        )
        settings = add_settings(backend)

        # The chat has put the examples' files where it serves them from.
        handlers = ChatHandlers(backend, examples, shared=shared)
        drawn = [chat, status, box]
        replies = {
            "outputs": drawn,
            "show_progress": "hidden",
            "concurrency_limit": MAX_CONCURRENT_REPLIES,
            "concurrency_id": "replies",
            "api_visibility": "private",
        }
        at_once = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
        box.submit(handlers.send, [box, conversation, *settings], **replies)
        chat.example_select(handlers.send_example, [conversation, *settings], **replies)
        chat.retry(handlers.retry, [conversation, *settings], **replies)
        box.stop(handlers.stop, conversation, None, **at_once)
        # The chat has a button of its own that empties it, which the stylesheet hides.
        gr.on([new_chat.click, chat.clear], handlers.new_chat, conversation, [chat, status], **at_once)
    app.queue(max_size=MAX_WAITING_EVENTS)
    return app


def _header(backend: ChatBackend) -> str:
    name = html.escape(backend.loaded.name)
    return f'{ICON}<h1>{TITLE}</h1><span class="model" title="The model that answers">{name}</span>'
