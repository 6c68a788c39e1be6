"""A conversation as Markdown for reading, with links to its files in a folder `media` beside it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping

from qwen35mm.chat.store.records import Attachment, Node
from qwen35mm.chat.store.tree import Tree
from qwen35mm_preprocess.say import english

_EXTENSION = re.compile(r"\.([a-z0-9]{1,8})")
_SPEAKERS = {"user": "You", "assistant": "Assistant", "tool": "Tool"}
_ENDS = {
    "running": "Not finished.",
    "length": "Ended at the limit of tokens.",
    "stopped": "Stopped.",
    "failed": "Failed.",
}


def export_markdown(tree: Tree, head: str | None, title: str) -> str:
    """The messages from the first to `head`; links files as `media/<digest>.<ext>`."""
    path = tree.path(head)
    return markdown(path, title, media_names(attachment for node in path for attachment in node.attachments))


def media_names(attachments: Iterable[Attachment], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """The files' names in an archive, by digest; the first name of a file gives the extension."""
    names = dict(known or {})
    for attachment in attachments:
        names.setdefault(attachment.digest, _media_name(attachment))
    return names


def markdown(path: tuple[Node, ...], title: str, names: Mapping[str, str]) -> str:
    """Messages as Markdown; `names` are from `media_names`."""
    blocks = [f"# {_one_line(title) or 'Conversation'}"]
    for node in path:
        moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(node.created_s))
        blocks.append(f"## {_SPEAKERS[node.role]}")
        said = [moment, *([_one_line(node.model)] if node.model else []), *(["edited"] if node.edited else [])]
        blocks.append(f"*{', '.join(said)}*")
        blocks += [_link(attachment, names[attachment.digest]) for attachment in node.attachments]
        if node.reasoning.strip():
            seconds = "" if node.thinking_s is None else f" ({node.thinking_s:.1f} s)"
            blocks.append(_quoted(f"**Thinking{seconds}**\n\n{node.reasoning.strip()}"))
        if node.text.strip():
            # What a tool says is its own, and no Markdown.
            blocks.append(_fenced(node.text) if node.role == "tool" else node.text.strip("\n"))
        for call in node.calls:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False, indent=1)
            blocks.append(f"**Calls {_one_line(call.name)}**\n\n{_fenced(arguments)}")
        if end := _ENDS.get(node.status):
            blocks.append(f"*{end}{f' {_one_line(english(node.error))}' if node.error else ''}*")
        blocks += [f"*{_one_line(english(note))}*" for note in node.notes]
    return "\n\n".join(blocks) + "\n"


def _media_name(attachment: Attachment) -> str:
    dot = attachment.name.rfind(".")
    found = _EXTENSION.fullmatch(attachment.name[dot:].lower()) if dot >= 0 else None
    extension = found[1] if found else {"image": "img", "video": "vid", "text": "txt"}[attachment.kind]
    return f"media/{attachment.digest}.{extension}"


def _link(attachment: Attachment, name: str) -> str:
    shown = re.sub(r"([\\`*_\[\]<>&!])", r"\\\1", _one_line(attachment.name))
    part = ""
    if (clip := attachment.clip) is not None and (clip.start_s or clip.end_s is not None):
        part = f" *from {clip.start_s:g} s to {'its end' if clip.end_s is None else f'{clip.end_s:g} s'}*"
    return f"{'!' if attachment.kind == 'image' else ''}[{shown}]({name}){part}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}\n{text}\n{fence}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())
