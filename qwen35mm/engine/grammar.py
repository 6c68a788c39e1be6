"""Answers that follow a JSON schema, or make calls (`call_grammar`): which tokens may come next, by llguidance's parser
(the extra `schema`).

An answer is JSON on one line as `json.dumps` writes it: the only white space is behind `,` and `:`, so that no model
can go on with white space for ever. Properties come in the schema's order. Characters stand for themselves: `\\u` isn't
written, since a half surrogate is no text, and since it spells a property's name in another way than the one that the
schema binds. A keyword that can't be enforced is refused, not ignored.

The library jsonschema, which checks captions once more, is stricter in three places: `multipleOf` with decimals (it
divides floats), `\\W` (Python's takes no letter of any script), and `minProperties` where a free key was written twice.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import torch

from qwen35mm.errors import EngineError, MissingExtraError, RequestError
from qwen35mm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 16

# What a JSON string can hold only as `\\u`, which isn't written here.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
# Their keys are names, not keywords.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# `overrides`, so that a schema can't change them by its own "x-guidance".
_OPTIONS: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}


@functools.lru_cache(maxsize=MAX_COMPILED)
def check_json_schema(text: str, *, lenient: bool = False) -> None:
    """Checks that answers can be held to a JSON schema; no model is needed for that.

    Args:
        lenient: whether what can't be enforced is left out.

    Raises:
        RequestError: a keyword that can't be enforced, a reference to another file, or a schema that nothing fits.
        MissingExtraError: llguidance isn't installed.
    """
    llguidance = _llguidance()
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(_of_schema(text, lenient=lenient))
    if is_error:
        raise _refusal(messages[0])
    schema = json.loads(text)
    try:
        _check_values(schema)
        if not _any_reply_ends(schema):
            raise _refusal("each value that it asks for holds another one, without an end")
    except RecursionError:
        raise _refusal("it is nested too deeply") from None


def embedded(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A JSON schema as a part of a Lark grammar, written as answers are."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**_OPTIONS, 'lenient': lenient}})}"


class Grammars:
    """The compiled schemas of one vocabulary; the newest are kept.

    Args:
        tokenizer: the checkpoint's.
        eos_ids: ids that end a reply.
        vocab_size: number of logits.
    """

    def __init__(self, tokenizer: Tokenizer, *, eos_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._not_the_end = torch.ones(vocab_size, dtype=torch.bool)
        self._not_the_end[self._eos_ids] = False
        self._compiled = functools.lru_cache(maxsize=MAX_COMPILED)(self._compile)

    def matcher(self, json_schema: str, so_far: str = "") -> Matcher:
        """Follows one reply.

        Args:
            json_schema: JSON text.
            so_far: the answer's beginning, where a reply is continued.

        Raises:
            RequestError: what `check_json_schema` raises, or `so_far` doesn't fit the schema.
            MissingExtraError: llguidance isn't installed.
        """
        state = self._compiled(json_schema, False).deep_copy()
        if so_far and not state.consume_tokens(self._tokenizer.encode_plain(so_far)):
            raise RequestError(
                "The reply that is to be continued doesn't fit the JSON schema. Ask again without continuing it, or "
                "continue it without a schema."
            )
        return Matcher(state, self._not_the_end)

    def matcher_of_calls(self, lark: str, so_far: str = "") -> Matcher:
        """Follows one reply that calls tools.

        Args:
            lark: what `grammar_of_calls` gives.
            so_far: the answer's beginning, where a reply is continued.

        Raises:
            RequestError: the tools are beyond what can be followed, or `so_far` doesn't fit.
            MissingExtraError: llguidance isn't installed.
        """
        state = self._compiled(lark, True).deep_copy()
        if so_far and not state.consume_tokens(self._tokenizer.encode_plain(so_far)):
            raise RequestError(
                "The reply that is to be continued doesn't fit the calls that it has to make. Ask again without "
                "continuing it, or leave the choice of tools open."
            )
        return Matcher(state, self._not_the_end)

    def _compile(self, text: str, is_lark: bool) -> LLMatcher:
        llguidance = _llguidance()
        if is_lark:
            grammar = llguidance.LLMatcher.grammar_from_lark(text)
        else:
            check_json_schema(text)
            grammar = _of_schema(text)
        compiled = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if not compiled.is_error():
            return compiled
        if is_lark:
            reason = _first_line(compiled.get_error())
            raise RequestError(f"Replies can't be held to these tools: {reason}. Take fewer, or simpler ones.")
        raise _refusal(compiled.get_error())

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Every id with its bytes; no control token is part of an answer, and those that end a reply end it."""
        llguidance = _llguidance()
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos_ids[0]))
        return llguidance.LLTokenizer(wrapped, eos_token=self._eos_ids, slices=llguidance.LLTokenizer.json_slices())


