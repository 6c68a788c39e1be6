"""Conversations for the page as JSON values, with answers rendered to safe HTML."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qwen35mm.chat.media.grounding import ground, may_have_marks
from qwen35mm.chat.replies.prompting import prompt_path
from qwen35mm.chat.replies.reply import Reply
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store.records import Attachment, Conversation, Node
from qwen35mm.chat.store.store import Found
from qwen35mm.chat.store.tree import Tree
from qwen35mm.web.rendering.markdown import StreamingMarkdown, render_blocks
from qwen35mm.web.rendering.texts import form_of
from qwen35mm.web.rendering.wording import describe_stats, work_of

# Printable for Python, and nothing to see: what Unicode calls default ignorable, and two blanks.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
# About 20,000 answers.
_MAX_RENDERED_CHARS = 50_000_000


def conversation_line(conversation: Conversation) -> dict[str, Any]:
    """A conversation for the sidebar."""
    return {name: getattr(conversation, name) for name in ("id", "title", "updated_s", "pinned", "unseen")}


def found_line(found: Found) -> dict[str, Any]:
    """A search result for the sidebar."""
    return {**conversation_line(found.conversation), "node": found.node, "snippet": found.snippet}


def chat_view(
    conversation: Conversation,
    tree: Tree,
    running: Collection[str],
    context_length: int,
    unsaved: Sequence[Reply] = (),
) -> dict[str, Any]:
    """The shown branch of a conversation, with the points where other branches leave it.

    Args:
        running: replies in progress in this process; others stored as running were cut off when their process ended.
        unsaved: replies whose newest state isn't stored.
    """
    whole = {reply.node.id: reply for reply in unsaved}
    path = [whole[node.id].shown if node.id in whole else node for node in tree.path(conversation.head)]
    kept = {node.id for node in prompt_path(path, conversation.first)}
    messages = [_message(node, tree, running, node.id in kept, node is path[-1]) for node in path]
    _mark_unsaved(messages, whole)
    return {
        "id": conversation.id,
        "title": conversation.title,
        "settings": dict(Settings.kept(conversation.settings).values),
        "messages": messages,
        "running": [node.id for node in path if node.id in running],
        "context": {"used": _used(path), "length": context_length},
    }


def answers_view(
    tree: Tree, node_id: str, running: Collection[str], unsaved: Sequence[Reply] = ()
) -> list[dict[str, Any]]:
    """All answers to the question of the answer `node_id`, oldest first. Other arguments as for `chat_view`."""
    whole = {reply.node.id: reply for reply in unsaved}
    nodes = [whole[node.id].shown if node.id in whole else node for node in tree.siblings(node_id)]
    messages = [_message(node, tree, running, True, False) for node in nodes if node.role == "assistant"]
    _mark_unsaved(messages, whole)
    return messages


class ReplyDrawing:
    """Renders a growing reply repeatedly; only Markdown that can still change is rendered again."""

    def __init__(self) -> None:
        self._text, self._reasoning = StreamingMarkdown(), StreamingMarkdown()

    def view(self, reply: Reply) -> dict[str, Any]:
        """The reply's current state for the page."""
        node = reply.shown
        return {
            **_answer(node, self._text.blocks(node.text), self._reasoning.blocks(node.reasoning)),
            # Still running until its final state is stored: until then the next message would be refused.
            "status": node.status if reply.done else "running",
            "groundings": ground(node.text, reply.work.path, node.model),
            "conversation": reply.work.conversation_id,
            "too_long": reply.too_long,
            "work": {"label": reply.doing, "share": None, "pace": []}
            if reply.doing
            else work_of(node, reply.progress, reply.work.path, reply.tally),
            "num_results": reply.num_results,
            "unsaved": reply.unsaved,
        }


def _mark_unsaved(messages: Sequence[dict[str, Any]], whole: Mapping[str, Reply]) -> None:
    for message in messages:
        if message["id"] in whole:
            message["unsaved"] = whole[message["id"]].unsaved


