"""Log probabilities of tokens from servers, in either of OpenAI's forms."""

from __future__ import annotations

import math
import re
from typing import Any

from qwen35mm.backends.remote.faults import damaged
from qwen35mm.contract import TokenLogprob

# How the older form writes a token that is part of a character.
_BYTES = re.compile(r"bytes:((?:\\x[0-9a-fA-F]{2})+)")


def read_logprobs(told: Any) -> list[TokenLogprob]:
    """Reads a choice's `logprobs`, of chat completions or of the older completions; none from None.

    A token without one, such as a text's first, gets NaN.

    Raises:
        Fault: they have another form.
    """
    if not told:
        return []
    try:
        if isinstance(told.get("tokens"), list):
            return _older(told)
        return [_entry(each) for each in told.get("content") or ()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise damaged("logprobs of another form than OpenAI's") from None


def _entry(told: dict[str, Any]) -> TokenLogprob:
    spelt = told.get("bytes")
    token_id = told.get("id")
    return TokenLogprob(
        str(told["token"]),
        float(told["logprob"]),
        tuple(bytes(spelt) if isinstance(spelt, list) else _spelt(told["token"])),
        token_id if isinstance(token_id, int) else None,
        tuple(_entry(each) for each in told.get("top_logprobs") or ()),
    )


def _older(told: dict[str, Any]) -> list[TokenLogprob]:
    tokens, logprobs = told["tokens"], told["token_logprobs"]
    likeliest = told.get("top_logprobs") or [None] * len(tokens)
    return [
        _of_text(
            token,
            logprob,
            tuple(sorted((_of_text(*each) for each in (top or {}).items()), key=lambda each: -each.logprob)),
        )
        for token, logprob, top in zip(tokens, logprobs, likeliest, strict=True)
    ]


def _of_text(token: str, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    spelt = _spelt(token)
    text = spelt.decode("utf-8", "replace")
    return TokenLogprob(text, math.nan if logprob is None else float(logprob), tuple(spelt), top=top)


def _spelt(token: str) -> bytes:
    found = _BYTES.fullmatch(token)
    return bytes.fromhex(found[1].replace("\\x", "")) if found else token.encode("utf-8", "replace")
