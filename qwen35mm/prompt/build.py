"""From messages to a prompt: token ids, their positions, and the cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen35mm.config import ModelConfig
from qwen35mm.contract import Message, Text, iter_media
from qwen35mm.contract.messages import check_conversation
from qwen35mm.contract.parts import check_json
from qwen35mm.errors import ConfigError, PromptError
from qwen35mm.prompt.carry import NUM_MARKS, Carrier, is_ordinary, num_leading
from qwen35mm.prompt.layout import Span, lay_out, span_positions
from qwen35mm.prompt.outside import MAX_OUTSIDE_CHARS, StandIns, check_texts, template_message, visit_json
from qwen35mm.prompt.segments import DEFAULT_MIN_SEGMENT, MAX_RUN, Segment, cut_segments
from qwen35mm.prompt.template import ChatTemplate
from qwen35mm.tokenizer import Tokenizer, TooManyTokensError
from qwen35mm_preprocess import MediaPlan
from qwen35mm_preprocess.say import say

TURN_START = "<|im_start|>"
THINKING_START = "<think>"
# As the family's templates write it after thinking.
THINKING_END = "\n</think>\n\n"


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the engine prefills.

    Attributes:
        token_ids: int64 `[T]`, read-only.
        spans: media placeholders, in order.
        positions: M-RoPE positions (temporal, height, width), int64 `[3, T]`, read-only.
        rope_delta: for tokens after the prompt: position = cache_position + rope_delta.
        segments: from 0 to `tail_start`, without gaps.
        tail_start: where the tail begins, which isn't addressed; it is never empty in a prompt that asks for a reply.
        system_stop: where the system message ends; 0 without one.
        reply_text: the answer's beginning if a reply is continued.
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


class PromptBuilder:
    """Builds the prompts of one checkpoint.

    Args:
        tokenizer, template, config: the checkpoint's.
        min_segment: least tokens of a segment.

    Raises:
        ConfigError: `min_segment` is out of range.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        config: ModelConfig,
        *,
        min_segment: int = DEFAULT_MIN_SEGMENT,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._config = config
        if not isinstance(min_segment, int) or not 1 <= min_segment <= MAX_RUN:
            raise ConfigError(f"min_segment must be a whole number from 1 to {MAX_RUN}; got {min_segment!r}.")
        self._min_segment = min_segment

    def prompt(
        self,
        messages: Sequence[Message],
        media: Sequence[MediaPlan],
        *,
        enable_thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_reply: bool = False,
        most_tokens: int | None = None,
    ) -> Prompt:
        """Renders and tokenizes a conversation.

        The ids equal those of transformers' `apply_chat_template(tokenize=True)`, unless a text holds a control string
        such as `<|im_end|>`. Here that is ordinary text: only the template writes control ids.

        Args:
            messages: the conversation.
            media: the plans of its images and videos, in order of appearance.
            tools: function definitions in OpenAI's form.
            template_options: values of the template's switches, JSON values by name; see `ChatTemplate.switches`.
            continue_reply: the last message is a reply that ended early. The prompt stops after its text, or after its
                reasoning if it has no text, without the turn's end.
            most_tokens: tokenizing stops once the prompt is longer.

        Raises:
            PromptError: the messages can't become a prompt; has the reason.
            TooManyTokensError: it would have more than `most_tokens`.
        """
        reply = None
        if continue_reply:
            messages, reply = messages[:-1], messages[-1] if messages else None
            if reply is None or reply.role != "assistant" or reply.tool_calls or not (reply.text or reply.reasoning):
                raise PromptError("Only a conversation that ends with the text of a reply can be continued there.")
        generate = add_generation_prompt or continue_reply
        how = {"add_generation_prompt": generate, "reply": reply, "most_tokens": most_tokens}
        ids, spans = self._encode(messages, media, tools, enable_thinking, template_options or {}, **how)
        starts = self._turn_starts(ids)
        reply_text = "" if reply is None else reply.text
        return self._cut(ids, spans, starts, system_stop=_system_stop(messages, starts), reply_text=reply_text)

    def history(
        self,
        messages: Sequence[Message],
        media: Sequence[MediaPlan],
        *,
        enable_thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> Prompt:
        """A conversation that ends with a reply, as its next turn's prompt will begin.

        It is rendered with a placeholder next message (a tool's after tool calls, else a user's) and stops before it.
        The tail is empty if the last turn is long enough for a segment. Arguments as in `prompt`.

        Raises:
            PromptError: the messages can't become a prompt, or don't end with an assistant's message.
            TooManyTokensError: it would have more than `most_tokens`.
        """
        if not messages or messages[-1].role != "assistant":
            raise PromptError("A history must end with an assistant's message.")
        following = Message("tool" if messages[-1].tool_calls else "user", (Text("..."),))
        how = {"add_generation_prompt": False, "most_tokens": most_tokens}
        messages = [*messages, following]
        ids, spans = self._encode(messages, media, tools, enable_thinking, template_options or {}, **how)
        turn_starts = self._turn_starts(ids)
        if not turn_starts:
            raise PromptError(f"The model's chat template marks no turns with {TURN_START}.")
        *starts, stop = turn_starts
        ids = ids[:stop].copy()
        return self._cut(ids, spans, starts, more_ends=[stop], system_stop=_system_stop(messages, starts))

    def reply(
        self,
        messages: Sequence[Message],
        media: Sequence[MediaPlan],
        text: str,
        *,
        enable_thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> tuple[Prompt, int]:
        """A conversation with an unfinished answer to its last message, and the index of the answer's first token.

        The answer's first characters may share a token with the template's text before them. Arguments as in `prompt`.

        Raises:
            PromptError: the messages can't become a prompt, or there is no text.
            TooManyTokensError: it would have more than `most_tokens`.
        """
        how = {"enable_thinking": enable_thinking, "tools": tools, "template_options": template_options}
        how["most_tokens"] = most_tokens
        asked = self.prompt(messages, media, **how)
        answer = Message("assistant", (Text(text),))
        answered = self.prompt([*messages, answer], media, continue_reply=True, **how)
        return answered, num_in_common(asked.token_ids, answered.token_ids)

    def plain(self, token_ids: Sequence[int] | np.ndarray, *, ends: Sequence[int] = ()) -> Prompt:
        """A prompt from token ids, with or without a template. A rendered conversation's ids get its cuts.

        Args:
            token_ids: a list of ids, or an integer array `[T]`.
            ends: further places to cut, at least `min_segment` tokens apart: where prefixes shared with others end.

        Raises:
            PromptError: it has no tokens, an unknown token, or a medium's placeholder.
        """
        ids = self._checked(token_ids)
        return self._cut(ids, (), self._turn_starts(ids), more_ends=ends)

    def text_ids(self, text: str, *, control_tokens: bool = False, most_tokens: int | None = None) -> list[int]:
        """Token ids of a text without a template.

        Args:
            control_tokens: whether control tokens' text becomes control ids, as with transformers' tokenizers; else it
                is ordinary text.
            most_tokens: tokenizing stops once the text is longer.

        Raises:
            PromptError: the text holds half of a surrogate pair.
            TooManyTokensError: it has more than `most_tokens`.
        """
        check_texts([text], "The prompt")
        ids: list[int] = []
        for item in self._tokenizer.split_controls(text) if control_tokens else [text]:
            if isinstance(item, int):
                ids.append(item)
                continue
            most = None if most_tokens is None else most_tokens - len(ids)
            try:
                ids += self._tokenizer.encode_plain(item, most)
            except TooManyTokensError as error:
                raise TooManyTokensError(len(ids) + error.at_least) from None
        return ids

    def _checked(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """A copy of a prompt's ids, int64 `[T]`."""
        given: Any = token_ids
        is_array = isinstance(given, np.ndarray)
        if is_array and not (given.ndim == 1 and given.dtype.kind in "iu"):
            raise PromptError(
                f"Token ids must be an array of whole numbers in one dimension; got {given.dtype} {given.shape}."
            )
        if not is_array and not isinstance(given, list | tuple):
            raise PromptError(f"Token ids must be a list, or an array of whole numbers; got {type(given).__name__}.")
        if not len(given):
            raise PromptError("The prompt has no tokens.")
        largest = self._tokenizer.vocab_size - 1
        for at, token_id in enumerate(given.tolist() if is_array else given, start=1):
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise PromptError(f"Token {at} of the prompt must be a whole number; got {token_id!r}.")
            if not 0 <= token_id <= largest:
                raise PromptError(f"Token {at} of the prompt must be an id from 0 to {largest:,}; got {token_id:,}.")
            if token_id in (self._config.image_token_id, self._config.video_token_id):
                raise PromptError(
                    f"Token {at} of the prompt ({token_id:,}) holds the place of a picture or video, which token ids "
                    "don't bring along. Send messages with the media in them."
                )
        return np.array(given, dtype=np.int64)

    def _encode(
        self,
        messages: Sequence[Message],
        media: Sequence[MediaPlan],
        tools: Sequence[Mapping[str, Any]] | None,
        enable_thinking: bool,
        template_options: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        reply: Message | None = None,
        most_tokens: int | None = None,
    ) -> tuple[np.ndarray, tuple[Span, ...]]:
        """Token ids `[T]` int64 and their media spans; a continued reply follows the generation prompt."""
        check_conversation(messages)
        _check_media(messages, media)
        options = self._template.chosen(template_options)
        outside = _outside_texts([*messages, *([reply] if reply else [])], tools, options)
        chars = self._tokenizer.control_first_chars
        stand_ins = StandIns(chars, [self._template.source, *outside], num_marks=NUM_MARKS)
        how = {
            "tools": visit_json(tools, stand_ins.hide),
            "enable_thinking": enable_thinking,
            "add_generation_prompt": add_generation_prompt,
            "options": visit_json(options, stand_ins.hide),
        }
        try:
            rendered = self._rendered(messages, stand_ins, how)
        except PromptError as error:
            raise PromptError(stand_ins.restore(str(error))) from error
        if reply is not None:
            rendered += _continuation(reply, stand_ins, in_thinking=rendered.rstrip().endswith(THINKING_START))
        return lay_out(
            rendered,
            media,
            tokenizer=self._tokenizer,
            config=self._config,
            restore=stand_ins.restore,
            most_tokens=most_tokens,
        )

    def _rendered(self, messages: Sequence[Message], stand_ins: StandIns, how: dict[str, Any]) -> str:
        """The template's text with stand-ins. The template is asked first; what it refuses is carried."""
        template = self._template
        if is_ordinary(messages):
            return template.render([template_message(message, stand_ins.hide) for message in messages], **how)
        carrier = Carrier(stand_ins.hide, stand_ins.marks)
        later = [message.text for message in messages[num_leading(messages) :] if message.role == "system"]
        if later and template.takes_later(enable_thinking=how["enable_thinking"], options=how["options"]):
            with contextlib.suppress(PromptError):
                given = carrier.carried(messages, template, takes_later=True)
                rendered = carrier.rewritten(template.render(given, **how))
                if all(stand_ins.hide(text.strip()) in rendered for text in later):
                    return rendered
        return carrier.rewritten(template.render(carrier.carried(messages, template, takes_later=False), **how))

    def _cut(
        self,
        ids: np.ndarray,
        spans: tuple[Span, ...],
        turn_starts: Sequence[int],
        *,
        more_ends: Sequence[int] = (),
        system_stop: int = 0,
        reply_text: str = "",
    ) -> Prompt:
        segments, tail_start = cut_segments(
            len(ids),
            sorted({*turn_starts, *more_ends}),
            [(span.start, span.stop) for span in spans],
            min_segment=self._min_segment,
        )
        positions, rope_delta = span_positions(len(ids), spans, self._config.spatial_merge_size)
        return Prompt(ids, spans, positions, rope_delta, segments, tail_start, system_stop, reply_text)

    def _turn_starts(self, ids: np.ndarray) -> list[int]:
        turn_start_id = self._tokenizer.control_ids.get(TURN_START)
        return [] if turn_start_id is None else np.flatnonzero(ids == turn_start_id).tolist()


def num_in_common(first: np.ndarray, second: np.ndarray) -> int:
    """Length of two prompts' common prefix in tokens."""
    size = min(len(first), len(second))
    same = first[:size] == second[:size]
    return size if same.all() else int(same.argmin())


def _system_stop(messages: Sequence[Message], turn_starts: Sequence[int]) -> int:
    """Where the system message ends; 0 without one."""
    has_system = num_leading(messages) > 0 and turn_starts[:1] == [0] and len(turn_starts) > 1
    return turn_starts[1] if has_system else 0


def _continuation(reply: Message, stand_ins: StandIns, *, in_thinking: bool) -> str:
    """The text after the generation prompt when a reply is continued."""
    thought = stand_ins.hide(reply.reasoning or "")
    if reply.text:
        return (thought + THINKING_END if in_thinking else "") + stand_ins.hide(reply.text)
    if not in_thinking:
        raise PromptError(say("The reply ended in the middle of its thinking: turn thinking on to continue it."))
    return thought


def _outside_texts(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
) -> list[str]:
    """Every outside string, checked."""
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
        checked = len(texts)
    check_json(options, "The template options")
    visit_json(options, collect)
    total += check_texts(texts[checked:], "The template options")
    if total > MAX_OUTSIDE_CHARS:
        raise PromptError(
            say(
                "The texts of this conversation have {n} characters; at most {most} are accepted. Leave out older "
                "messages or shorten the attached files.",
                n=total,
                most=MAX_OUTSIDE_CHARS,
            )
        )
    return texts


def _check_media(messages: Sequence[Message], media: Sequence[MediaPlan]) -> None:
    parts = list(iter_media(messages))
    if len(parts) != len(media):
        raise PromptError(f"The messages hold {len(parts)} images and videos; plans came for {len(media)}.")
    for number, (part, plan) in enumerate(zip(parts, media, strict=True), start=1):
        if plan.kind != part.kind:
            raise PromptError(
                f"Medium {number} of the messages is of kind {part.kind}; its plan is for kind {plan.kind}."
            )
