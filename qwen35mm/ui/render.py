"""A conversation as the chat component shows it, and one line on what is going on."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from qwen35mm.engine.events import CacheReport, Progress, Result
from qwen35mm.prompt import Video
from qwen35mm.ui.state import Conversation, Reply, Turn

SHOWN_BY_BROWSERS = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif", ".mp4", ".m4v", ".mov", ".webm", ".mkv")
)
# Code spans and fenced blocks, which Markdown shows as they are.
_CODE = re.compile(r"(```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]+`)", re.DOTALL)
# Why nothing, or no more, came from the cache where a person could have expected it. New words are computed: unsaid.
_MISSED = {
    "evicted": ("evicted from the cache", "more was evicted"),
    "other model": ("cached for another model", "more is another model's"),
}
_MARKDOWN = re.compile(r"([\\`*_\[\]#|~$])")


def chat_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The value of a `gr.Chatbot`."""
    messages: list[dict[str, Any]] = []
    for turn in conversation.turns:
        messages.append(_question(turn))
        messages += _answer(turn.reply)
    return messages


def status_line(conversation: Conversation) -> str:
    """HTML of the line under the chat: the work in progress, or what the last reply cost."""
    if not conversation.turns:
        return _settled("Enter sends, Shift+Enter begins a new line")
    turn = conversation.turns[-1]
    reply = turn.reply
    if reply.status == "running":
        label, share = _work(turn, reply)
        value = "" if share is None else f' value="{share:.3f}"'
        return f'<div class="status busy"><progress{value}></progress><span>{html.escape(label)}</span></div>'
    if reply.status == "stopped":
        kept = "" if turn.is_kept else " The model won't see this question again."
        return _settled(f"Stopped.{kept}")
    if reply.status == "failed":
        return _settled("No answer.")
    return _settled(_cost(reply.result) if reply.result else "")


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is: file names and error messages are no mark-up."""
    return _MARKDOWN.sub(r"\\\1", html.escape(text, quote=False))


def as_typed(text: str) -> str:
    """A person's text with its Markdown, but with every `<` shown instead of taken for HTML."""
    pieces = _CODE.split(text)
    return "".join(piece if index % 2 else piece.replace("<", "&lt;") for index, piece in enumerate(pieces))


def _question(turn: Turn) -> dict[str, Any]:
    content = [_file(path) for path in turn.files]
    if turn.text:
        content.append(_text(as_typed(turn.text)))
    return {"role": "user", "content": content}


def _file(path: Path) -> dict[str, Any]:
    if path.suffix.lower() in SHOWN_BY_BROWSERS:
        return {"path": str(path), "alt_text": path.name}
    # As a file with a name; as a picture it would be an empty frame.
    file = {"path": str(path), "orig_name": path.name, "mime_type": "application/octet-stream"}
    return {"file": {**file, "meta": {"_type": "gradio.FileData"}}}


def _answer(reply: Reply) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if reply.notes:
        notes = "\n".join(f"- {escape_markdown(note)}" for note in reply.notes)
        messages.append(_folded("What the model was shown", notes))
    if reply.reasoning:
        title = "Thinking" if reply.thinking_s is None else f"Thought for {reply.thinking_s:.1f} s"
        messages.append(_folded(title, reply.reasoning, pending=reply.thinking_s is None))
    if reply.answer:
        messages.append({"role": "assistant", "content": [_text(reply.answer)]})
    if reply.error:
        messages.append({"role": "assistant", "content": [_text(f"⚠️ {escape_markdown(reply.error)}")]})
    elif reply.status == "stopped" and not reply.answer:
        messages.append({"role": "assistant", "content": [_text("*Stopped before the answer.*")]})
    elif reply.status == "finished" and not reply.answer:
        messages.append({"role": "assistant", "content": [_text("*The model answered nothing.*")]})
    return messages


def _text(text: str) -> dict[str, Any]:
    # As a typed part, because Gradio takes the indentation off plain strings.
    return {"type": "text", "text": text}


def _folded(title: str, text: str, *, pending: bool = False) -> dict[str, Any]:
    metadata = {"title": title, "status": "pending" if pending else "done"}
    return {"role": "assistant", "content": [_text(text)], "metadata": metadata}


def _work(turn: Turn, reply: Reply) -> tuple[str, float | None]:
    """What is going on, and which share of it is done where that is known."""
    if reply.answer:
        return "Writing", None
    if reply.reasoning:
        return "Thinking", None
    if reply.progress is None:
        return "Getting ready", None
    return _phase(reply.progress, turn)


def _phase(progress: Progress, turn: Turn) -> tuple[str, float | None]:
    done, total = progress.done, progress.total
    if progress.phase == "wait":
        return f"Waiting in line, {done} ahead" if done else "Waiting in line", None
    share = min(done / total, 1.0) if total else None
    if progress.phase == "prefill":
        return f"Reading the prompt, {done:,}/{total:,} tokens", share
    media = turn.message.media if turn.message else ()
    video = any(isinstance(part, Video) for part in media)
    name = ("video" if video else "image") if len(media) == 1 else "images and videos" if video else "images"
    if progress.phase == "encode":
        return f"Encoding {name}, {0 if share is None else share:.0%}", share
    if video and total > 1:
        return f"Reading {name}, {done:,}/{total:,} frames", share
    return f"Reading {name}", share


def _cost(result: Result) -> str:
    parts = []
    if result.finish_reason == "length":
        parts.append("Cut at its limit, see “Longest answer” in the settings")
    parts.append(f"{result.num_generated_tokens:,} tokens")
    if result.decode_tokens_per_s is not None:
        parts.append(f"{result.decode_tokens_per_s:,.1f} tokens/s")
    if result.ttft_s is not None:
        parts.append(f"first token after {result.ttft_s:.1f} s")
    parts.append(_prompt(result.num_prompt_tokens, result.cache))
    return " · ".join(parts)


def _prompt(num_tokens: int, cache: CacheReport) -> str:
    num_cached, num_from_disk = cache.num_cached_tokens, cache.cached_from.get("disk", 0)
    none_missed, more_missed = _MISSED.get(cache.miss, ("", "")) if cache.miss else ("", "")
    if not num_cached:
        text, details = f"prompt of {num_tokens:,} tokens", [none_missed]
    elif num_from_disk == num_cached:
        text, details = f"{num_cached:,} of {num_tokens:,} prompt tokens from the disk cache", [more_missed]
    else:
        text = f"{num_cached:,} of {num_tokens:,} prompt tokens from the cache"
        details = [f"{num_from_disk:,} on disk" if num_from_disk else "", more_missed]
    shown = ", ".join(filter(None, details))
    return f"{text} ({shown})" if shown else text


def _settled(label: str) -> str:
    text = html.escape(label)
    # Again as a title, because a narrow page cuts the line.
    return f'<div class="status"><span role="status" title="{text}">{text}</span></div>'