def _message(node: Node, tree: Tree, running: Collection[str], kept: bool, is_last: bool) -> dict[str, Any]:
    siblings = [sibling.id for sibling in tree.siblings(node.id)]
    at = siblings.index(node.id)
    view: dict[str, Any] = {
        "id": node.id,
        "parent": node.parent,
        "role": node.role,
        "text": node.text,
        "status": node.status,
        "kept": kept,
        "branch": {
            "at": at + 1,
            "of": len(siblings),
            "previous": siblings[at - 1] if at > 0 else None,
            "next": siblings[at + 1] if at + 1 < len(siblings) else None,
        },
    }
    if node.role == "user":
        attachments = [attachment_view(attachment) for attachment in node.attachments]
        ids = [each.id for each in tree.path(node.id)] if node.first else []
        left_out = ids.index(node.first) if node.first in ids else 0
        return {**view, "attachments": attachments, "unanswered": is_last, "left_out": left_out}
    if node.role == "tool":
        attachments = [attachment_view(attachment) for attachment in node.attachments]
        asking = next((each for each in reversed(tree.path(node.id)) if each.role == "assistant"), None)
        call = next((call for call in (asking.calls if asking else ()) if call.id == node.call), None)
        if node.status == "running" and not tree.subtree(node.id) & set(running):
            view["status"] = "interrupted"
        unanswered = is_last and view["status"] != "running"
        return {**view, "attachments": attachments, "name": call.name if call else "", "unanswered": unanswered}
    answer = _answer(node, _blocks(node.text), _blocks(node.reasoning))
    if may_have_marks(node.text):
        answer["groundings"] = ground(node.text, tree.path(node.id)[:-1], node.model)
    if node.status == "running" and node.id not in running:
        answer["status"] = "interrupted"
    return {**view, **answer, "model": node.model, "edited": node.edited, "settings": _made_with(node)}


def _made_with(node: Node) -> dict[str, Any] | None:
    """The settings of an answer that can be shown; None if unknown."""
    if node.settings is None:
        return None
    weights = node.settings.get("weights")
    known = {name: value for name, value in node.settings.items() if name != "weights"}
    return {**Settings.kept(known).values, **({"weights": weights[:40]} if isinstance(weights, str) else {})}


def _answer(node: Node, blocks: list[str], reasoning: list[str]) -> dict[str, Any]:
    return {
        "id": node.id,
        "status": node.status,
        "blocks": blocks,
        "reasoning": reasoning,
        "thinking_s": node.thinking_s,
        "error": node.error,
        "notes": list(node.notes),
        "stats": describe_stats(node.stats),
        "calls": [{"id": call.id, "name": call.name, "arguments": _as_code(call.arguments)} for call in node.calls],
        "groundings": [],
    }


def _as_code(arguments: Mapping[str, Any]) -> str:
    """All arguments of a call, as JSON. A person allows what they see, so characters that hide or turn others around
    are written as their codes."""
    text = json.dumps(dict(arguments), ensure_ascii=False, indent=2)
    pairs = zip(text, f" {text}", strict=False)
    return "".join(json.dumps(each)[1:-1] if _hides(each, before) else each for each, before in pairs)


def _hides(character: str, before: str) -> bool:
    if character.isascii():
        return not (character.isprintable() or character == "\n")
    if not character.isprintable() or _INVISIBLE.match(character):
        return True
    # An accent belongs to a letter, or to another accent; anything else it changes.
    return unicodedata.category(character)[0] == "M" and not (
        before.isalpha() or (unicodedata.category(before)[0] == "M" and not _INVISIBLE.match(before))
    )


def attachment_view(attachment: Attachment) -> dict[str, Any]:
    """A file of a message or of a draft."""
    plan = attachment.plan
    return {
        "digest": attachment.digest,
        "kind": attachment.kind,
        "name": attachment.name,
        "num_bytes": attachment.num_bytes,
        "form": form_of(attachment.name) if attachment.kind == "text" else None,
        "size": list(plan.source_size) if plan is not None else None,
        "num_frames": len(plan.frame_indices) if plan is not None and plan.frame_indices is not None else None,
        "duration_s": plan.duration_s if plan is not None else None,
        "clip": dataclasses.asdict(attachment.clip) if attachment.clip is not None else None,
        "crop_of": dataclasses.asdict(attachment.crop_of) if attachment.crop_of is not None else None,
    }


def _used(path: Sequence[Node]) -> int:
    """Tokens of the context that the branch takes, by its last answer with counts."""
    for node in reversed(path):
        counts = [(node.stats or {}).get(name) for name in ("num_prompt_tokens", "num_generated_tokens")]
        known = [count for count in counts if isinstance(count, int)]
        if len(known) == len(counts):
            return sum(known)
    return 0


class _Rendered:
    """An LRU cache of texts' blocks. Its limit counts characters, since the number and the length of answers vary
    widely."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._blocks: OrderedDict[str, tuple[list[str], int]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, text: str) -> list[str]:
        with self._lock:
            if text in self._blocks:
                self._blocks.move_to_end(text)
                return self._blocks[text][0]
        blocks = render_blocks(text) if text else []
        num_chars = len(text) + sum(map(len, blocks))
        with self._lock:
            if text not in self._blocks:
                self._blocks[text] = (blocks, num_chars)
                self._num_chars += num_chars
            while self._num_chars > self._max_chars:
                _, (_, num_freed) = self._blocks.popitem(last=False)
                self._num_chars -= num_freed
        return blocks


_blocks = _Rendered(_MAX_RENDERED_CHARS)
