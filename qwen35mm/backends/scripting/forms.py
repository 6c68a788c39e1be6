"""Turns what a person may write in a script into messages and parameters; errors say what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image as PILImage

from qwen35mm.backends.scripting.functions import FunctionTool
from qwen35mm.contract import GenerationRequest, Image, Message, Retain, SamplingParams, Video
from qwen35mm.contract.messages import Content, check_conversation
from qwen35mm.contract.parts import Tensor
from qwen35mm.contract.sampling import SamplingOptions
from qwen35mm.errors import ConfigError, PromptError

# One prompt: a question, a message, or a conversation.
Prompt = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]
Picture = str | Path | bytes | BinaryIO | PILImage.Image | np.ndarray | Tensor | Image
Clip = str | Path | bytes | BinaryIO | Video
Params = SamplingParams | Mapping[str, Any]
Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]

_STREAM_OPTIONS = (
    *("thinking", "template_options", "tools", "tool_choice", "parallel_tool_calls"),
    *("timeout_s", "retain", "tenant", "adapter"),
)


# Hints for options that belong elsewhere, by the name in the singular.
_MEANT = {
    "image": "a chat's question takes images=[...]; prompts hold theirs: Message('user', [Image('a.jpg'), 'What?']).",
    "video": "a chat's question takes videos=[...]; prompts hold theirs: Message('user', [Video('a.mp4'), 'What?']).",
    "system": "it is said once, as model.chat('You are brief.'), or is a prompt's first message.",
}


class AskOptions(SamplingOptions, total=False):
    """Options of a question: see `Chat.ask`."""

    schema: Any
    thinking: bool | None
    template_options: Mapping[str, Any] | None
    tools: Tools | None
    tool_choice: str | None
    parallel_tool_calls: bool | None
    timeout_s: float | None
    adapter: str | None


class GenerateOptions(AskOptions, total=False):
    """Options of prompts: see `ScriptedModel.generate`."""

    retain: Retain
    tenant: str | None


def request_of(base: GenerationRequest, params: Params | None, options: Mapping[str, Any]) -> GenerationRequest:
    """A request with a script's options.

    Args:
        base: the defaults. Its params are None if only a server knows them.
        params: all parameters, or some of them by name.
        options: an AskOptions or a GenerateOptions; None values count as left out.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
        PromptError: invalid tools.
        RequestError: see `GenerationRequest`.
    """
    if not isinstance(params, SamplingParams | Mapping | None):
        raise ConfigError(f"params must be SamplingParams, or a dict of their names and values; got {params!r}.")
    given = named_options(params, options)
    how = {name: given.pop(name) for name in _STREAM_OPTIONS if name in given}
    if "schema" in given:
        given["json_schema"] = given.pop("schema")
    checked_names(given, [each.name for each in fields(SamplingParams)], "schema", *_STREAM_OPTIONS)
    if "thinking" in how:
        how["enable_thinking"] = checked_bool("thinking", how.pop("thinking"))
    if "tools" in how:
        how["tools"] = tools_of(how["tools"])
    own, schema = (params, None) if isinstance(params, SamplingParams) else (base.params, base.schema)
    if given:
        own = (own or SamplingParams()).with_overrides(**given)
    schema = given.get("json_schema", schema)
    if schema is None and own is not None:
        schema = own.json_schema
    return replace(base, params=own, schema=schema, **how)


def named_options(params: Params | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for by name; an option goes before one of the same name in `params`."""
    sources = (params if isinstance(params, Mapping) else {}, options)
    return {name: value for source in sources for name, value in source.items() if value is not None}


def conversation_of(prompt: Prompt) -> list[Message]:
    """The messages of one prompt.

    Raises:
        PromptError: it isn't a prompt.
    """
    if isinstance(prompt, str):
        messages = [Message("user", prompt)]
    elif isinstance(prompt, list | tuple):
        messages = [_message(each) for each in prompt]
    else:
        messages = [_message(prompt)]
    check_conversation(messages)
    return messages


def prompts_of(prompts: Any) -> tuple[Iterable[Any], bool]:
    """The prompts, and whether it was a single one: a question, a message, or a list of messages.

    Raises:
        PromptError: neither one nor many prompts.
    """
    if isinstance(prompts, str | Message | Mapping):
        return [prompts], True
    if isinstance(prompts, bytes | np.ndarray | PILImage.Image | Path) or not isinstance(prompts, Iterable):
        raise PromptError(f"Prompts must be a string, a conversation, or a list of them; got {type(prompts).__name__}.")
    if isinstance(prompts, list | tuple) and any(isinstance(each, Message | Mapping) for each in prompts):
        if not all(isinstance(each, Message | Mapping) for each in prompts):
            raise PromptError(
                "A list must hold one conversation's messages, or prompts: strings and lists of messages. Got both."
            )
        return [prompts], True
    # Each prompt is checked when its turn comes.
    return prompts, False


def question_of(
    text: Content, images: Picture | Sequence[Picture] = (), videos: Clip | Sequence[Clip] = ()
) -> Message | None:
    """A user's message: its media, then its text; None without both.

    Raises:
        PromptError: a part that no message can have.
    """
    if isinstance(text, Message):
        raise PromptError("A Message can't be the text of another one: pass its text and its media.")
    media = [each if isinstance(each, Image) else Image(each) for each in _many(images)]
    clips = [each if isinstance(each, Video) else Video(each) for each in _many(videos)]
    parts = (*media, *clips, *Message("user", text).content)
    return Message("user", parts) if parts else None


def tools_of(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tools as definitions in OpenAI's form; functions become `FunctionTool`s.

    Raises:
        PromptError: one has another form, or is a function that can't be a tool.
        MissingExtraError: a function, without pydantic.
    """
    if not isinstance(tools, list | tuple):
        raise PromptError(f"tools must be a list of functions or definitions; got {type(tools).__name__}.")
    found: list[Any] = [
        FunctionTool.of(tool) if callable(tool) and not isinstance(tool, type) else tool for tool in tools
    ]
    for tool in found:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise PromptError(
                f"A tool must be a function, or a definition in OpenAI's form, {form}; got {tool!r:.100}."
            )
    if len({tool["function"]["name"] for tool in found}) < len(found):
        raise PromptError("Two tools have the same name.")
    return tuple(tool if isinstance(tool, FunctionTool) else dict(tool) for tool in found)


def _message(given: Any) -> Message:
    if isinstance(given, Message):
        return given
    if isinstance(given, Mapping):
        return Message.from_dict(given)
    raise PromptError(
        f"A prompt must be a string, a Message, a dict with role and content, or a list of messages; got one with "
        f"{type(given).__name__} in it."
    )


def _many(given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    return given if isinstance(given, list | tuple) else (given,)


def checked_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, or None for the model's own way; got {value!r}.")
    return value


def checked_names(options: Iterable[str], known: Sequence[str], *elsewhere: str) -> None:
    """Raises ConfigError for an unknown option, with a guess at the intended one.

    Args:
        elsewhere: further known names, already taken out of the options.
    """
    for name in options:
        if name not in known:
            names = [*known, *elsewhere]
            close = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}."
            raise ConfigError(f"Unknown option {name!r}: {_MEANT.get(name.removesuffix('s'), meant)}")