class Matcher:
    """How far one reply's answer has come.

    Attributes:
        while_thinking: bool `[vocab_size]`, what may be chosen before the answer: all but the reply's end, because a
            reply without an answer fits no schema.
    """

    def __init__(self, state: LLMatcher, while_thinking: torch.Tensor) -> None:
        self._state = state
        self.while_thinking = while_thinking

    def allowed(self) -> torch.Tensor:
        """bool `[vocab_size]`: what may come next in the answer; the reply's end alone where nothing else can.

        Raises:
            EngineError: the schema is beyond what can be followed.
        """
        packed = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        if self._state.is_error():
            raise EngineError(f"The JSON schema can't be followed here ({_first_line(self._state.get_error())}).")
        # Rows of the embedding that stand for no token come out as False.
        bits = np.unpackbits(packed, count=len(self.while_thinking), bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def accept(self, token_id: int) -> None:
        """Goes on by a token that was allowed."""
        accepted = self._state.consume_token(token_id)
        assert accepted, "a token that the mask forbids was chosen"


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids.values())

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain(text)


def _of_schema(json_schema: str, *, lenient: bool = False) -> str:
    try:
        return _llguidance().LLMatcher.grammar_from_json_schema(json_schema, None, {**_OPTIONS, "lenient": lenient})
    except ValueError as error:
        raise _refusal(str(error)) from error


def _check_values(schema: Any) -> None:
    """Refuses values that llguidance would write without their control characters."""
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in ("const", "enum"):
            found = _UNWRITABLE.search("".join(_strings(value)))
            if found:
                raise _refusal(f"a value of {keyword} holds the control character U+{ord(found[0]):04X}")
        elif keyword in _BY_NAME and isinstance(value, dict):
            for each in value.values():
                _check_values(each)
        else:
            for each in value if isinstance(value, list) else [value]:
                _check_values(each)


def _strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value:
            yield from _strings(each)
            if isinstance(value, dict):
                yield from _strings(value[each])


def _any_reply_ends(schema: dict[str, Any]) -> bool:
    """Whether a value that follows the schema can be finite: `{"$ref": "#"}` asks for itself for ever."""
    targets = {reference: _target(schema, reference) for reference in _references(schema)}
    finite: set[str] = set()
    while found := {name for name in targets.keys() - finite if _ends(targets[name], finite)}:
        finite |= found
    return _ends(schema, finite)


def _ends(schema: Any, finite: Collection[str]) -> bool:
    """Whether a value that follows a schema can be finite, where those of the `finite` references can."""
    if not isinstance(schema, dict):
        return schema is not False
    needed = [*schema.get("allOf", ())]
    if schema.get("type") == "object":
        needed += [schema.get("properties", {}).get(name, True) for name in schema.get("required", ())]
    if schema.get("type") == "array":
        num_items, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed += first[:num_items]
        needed += [schema.get("items", True)] if num_items > len(first) else []
    choices = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    return (
        schema.get("$ref") in (None, *finite)
        and all(_ends(each, finite) for each in needed)
        and all(any(_ends(each, finite) for each in some) for some in choices)
    )


def _references(value: Any) -> Iterator[str]:
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _references(each)
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        yield value["$ref"]


def _target(schema: dict[str, Any], reference: str) -> Any:
    """What a reference in the schema names; True, which anything follows, where it can't be found from here."""
    found: Any = schema
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return found


def _refusal(message: str) -> RequestError:
    return RequestError(
        f"Replies can't be held to this JSON schema: {_first_line(message)}. Change the schema, or leave that part out."
    )


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0].rstrip(".: ")[:200]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("A reply that follows a JSON schema", "schema") from error
    return llguidance
