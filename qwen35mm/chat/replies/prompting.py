"""Turns the messages that a person sees into the model's prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwen35mm.chat.documents.documents import as_context
from qwen35mm.chat.store.media import MediaStore
from qwen35mm.chat.store.records import Attachment, Call, Node
from qwen35mm.chat.store.tree import Tree
from qwen35mm.contract import Image, Message, Part, Text, ToolCall, Video
from qwen35mm.errors import PromptError, RequestError
from qwen35mm_preprocess import MediaPlan, MediaProcessor
from qwen35mm_preprocess.say import Said, renamed, say

_SUMMARY = "A summary of the conversation so far:\n\n"
_NOT_RUN = "The person didn't run this call."
_ENDED = "The program ended before this call had a result."


class TooLongError(RequestError):
    """The prompt of `num_tokens` doesn't fit the context; `offers` lists changes that make it fit."""

    def __init__(self, tokens: Mapping[str, int], offers: Sequence[dict[str, Any]]) -> None:
        words = say(
            "This chat would take {n} tokens. The context holds {context}, and {reserve} of them are "
            "reserved for the answer.",
            n=tokens["all"],
            context=tokens["context"],
            reserve=tokens["reserve"],
        )
        super().__init__(words)
        self.num_tokens = tokens["all"]
        self.offers = list(offers)


def prompt_path(path: Sequence[Node], *firsts: str | None) -> list[Node]:
    """The messages in a prompt: from the last of `firsts` on, without unanswered questions.

    An unanswered question would spoil every later prompt, or make it fail. The last question always stays. So does
    a result only with its call, which a summary in first place doesn't have.
    """
    ids = [node.id for node in path]
    path = path[max((ids.index(first) for first in firsts if first in ids), default=0) :]
    kept: list[Node] = []
    calls: set[str] = set()
    for position, node in enumerate(path):
        reply = path[position + 1] if position + 1 < len(path) else None
        if node.role == "user" and reply is not None and not reply.says_something and position + 2 < len(path):
            continue
        if node.role == "assistant" and not node.says_something and position + 1 < len(path):
            continue
        if node.role == "tool" and node.call not in calls:
            continue
        calls = calls - {node.call} if node.role == "tool" else {call.id for call in (node.calls if kept else ())}
        kept.append(node)
    return kept


def prompt_path_before(tree: Tree, parent: str | None, *firsts: str | None) -> list[Node]:
    """The messages in a prompt before a message after `parent`; see `prompt_path`.

    Raises:
        PromptError: the parent is a question.
        NotFoundError: the parent is not in the tree.
    """
    path = tree.path(parent)
    if path and path[-1].role == "user":
        raise PromptError(say("The question before this one has no answer. Answer it first, or edit it."))
    kept = prompt_path(path, *firsts)
    # `prompt_path` keeps the last question even without an answer.
    if kept and kept[-1].role == "assistant" and not kept[-1].says_something:
        kept.pop()
    if kept and kept[-1].role == "user":
        kept.pop()
    return kept


def prompt_messages(
    path: Sequence[Node], media: MediaStore, system: str = "", processor: MediaProcessor | None = None
) -> list[Message]:
    """The messages of a prompt.

    An answer in first place is a summary of what was left out, and goes into the system prompt. Results belong to the
    calls of the answer before them; one without its call, which may be left out, is left out, too.

    Args:
        path: from `prompt_path`.
        processor: the model's; plans made for other processing are dropped, so that the backend plans anew.

    Raises:
        StorageError: an attached file is gone.
    """
    if path and path[0].role == "assistant":
        system = "\n\n".join(filter(None, (system, _SUMMARY + path[0].text)))
        path = path[1:]
    messages = [Message("system", (Text(system),))] if system else []
    calls: dict[str, Call] = {}
    for node in path:
        if node.role != "tool":
            messages += _unanswered(calls)
        if node.role == "user":
            messages.append(Message("user", tuple(_parts(node, media, processor))))
        elif node.role == "tool":
            call = calls.pop(node.call or "", None)
            if call is not None:
                parts = tuple(_parts(node, media, processor)) or (Text(_ENDED),)
                messages.append(Message("tool", parts, tool_call_id=call.id, name=call.name))
        else:
            calls = {call.id: call for call in node.calls}
            content = (Text(node.text),) if node.text or not calls else ()
            made = [ToolCall(call.name, call.arguments, call.id) for call in node.calls]
            messages.append(Message("assistant", content, reasoning=node.reasoning or None, tool_calls=made))
    return messages + (_unanswered(calls) if path and path[-1].role == "tool" else [])


def _unanswered(calls: dict[str, Call]) -> list[Message]:
    """Results for calls that have none, since the person went on; a call without one would wait for ever."""
    left = [Message("tool", _NOT_RUN, tool_call_id=call.id, name=call.name) for call in calls.values()]
    calls.clear()
    return left


def with_names(words: Said, attachments: Sequence[Attachment]) -> Said:
    """A message with the files' own names in place of their digests."""

    def rename(text: str) -> str:
        for attachment in attachments:
            text = text.replace(attachment.digest, attachment.name)
        return text

    return renamed(words, rename)


def _parts(node: Node, media: MediaStore, processor: MediaProcessor | None) -> list[Part]:
    parts: list[Part] = []
    for attachment in node.attachments:
        if attachment.kind == "image":
            parts.append(Image(media.path(attachment.digest), _plan(attachment, processor)))
        elif attachment.kind == "video":
            parts.append(Video(media.path(attachment.digest), _plan(attachment, processor), attachment.clip))
        else:
            with media.open(attachment.digest) as file:
                text = file.read().decode("utf-8", "replace")
            parts.append(Text(as_context(attachment.name, text) + "\n\n"))
    if node.text:
        parts.append(Text(node.text))
    return parts


def _plan(attachment: Attachment, processor: MediaProcessor | None) -> MediaPlan | None:
    plan = attachment.plan
    if plan is None or processor is None:
        return plan
    processing = processor.image_processing if plan.kind == "image" else processor.video_processing
    return plan if plan.processing == processing.fingerprint() else None
