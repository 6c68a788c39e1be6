"""Token counts of a conversation's texts: the server's, or an estimate."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from qwen35mm.backends.remote.programs import Counting, is_count
from qwen35mm.contract import Message

logger = logging.getLogger(__name__)

# A person waits for it while typing.
_TIMEOUT_S = 2.0
# Seconds before asking again a server that failed to count.
_PAUSE_S = 30.0
# Typical of most tokenizers and templates.
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 5


class TokenCounter:
    """Counts the texts of conversations. Thread-safe.

    Args:
        client: sends requests to the server's root, with credentials.
        model: its name there.
        counting: how to ask; None if the server can't count.
    """

    def __init__(self, client: httpx.Client, model: str, counting: Counting | None) -> None:
        self._client = client
        self._model = model
        self._counting = counting
        self._not_before_s = 0.0
        # A page counts the same prefixes again and again.
        self._counted = functools.lru_cache(maxsize=512)(self._ask)

    def count(
        self, messages: Sequence[Message], enable_thinking: bool | None, template_options: Mapping[str, Any]
    ) -> int:
        """Tokens of these messages as a prompt, without their media."""
        if self._counting is not None and time.monotonic() >= self._not_before_s:
            values = [{"role": message.role, "content": message.text} for message in messages]
            try:
                return self._counted(json.dumps(values), enable_thinking, json.dumps(template_options))
            except (httpx.HTTPError, ValueError, RecursionError, KeyError, TypeError, RuntimeError) as error:
                self._not_before_s = time.monotonic() + _PAUSE_S
                logger.info("the server didn't count tokens, so they are estimated: %s", type(error).__name__)
        return sum(estimate(message.text) + _TOKENS_PER_MESSAGE for message in messages)

    def close(self) -> None:
        """Closes the connection; later counts are estimates."""
        self._client.close()

    def _ask(self, texts: str, enable_thinking: bool | None, options: str) -> int:
        messages: list[dict[str, str]] = json.loads(texts)
        chosen = {**json.loads(options), **({} if enable_thinking is None else {"enable_thinking": enable_thinking})}
        template = {"chat_template_kwargs": chosen} if chosen else {}
        if self._counting == "vllm":
            body = {"model": self._model, "messages": messages, "add_generation_prompt": True, **template}
            return _count(self._post("/tokenize", body)["count"])
        if self._counting == "llamacpp":
            prompt = self._post("/apply-template", {"messages": messages, **template})["prompt"]
            tokens = self._post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
            return _count(len(tokens))
        systems = [message["content"] for message in messages if message["role"] == "system"]
        # Anthropic's form has two roles.
        turns = [{**message, "role": "user"} if message["role"] == "tool" else message for message in messages]
        body = {
            "model": self._model,
            "messages": [message for message in turns if message["role"] != "system"],
            **({"system": "\n".join(systems)} if systems else {}),
            **({} if enable_thinking is None else {"thinking": {"type": "enabled" if enable_thinking else "disabled"}}),
        }
        return _count(self._post("/v1/messages/count_tokens", body)["input_tokens"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(path, json=body, timeout=_TIMEOUT_S).raise_for_status().json()


def estimate(text: str) -> int:
    """The estimated number of tokens of a text."""
    return len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN


def _count(value: object) -> int:
    if not is_count(value):
        raise ValueError("no number of tokens")
    return value
