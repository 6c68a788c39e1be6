"""The fields of a request for OpenAI's chat completions, in the names of the server's program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from qwen35mm.backends.remote.media import encode_messages
from qwen35mm.backends.remote.programs import UNKNOWN, Program
from qwen35mm.contract import EncodedMedium, GenerationRequest, Message, SamplingParams
from qwen35mm.contract.sampling import NUMBERS, changed
from qwen35mm.errors import RequestError
from qwen35mm_preprocess.say import say

_FOR_DRAWS = frozenset(name for name, number in NUMBERS.items() if number.is_for_draws)


def reply_fields(request: GenerationRequest, program: Program = UNKNOWN) -> dict[str, Any]:
    """The fields that decide the reply. Without params the server's defaults apply.

    Raises:
        RequestError: this server lacks something that the request needs.
    """
    params = request.params
    sent = sampling_fields(params, program)
    thinks = False if params is not None and params.thinking_budget == 0 else request.enable_thinking
    template = {**request.template_options, **({} if thinks is None else {"enable_thinking": thinks})}
    if template:
        sent["chat_template_kwargs"] = template
    if request.shown_tools:
        choice = _choice(request)
        if choice and not program.chooses_tools:
            raise RequestError(say("On this server the model decides which tools to call: leave tool_choice at auto."))
        sent |= {"tools": list(request.shown_tools), **choice}
    if request.continue_reply:
        if not program.continues:
            raise RequestError(
                say(
                    "This server can't be asked for the rest of a reply. Ask for another answer, or use vLLM, "
                    "SGLang, llama-server, or a model in this process."
                )
            )
        sent |= {"continue_final_message": True, "add_generation_prompt": False}
    return sent


def _choice(request: GenerationRequest) -> dict[str, Any]:
    """The fields that differ from the default, since some servers know none."""
    choice = request.tool_choice
    names = [tool.get("function", tool).get("name") for tool in request.tools]
    if choice not in ("auto", "required", *names):
        raise RequestError(f"tool_choice must be auto, none, required or a tool's name; got {choice[:80]!r}.")
    sent: dict[str, Any] = {} if request.parallel_tool_calls else {"parallel_tool_calls": False}
    if choice == "required":
        sent["tool_choice"] = "required"
    elif choice != "auto":
        sent["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return sent


def sampling_fields(params: SamplingParams | None, program: Program = UNKNOWN) -> dict[str, Any]:
    """The fields that decide how tokens are chosen.

    Parameters outside OpenAI's API are sent only if they do something, since some servers refuse their names. So with
    `top_k` and `min_p` 0 and `repetition_penalty` 1, a server's own defaults apply.

    Raises:
        RequestError: this server lacks a parameter that is set.
    """
    sent: dict[str, Any] = {}
    if params is None:
        return sent
    given = changed(params)
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
        given = {name: value for name, value in given.items() if name not in _FOR_DRAWS}
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
    """The request as JSON. Empties `media`, so that the large data isn't in memory twice.

    Raises:
        MediaError, RequestError: the messages can't be sent.
    """
    values = {"model": model, "messages": encode_messages(messages, media), "stream": True, **sent}
    # A file's name in a prompt may contain halves of characters, which no server reads.
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def without(body: bytes, names: Sequence[str]) -> bytes:
    """The request without some of its fields."""
    values = json.loads(body)
    return json.dumps({name: value for name, value in values.items() if name not in names}, ensure_ascii=False).encode()


def _plain(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token_id): bias for token_id, bias in value}
    return list(value) if isinstance(value, tuple) else value
