"""What goes out: the fields of a request for OpenAI's chat completions, in the words of the server's program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from qwen35mm.backends.remote.media import encode_messages
from qwen35mm.backends.remote.programs import UNKNOWN, Program
from qwen35mm.contract import EncodedMedium, Message, SamplingParams
from qwen35mm.errors import RequestError
from qwen35mm_preprocess.say import say

_NEUTRAL = SamplingParams()


@dataclass(frozen=True)
class Asked:
    """How a reply is asked for; see `RemoteBackend.stream`."""

    params: SamplingParams | None = None
    enable_thinking: bool | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    continue_reply: bool = False

    def fields(self, program: Program = UNKNOWN) -> dict[str, Any]:
        """The fields of a request that decide its reply; without params everything is left to the server.

        Raises:
            RequestError: something that this server can't be asked for, in words.
        """
        sent = sampling_fields(self.params, program)
        thinks = False if self.params is not None and self.params.thinking_budget == 0 else self.enable_thinking
        if thinks is not None:
            sent["chat_template_kwargs"] = {"enable_thinking": thinks}
        if self.tools and self.tool_choice != "none":
            choice = self._choice()
            if choice and not program.chooses_tools:
                raise RequestError(
                    say("This server leaves it to the model which tools are called: leave tool_choice at auto.")
                )
            sent |= {"tools": list(self.tools), **choice}
        if self.continue_reply:
            if not program.continues:
                raise RequestError(
                    say(
                        "This server can't be asked for the rest of a reply. Ask for another answer, or use vLLM, "
                        "SGLang, llama-server, or a model in this process."
                    )
                )
            sent |= {"continue_final_message": True, "add_generation_prompt": False}
        return sent

    def _choice(self) -> dict[str, Any]:
        """What isn't as it is where nothing is said: some servers know no choice."""
        names = [tool.get("function", tool).get("name") for tool in self.tools]
        if self.tool_choice not in ("auto", "required", *names):
            raise RequestError(
                f"tool_choice must be auto, none, required or a tool's name; got {self.tool_choice[:80]!r}."
            )
        sent: dict[str, Any] = {} if self.parallel_tool_calls else {"parallel_tool_calls": False}
        if self.tool_choice == "required":
            sent["tool_choice"] = "required"
        elif self.tool_choice != "auto":
            sent["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice}}
        return sent


def sampling_fields(params: SamplingParams | None, program: Program = UNKNOWN) -> dict[str, Any]:
    """The fields that decide how tokens are chosen.

    Of the parameters outside OpenAI's API only those go out that do something, since some servers refuse their names:
    with `top_k` and `min_p` 0 and `repetition_penalty` 1, a server's own defaults for them hold.

    Raises:
        RequestError: something that this server can't be asked for, in words.
    """
    sent: dict[str, Any] = {}
    if params is None:
        return sent
    given = {each.name: getattr(params, each.name) for each in fields(params)}
    given = {name: value for name, value in given.items() if value != getattr(_NEUTRAL, name)}
    if given.get("thinking_budget") == 0:
        del given["thinking_budget"]
    if missing := sorted(given.keys() & program.unsupported):
        raise RequestError(
            say(
                "This server can't be asked for {names}. Leave {n|that setting at its default|those settings at their "
                "defaults}, or use another server.",
                names=", ".join(missing),
                n=len(missing),
            )
        )
    sent["temperature"] = 0.0 if params.greedy else params.temperature
    if params.greedy:
        given = {name: value for name, value in given.items() if name not in ("top_k", "top_p", "min_p", "seed")}
    else:
        sent["top_p"] = params.top_p
    schema, num_top = given.pop("json_schema", None), given.pop("logprobs", None)
    for name, value in given.items():
        for theirs in program.names.get(name, (name,)):
            sent[theirs] = _plain(name, value)
    if schema is not None:
        described = {"name": "reply", "schema": json.loads(schema), "strict": True}
        sent["response_format"] = {"type": "json_schema", "json_schema": described}
    if num_top is not None:
        sent |= {"logprobs": True, "top_logprobs": num_top} if num_top else {"logprobs": True}
    return sent


def request_body(model: str, messages: Sequence[Message], media: list[EncodedMedium], sent: dict[str, Any]) -> bytes:
    """The request; `media` is used up by it: what goes out is large, and is there once.

    Raises:
        MediaError, RequestError: the messages can't be sent.
    """
    values = {"model": model, "messages": encode_messages(messages, media), "stream": True, **sent}
    # A file's name in a prompt may hold halves of characters, which no server reads.
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def without(body: bytes, names: Sequence[str]) -> bytes:
    """A request without some of its fields."""
    values = json.loads(body)
    return json.dumps({name: value for name, value in values.items() if name not in names}, ensure_ascii=False).encode()


def _plain(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token_id): bias for token_id, bias in value}
    return list(value) if isinstance(value, tuple) else value
