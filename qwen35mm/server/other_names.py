"""Fields of other servers and client libraries that mean here what another field says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen35mm.contract.sampling import NUMBERS
from qwen35mm.prompt.template import EFFORTS
from qwen35mm.server.notes import UNSUPPORTED, Notes

# llama.cpp's, Ollama's, transformers', vLLM's and SGLang's.
NAMES = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "thinking_budget_tokens": "thinking_budget",
    "thinking_token_budget": "thinking_budget",
    "reasoning_budget": "thinking_budget",
}
# Ways to ask for thinking.
THINKING = ("enable_thinking", "think", "thinking", "reasoning")
# Words for them, as for `think`.
_SWITCHES = {"true": True, "on": True, "false": False, "off": False}
_EFFORTS = ("none", *EFFORTS)
_NUMBERS = (*NUMBERS, "max_completion_tokens", "max_output_tokens", "n", "top_logprobs")
# Fields whose values up to 0, or below it, are other servers' way to say nothing.
_ABOVE_ZERO = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_FROM_ZERO = ("seed", "thinking_budget")
_MOST_SEEDS = 2**63
# OpenAI's and Anthropic's 0: the likeliest token alone, as with any share so small.
_LEAST_TOP_P = 1e-6


def in_our_names(body: dict[str, Any], *, can_write_nothing: bool = False) -> dict[str, Any]:
    """A body with the fields that this server knows for those of other servers, and numbers in the right types.

    Args:
        can_write_nothing: whether a limit of 0 tokens means that; else it means no limit, as -1 does.
    """
    body = {NAMES.get(name, name): value for name, value in body.items() if NAMES.get(name) not in body}
    for name in _NUMBERS:
        if name in body:
            body[name] = _number(body[name], name in NUMBERS and not NUMBERS[name].is_whole)
    for names, least in ((() if can_write_nothing else _ABOVE_ZERO, 1), (_FROM_ZERO, 0)):
        for name in names:
            if _is_whole(body.get(name)) and body[name] < least:
                del body[name]
    if isinstance(top_p := body.get("top_p"), int | float) and top_p == 0 and not isinstance(top_p, bool):
        body["top_p"] = _LEAST_TOP_P
    if _is_whole(body.get("seed")):
        body["seed"] %= _MOST_SEEDS
    if isinstance(stop := body.get("stop"), str | list):
        body["stop"] = [each for each in ([stop] if isinstance(stop, str) else stop) if each not in ("", None)]
    if isinstance(bias := body.get("logit_bias"), list):
        body["logit_bias"] = _biases(bias)
    return body


def thinking_in_our_names(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Reads the ways to ask for thinking: `thinking`, `enable_thinking`, `think` and OpenRouter's `reasoning`.

    What a body says in our own fields wins.
    """
    said: dict[str, Any] = {}
    for name in THINKING:
        value = as_switch(body.pop(name, None))
        if isinstance(value, bool):
            said["enable_thinking"] = value
        elif isinstance(value, str) and value in _EFFORTS:
            said["reasoning_effort"] = value
        elif isinstance(value, Mapping):
            said |= _thinking(value, name, notes)
        elif value is not None:
            notes.ignore(name, UNSUPPORTED)
    if (on := said.pop("enable_thinking", None)) is not None:
        options = body.get("chat_template_kwargs")
        if options is None or isinstance(options, dict):
            body["chat_template_kwargs"] = {"enable_thinking": on, **(options or {})}
    return in_our_names({**said, **body})


def as_switch(value: Any) -> Any:
    """True or False for a text that says so; any other value as it is."""
    return _SWITCHES.get(value.strip().lower(), value) if isinstance(value, str) else value


def _thinking(value: Mapping[str, Any], place: str, notes: Notes) -> dict[str, Any]:
    """Anthropic's form `{"type", "budget_tokens"}`, and OpenRouter's `{"enabled", "effort", "max_tokens"}`."""
    said: dict[str, Any] = {}
    known = {"type", "enabled", "effort", "budget_tokens", "max_tokens", "exclude", "summary", "display"}
    notes.ignore_rest(value, known, place)
    if value.get("type") in ("enabled", "disabled", "adaptive"):
        said["enable_thinking"] = value["type"] != "disabled"
    if isinstance(enabled := as_switch(value.get("enabled")), bool):
        said["enable_thinking"] = enabled
    if value.get("effort") is not None:
        said["reasoning_effort"] = value["effort"]
    if budget := value.get("budget_tokens") or value.get("max_tokens"):
        said["thinking_budget"] = budget
    if value.get("exclude"):
        notes.ignore(f"{place}.exclude", UNSUPPORTED)
    return said


def _number(value: Any, may_be_fraction: bool) -> Any:
    """A number that was sent as text, or a whole one that was sent as 5.0; else the value as it is."""
    if isinstance(value, str):
        try:
            value = float(value) if may_be_fraction else int(value)
        except ValueError:
            return value
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and not may_be_fraction else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _biases(listed: list[Any]) -> Any:
    """llama.cpp's form: pairs of id and bias."""
    are_pairs = all(isinstance(pair, list) and len(pair) == 2 and _is_whole(pair[0]) for pair in listed)
    return {str(token_id): bias for token_id, bias in listed} if are_pairs else listed
