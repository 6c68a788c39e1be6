"""From the messages that a person sees to those that the model gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwen35mm.chat.documents.documents import as_context
from qwen35mm.chat.store.media import MediaStore
from qwen35mm.chat.store.records import Attachment, Node
from qwen35mm.chat.store.tree import Tree
from qwen35mm.contract import Image, Message, Part, Text, Video
from qwen35mm.errors import PromptError, RequestError
from qwen35mm_preprocess import MediaPlan, MediaProcessor
from qwen35mm_preprocess.say import Said, renamed, say

_SUMMARY = "A summary of the conversation so far:\n\n"


class TooLongError(RequestError):
    """A message that doesn't fit into the context: it takes `num_tokens`, and `offers` are what would fit."""

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
    """The messages that a prompt holds: from the last of `firsts` on, without the questions that got no answer.

    A question without an answer would spoil, or fail, every later prompt. The last question is always there.
    """
    ids = [node.id for node in path]
    path = path[max((ids.index(first) for first in firsts if first in ids), default=0) :]
    kept: list[Node] = []
    for position, node in enumerate(path):
        reply = path[position + 1] if position + 1 < len(path) else None
        if node.role == "user" and reply is not None and not reply.text and position + 2 < len(path):
            continue
        if node.role == "assistant" and not node.text and position + 1 < len(path):
            continue
        kept.append(node)
    return kept


def prompt_path_before(tree: Tree, parent: str | None, *firsts: str | None) -> list[Node]:
    """What a prompt holds before a message after `parent`; see `prompt_path`.

    Raises:
        PromptError: the parent is a question.
        NotFoundError: it is not in the tree.
    """
    path = tree.path(parent)
    if path and path[-1].role == "user":
        raise PromptError(say("The question before this one has no answer. Answer it first, or edit it."))
    kept = prompt_path(path, *firsts)
    # The last question is kept for its answer's sake; without one it is left out here.
    if kept and kept[-1].role == "assistant" and not kept[-1].text:
        kept.pop()
    if kept and kept[-1].role == "user":
        kept.pop()
    return kept


def prompt_messages(
    path: Sequence[Node], media: MediaStore, system: str = "", processor: MediaProcessor | None = None
) -> list[Message]:
    """The messages of a prompt; `path` is `prompt_path`'s.

    An answer that stands first is a summary of what was left out, and goes into the system prompt.

    Args:
        processor: the model's; a plan that was made for another one's processing is left out, and made anew.

    Raises:
        StorageError: an attached file is gone.
    """
    if path and path[0].role == "assistant":
        system = "\n\n".join(filter(None, (system, _SUMMARY + path[0].text)))
        path = path[1:]
    messages = [Message("system", (Text(system),))] if system else []
    for node in path:
        if node.role == "user":
            messages.append(Message("user", tuple(_parts(node, media, processor))))
        else:
            messages.append(Message("assistant", (Text(node.text),), reasoning=node.reasoning or None))
    return messages


def with_names(words: Said, attachments: Sequence[Attachment]) -> Said:
    """A message about files as their owner called them, not as they are stored."""

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
