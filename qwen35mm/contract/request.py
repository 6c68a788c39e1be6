"""One request for a reply, the same from every surface to every backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, get_args

from qwen35mm.contract.messages import Message, check_messages
from qwen35mm.contract.parts import check_json
from qwen35mm.contract.sampling import SamplingParams
from qwen35mm.errors import PromptError, RequestError

# What stays cached of a prompt: the points where a conversation continues; the same, but nothing on disk; the same,
# without the history that includes the reply; only what was requested before; nothing.
Retain = Literal["conversation", "memory", "prompt", "shared", "nothing"]

MAX_OPTION_CHARS = 10_000
"""Most characters of a request's template options, as JSON."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """What a backend's `stream` answers.

    A request without messages is a template: `replace(template, messages=...)` makes a request from it.

    Attributes:
        messages: the conversation. A medium with a plan is read by that plan, and only on a cache miss.
        params: how the reply is sampled; None takes the model's defaults.
        enable_thinking: whether the model thinks first; None takes the model's default. A `thinking_budget` of 0 turns
            thinking off.
        template_options: values of further variables that the chat template reads, such as `preserve_thinking`, as JSON
            values by name; a model's are `ModelInfo.template_options`. None leaves the template's default, and other
            names have no effect. `enable_thinking` is taken from here if the request doesn't say it, and so is a
            `reasoning_effort` of "none", which turns thinking off.
        tools: definitions in OpenAI's form.
        tool_choice: "auto" leaves calls to the model, "none" hides the tools; "required" and a tool's name constrain
            the answer to calls (needs the extra `schema`).
        parallel_tool_calls: whether a constrained answer may have several calls.
        schema: what `Result.parsed` is read with, as the caller gave it: a type, a dict or JSON text. The
            constraint itself is `params.json_schema`.
        conversation: its name; a newer turn replaces the unfinished history commit of an older one, and goes to the
            same server of several.
        retain: what stays cached, see `Retain`.
        tenant: whose request this is. Nothing after the system prompt is shared with another tenant. One person may
            have several: see `person_of`.
        timeout_s: seconds after which the request ends with a RequestTimeoutError, waiting and media included.
        continue_reply: whether the last message is the beginning of the reply; the answer is the rest of its text.
        adapter: the name of the adapter that answers, one of `ModelInfo.adapters`; None is the model itself.
        model: which of several models answers, by its `ModelInfo.name`; None is the one that is chosen by then.
        loads: whether one of several models is loaded for it if it isn't yet; else it ends with an EngineError.

    Raises:
        PromptError: `messages` holds something else than messages.
        RequestError: another value has the wrong type.
    """

    messages: Sequence[Message] = ()
    params: SamplingParams | None = None
    _: KW_ONLY
    enable_thinking: bool | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    schema: Any = None
    conversation: str | None = None
    retain: Retain = "conversation"
    tenant: str | None = None
    timeout_s: float | None = None
    continue_reply: bool = False
    adapter: str | None = None
    model: str | None = None
    loads: bool = True

    def __post_init__(self) -> None:
        check_messages(self.messages)
        object.__setattr__(self, "messages", tuple(self.messages))
        check_params(self.params)
        check_limits(self.retain, self.timeout_s, self.tenant)
        for name in ("parallel_tool_calls", "continue_reply", "loads"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        self._take_options()
        if not isinstance(self.enable_thinking, bool | None):
            raise RequestError(f"enable_thinking must be True, False or None; got {self.enable_thinking!r}.")
        if not isinstance(self.tool_choice, str):
            raise RequestError(f"tool_choice must be a string; got {self.tool_choice!r:.100}.")
        for name in ("conversation", "adapter", "model"):
            if not isinstance(getattr(self, name), str | None):
                raise RequestError(f"{name} must be a string, or None; got {getattr(self, name)!r}.")
        tools = () if self.tools is None else self.tools
        is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
        if not (is_list and all(isinstance(tool, Mapping) for tool in tools)):
            raise RequestError(f"tools must be a list of definitions in OpenAI's form; got {tools!r:.100}.")
        object.__setattr__(self, "tools", tuple(tools))

    def _take_options(self) -> None:
        given = {} if self.template_options is None else self.template_options
        if not isinstance(given, Mapping):
            raise RequestError(f"template_options must be names and JSON values; got {type(given).__name__}.")
        try:
            check_json(given, "template_options")
        except PromptError as error:
            raise RequestError(str(error)) from None
        options = {name: value for name, value in given.items() if value is not None}
        try:
            size = len(json.dumps(options, ensure_ascii=False, default=dict))
        except ValueError as error:  # a number of thousands of digits
            raise RequestError(f"template_options can't be written as JSON ({error}).") from None
        if size > MAX_OPTION_CHARS:
            raise RequestError(f"template_options have {size:,} characters; at most {MAX_OPTION_CHARS:,} are accepted.")
        thinks = options.pop("enable_thinking", None)
        if thinks is None and options.get("reasoning_effort") == "none":
            thinks = False
        object.__setattr__(self, "template_options", options)
        if self.enable_thinking is None:
            object.__setattr__(self, "enable_thinking", thinks)

    @property
    def shown_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the model sees: none if it may not call any."""
        return () if self.tool_choice == "none" else tuple(self.tools)


def person_of(tenant: str | None) -> str | None:
    """Who shares the machine's time with others: what stands before a NUL in a tenant; None if that is one person."""
    return None if tenant is None else tenant.partition("\0")[0] or None


def check_limits(retain: Retain, timeout_s: float | None, tenant: str | None) -> None:
    """Raises RequestError for an invalid limit."""
    if retain not in get_args(Retain):
        raise RequestError(f"retain must be one of {', '.join(get_args(Retain))}; got {retain!r}.")
    # NaN is not above zero either.
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and timeout_s > 0):
        raise RequestError(f"timeout_s must be a number of seconds above 0, or None; got {timeout_s!r}.")
    if not isinstance(tenant, str | None):
        raise RequestError(f"tenant must be a string, or None; got {tenant!r}.")


def check_params(params: SamplingParams | None) -> None:
    """Raises RequestError unless `params` are SamplingParams or None."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(f"params must be SamplingParams, or None; got {params!r}.")
