"""From messages to a prompt: the token ids, their positions, and where they are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen35mm.config import ModelConfig
from qwen35mm.errors import PromptError
from qwen35mm.prompt.layout import Span, lay_out, span_positions
from qwen35mm.prompt.messages import Message, check_conversation, iter_media
from qwen35mm.prompt.outside import MAX_OUTSIDE_CHARS, StandIns, check_texts, template_message, visit_json
from qwen35mm.prompt.parts import Image, Text, check_json
from qwen35mm.prompt.segments import DEFAULT_MIN_SEGMENT, Segment, cut_segments
from qwen35mm.prompt.template import ChatTemplate
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import MediaPlan

TURN_START = "<|im_start|>"
THINKING_START = "<think>"
# As the family's templates write it between thinking and answer.
THINKING_END = "\n</think>\n\n"


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the engine prefills.

    Attributes:
        token_ids: int64 `[T]`, read-only.
        spans: the runs of media placeholders, in order.
        positions: M-RoPE positions (temporal, height, width), int64 `[3, T]`, read-only.
        rope_delta: of a token after the prompt: position = cache_position + rope_delta.
        segments: from 0 to `tail_start`, without gaps.
        tail_start: the tail is computed but not addressed; it is never empty in a prompt that `build_prompt` made
            with a generation prompt.
        system_stop: where the system message ends; 0 without one.
        reply_text: the answer's beginning, where a reply is to be continued.
    """

    token_ids: np.ndarray
    spans: tuple[Span, ...]
    positions: np.ndarray
    rope_delta: int
    segments: tuple[Segment, ...]
    tail_start: int
    system_stop: int = 0
    reply_text: str = ""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        assert self.positions.shape == (3, num_tokens)
        assert 0 <= self.tail_start <= num_tokens
        for array in (self.token_ids, self.positions):
            array.setflags(write=False)


def build_prompt(
    messages: Sequence[Message],
    media: Sequence[MediaPlan],
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    config: ModelConfig,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool,
    add_generation_prompt: bool = True,
    continue_reply: bool = False,
    min_segment: int = DEFAULT_MIN_SEGMENT,
    keep_video_marks: bool = False,
) -> Prompt:
    """Renders and tokenizes a conversation.

    Where no text holds a control string such as `<|im_end|>`, the ids are those of transformers'
    `apply_chat_template(tokenize=True)`. Where one does, it is ordinary text: control ids are the template's alone.

    Args:
        messages: the conversation.
        media: the plans of its images and videos, in order of appearance.
        tools: definitions of functions, in OpenAI's form.
        continue_reply: the last message is a reply that ended early; the prompt ends with its text, or with its
            reasoning where it has no text yet, and not with its end.
        min_segment: no segment is shorter (tokens).
        keep_video_marks: whether a video keeps the `<|vision_start|>` and `<|vision_end|>` that the template writes
            around it, outside those of its temporal patches. The family's first reference code (transformers 4.57)
            and its own page replace them; transformers keeps them since 5.10.

    Raises:
        PromptError: the messages can't become a prompt; says why.
    """
    so_far = None
    if continue_reply:
        *messages, so_far = _continued(messages)
    ids, spans = _encode(
        messages,
        media,
        tokenizer,
        template,
        config,
        tools,
        enable_thinking,
        add_generation_prompt or continue_reply,
        keep_video_marks,
        so_far,
    )
    reply_text = "" if so_far is None else so_far.text
    return _prompt(messages, ids, spans, tokenizer, config, min_segment, at_turn_end=False, reply_text=reply_text)


def build_history(
    messages: Sequence[Message],
    media: Sequence[MediaPlan],
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    config: ModelConfig,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool,
    min_segment: int = DEFAULT_MIN_SEGMENT,
    keep_video_marks: bool = False,
) -> Prompt:
    """A conversation that ends with a reply, as the prompt of its next turn will begin.

    It is rendered with a placeholder next message (a tool's after tool calls, else a user's) and cut before that
    message. The tail is empty where the last turn is long enough for a segment. Arguments are `build_prompt`'s.

    Raises:
        PromptError: the messages can't become a prompt, or don't end with an assistant's message.
    """
    if not messages or messages[-1].role != "assistant":
        raise PromptError("A history must end with an assistant's message.")
    following = Message("tool" if messages[-1].tool_calls else "user", (Text("..."),))
    ids, spans = _encode(
        [*messages, following], media, tokenizer, template, config, tools, enable_thinking, False, keep_video_marks
    )
    turn_starts = _turn_starts(ids, tokenizer)
    if not turn_starts:
        raise PromptError(f"The model's chat template marks no turns with {TURN_START}.")
    ids = ids[: turn_starts[-1]].copy()
    return _prompt(messages, ids, spans, tokenizer, config, min_segment, at_turn_end=True)


