"""A checkpoint's own chat template, run in a sandbox."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from qwen35mm.errors import CheckpointError, PromptError
from qwen35mm.outside_json import read_json
from qwen35mm.prompt.limits import TooMuchError
from qwen35mm.prompt.sandbox import MAX_SOURCE_CHARS, compile_template, plain, read_names
from qwen35mm.tokenizer import read_tokenizer_config
from qwen35mm_preprocess.say import Said, say

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Words for how much a model thinks, from the least on."""

# The family's switches.
_VALUES: dict[str, tuple[bool | str, ...]] = dict.fromkeys(("preserve_thinking", "add_vision_id"), (False, True))
_MAX_REASON_CHARS = 1000
_PROBE = [{"role": "user", "content": "Hello"}]
# Answers about a template that are remembered.
_MAX_ANSWERS = 64
# Not switches: what every render gets.
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "enable_thinking"})


class ChatTemplate:
    """Turns messages, as plain dicts, into the text that the model was trained on.

    Attributes:
        source: the Jinja text.
        default_enable_thinking: whether the template enables thinking by default.
        refused_thinking: the value of `enable_thinking` that the template refuses; None if it accepts both.
        switches_thinking: whether the template has a switch for thinking and accepts both its values.
        switches: the further variables that the template reads, such as `preserve_thinking`.
        efforts: the values of EFFORTS that the template accepts as `reasoning_effort`; empty if it doesn't read that.

    Args:
        source: the Jinja text.
        variables: further variables of the template, such as `eos_token`.

    Raises:
        CheckpointError: the template can't render a message.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self.refused_thinking: bool | None = None
        self.default_enable_thinking, self.switches_thinking = self._read_thinking()
        self.switches = frozenset(read_names(source) - _GIVEN - self._variables.keys())
        self.efforts = tuple(each for each in EFFORTS if self._accepts_effort(each))
        self._takes_leading: dict[int, bool] = {}
        self._takes_later: dict[bytes, bool] = {}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ChatTemplate:
        """Reads the first of chat_template.jinja, chat_template.json and tokenizer_config.json that exists.

        Raises:
            CheckpointError: the folder has no usable template.
        """
        folder = Path(folder)
        config = read_tokenizer_config(folder)
        try:
            if (path := folder / "chat_template.jinja").is_file():
                with path.open(encoding="utf-8") as file:
                    source = file.read(MAX_SOURCE_CHARS + 1)
            elif (path := folder / "chat_template.json").is_file():
                source = read_json(path).get("chat_template")
            else:
                source = config.get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path.name} can't be read ({type(error).__name__}).") from error
        if isinstance(source, list):  # several named ones
            named = [each for each in source if isinstance(each, dict)]
            source = next((each.get("template") for each in named if each.get("name") == "default"), None)
        if not isinstance(source, str):
            raise CheckpointError(
                f"{folder.name or folder}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json). A base model without one can't chat."
            )
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the prompt, with one placeholder per image or video.

        Args:
            options: values of `switches`; other names have no effect.

        Raises:
            PromptError: the template refuses the messages (has its reason) or fails on them.
        """
        if enable_thinking is self.refused_thinking:
            raise PromptError(_one_way(thinks=not enable_thinking))
        try:
            chosen = self.chosen(options or {})
            return self._run(messages, tools, add_generation_prompt, enable_thinking=enable_thinking, **chosen)
        except TooMuchError as error:
            raise PromptError(f"The model's chat template {error}. Use another one, or send less.") from error
        except Exception as error:  # a template can raise anything
            if type(error) is TemplateError:  # its own raise_exception(...)
                reason = str(error)[:_MAX_REASON_CHARS]
                raise PromptError(f"The model's chat template refuses these messages: {reason}") from error
            raise PromptError(f"The model's chat template fails on these messages ({type(error).__name__}).") from error

    def values_of(self, switch: str) -> tuple[bool | str, ...]:
        """The values of a switch; none if they are unknown."""
        return self.efforts if switch == "reasoning_effort" else _VALUES.get(switch, ())

    def chosen(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that the template reads, without None, which leaves its default.

        A `reasoning_effort` of EFFORTS that the template refuses becomes the nearest that it accepts, of two the
        larger.
        """
        chosen = {name: value for name, value in options.items() if name in self.switches and value is not None}
        effort = chosen.get("reasoning_effort")
        if effort == "none":  # thinking is off, which `enable_thinking` says
            del chosen["reasoning_effort"]
        if isinstance(effort, str) and effort in EFFORTS and self.efforts:
            place = EFFORTS.index(effort)
            chosen["reasoning_effort"] = min(reversed(self.efforts), key=lambda each: abs(EFFORTS.index(each) - place))
        return chosen

    def takes_leading(self, number: int) -> bool:
        """Whether the template writes so many system messages at the beginning."""
        if number not in self._takes_leading:
            told = [{"role": "system", "content": f"qwen35mm-{each}."} for each in range(number)]
            rendered = self._tried([*told, *_PROBE])
            self._takes_leading[number] = rendered is not None and all(each["content"] in rendered for each in told)
        return self._takes_leading[number]

    def takes_later(self, *, enable_thinking: bool, options: Mapping[str, Any] | None = None) -> bool:
        """Whether the template writes a system message at its place, wherever that is, and then changes nothing before
        it. Renders it 14 times for options that it wasn't asked with lately."""
        chosen = {"enable_thinking": enable_thinking, **self.chosen(options or {})}
        how = hashlib.sha256(json.dumps(chosen, sort_keys=True, default=dict).encode()).digest()
        takes = self._takes_later.get(how)
        if takes is None:
            takes = self._ask_later(chosen)
            # Other threads ask, too.
            if len(self._takes_later) >= _MAX_ANSWERS:
                self._takes_later.clear()
            self._takes_later[how] = takes
        return takes

    @functools.cached_property
    def needs_query(self) -> bool:
        """Whether the template refuses conversations without a user's message."""
        return self._tried([{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}]) is None

    def _ask_later(self, options: Mapping[str, Any]) -> bool:
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        asked = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call]}
        answer = {"role": "assistant", "content": "said", "reasoning_content": "because"}
        told = {"role": "system", "content": "qwen35mm-told."}
        user, result = {"role": "user", "content": "question"}, {"role": "tool", "content": "result"}
        messages = [user, told, asked, result, told, told, answer, user, told, asked, result, answer, told, user]
        renders = [self._tried(messages[:end], **options) for end in range(1, len(messages) + 1)]
        return all(
            before is not None
            and after is not None
            and after.startswith(before)
            and told["content"] in after[len(before) :]
            for message, (before, after) in zip(messages[1:], itertools.pairwise(renders), strict=True)
            if message is told
        )

    def _tried(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        """The render without a generation prompt; None if it fails."""
        options = {"enable_thinking": self.default_enable_thinking, **options}
        try:
            return self._run(messages, None, False, **options)
        except Exception:  # a template can raise anything
            return None

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **options: Any,
    ) -> str:
        return compile_template(self.source).render(
            messages=plain(messages),
            tools=plain(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
            **plain(options),
        )

    def _accepts_effort(self, effort: str) -> bool:
        options = {"enable_thinking": self.default_enable_thinking, "reasoning_effort": effort}
        if "reasoning_effort" not in self.switches:
            return False
        if self.switches_thinking:
            options["enable_thinking"] = True
        return self._tried(_PROBE, **options) is not None

    def _read_thinking(self) -> tuple[bool, bool]:
        """The template's default, and whether it has a switch that can be turned both ways."""
        refusal: Exception | None = None
        renders: list[str | None] = []
        for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            try:
                renders.append(self._run(_PROBE, None, True, **options))
            except TemplateSyntaxError as error:
                raise CheckpointError(f"The chat template has a syntax error in line {error.lineno}.") from error
            except TooMuchError as error:
                raise CheckpointError(f"The chat template {error}, and can't be used.") from error
            except Exception as error:  # a template can raise anything
                renders.append(None)
                refusal = error
        default, on, off = renders
        if on is None and off is None:
            name = type(refusal).__name__
            raise CheckpointError(f"The chat template can't render 'Hello' ({name}).") from refusal
        if on is None or off is None:
            self.refused_thinking = on is None
            return not self.refused_thinking, False
        if on == off:  # no switch: thinking is on if the template always opens it
            return on.rstrip().endswith("<think>"), False
        return default == on, True


def _one_way(*, thinks: bool) -> Said:
    if thinks:
        return say(
            "This model always thinks: its chat template refuses to turn thinking off. Leave thinking on, and limit it "
            "by a thinking budget."
        )
    return say("This model can't think first: its chat template refuses it. Leave thinking off.")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of tokenizer_config.json, which transformers passes to every template."""
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **config}
    tokens = {}
    for name, token in named.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