def _encode(
    messages: Sequence[Message],
    media: Sequence[MediaPlan],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    config: ModelConfig,
    tools: Sequence[Mapping[str, Any]] | None,
    enable_thinking: bool,
    add_generation_prompt: bool,
    keep_video_marks: bool,
    so_far: Message | None = None,
) -> tuple[np.ndarray, tuple[Span, ...]]:
    check_conversation(messages)
    _check_media(messages, media)
    texts = [template.source, *_outside_texts([*messages, *([so_far] if so_far else [])], tools)]
    stand_ins = StandIns(tokenizer.control_first_chars, texts)
    try:
        rendered = template.render(
            [template_message(message, stand_ins.hide) for message in messages],
            tools=visit_json(tools, stand_ins.hide),
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )
    except PromptError as error:
        raise PromptError(stand_ins.restore(str(error))) from error
    if so_far is not None:
        rendered += _continuation(so_far, stand_ins, in_thinking=rendered.rstrip().endswith(THINKING_START))
    return lay_out(
        rendered,
        media,
        tokenizer=tokenizer,
        config=config,
        restore=stand_ins.restore,
        keep_video_marks=keep_video_marks,
    )


def _continued(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, checked to end with a reply that can go on."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or not (last.text or last.reasoning):
        raise PromptError("Only a conversation that ends with the text of a reply can be continued there.")
    return messages


def _continuation(so_far: Message, stand_ins: StandIns, *, in_thinking: bool) -> str:
    """What stands behind the generation prompt where a reply goes on."""
    thought = stand_ins.hide(so_far.reasoning or "")
    if so_far.text:
        return (thought + THINKING_END if in_thinking else "") + stand_ins.hide(so_far.text)
    if not in_thinking:
        raise PromptError("The reply ended in the middle of its thinking: turn thinking on to continue it.")
    return thought


def _outside_texts(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Every string that comes from outside, checked."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    total = checked = 0
    for number, message in enumerate(messages, start=1):
        template_message(message, collect)
        total += check_texts(texts[checked:], f"Message {number} ({message.role})")
        checked = len(texts)
    if tools is not None:
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise PromptError("Each tool definition must be an object.")
        check_json(list(tools), "The tool definitions")
        visit_json(tools, collect)
        total += check_texts(texts[checked:], "The tool definitions")
    if total > MAX_OUTSIDE_CHARS:
        raise PromptError(
            f"The texts of this conversation have {total:,} characters; at most {MAX_OUTSIDE_CHARS:,} are accepted. "
            "Leave out older messages or shorten the attached files."
        )
    return texts


def _check_media(messages: Sequence[Message], media: Sequence[MediaPlan]) -> None:
    parts = list(iter_media(messages))
    if len(parts) != len(media):
        raise PromptError(f"The messages hold {len(parts)} images and videos; plans came for {len(media)}.")
    for number, (part, plan) in enumerate(zip(parts, media, strict=True), start=1):
        kind = "image" if isinstance(part, Image) else "video"
        if plan.kind != kind:
            raise PromptError(f"Medium {number} of the messages is of kind {kind}; its plan is for kind {plan.kind}.")


def _prompt(
    messages: Sequence[Message],
    ids: np.ndarray,
    spans: tuple[Span, ...],
    tokenizer: Tokenizer,
    config: ModelConfig,
    min_segment: int,
    *,
    at_turn_end: bool,
    reply_text: str = "",
) -> Prompt:
    turn_starts = _turn_starts(ids, tokenizer)
    segments, tail_start = cut_segments(
        len(ids),
        [*turn_starts, len(ids)] if at_turn_end else turn_starts,
        [(span.start, span.stop) for span in spans],
        min_segment=min_segment,
    )
    positions, rope_delta = span_positions(len(ids), spans, config.vision.spatial_merge_size)
    has_system = messages[0].role == "system" and turn_starts[:1] == [0] and len(turn_starts) > 1
    system_stop = turn_starts[1] if has_system else 0
    return Prompt(ids, spans, positions, rope_delta, segments, tail_start, system_stop, reply_text)


def _turn_starts(ids: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    turn_start_id = tokenizer.control_ids.get(TURN_START)
    return [] if turn_start_id is None else np.flatnonzero(ids == turn_start_id).tolist()
