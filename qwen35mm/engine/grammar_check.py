"""The script of a child process that checks grammars: a schema that takes too much time or memory, or that crashes the
parser, ends only this process.

It imports nothing of qwen35mm. Standard input is JSON: the folder of llguidance, the grammars, and the limits of time
and memory. Standard output is JSON: {}, or {"at": index of the refused grammar, "error": reason}.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Processor time: the start takes 0.1 s, the largest ordinary schemas 0.5 s.
CPU_S = 3
# The start takes 20 MiB.
MEMORY_BYTES = 128 << 20
# Nested references take 5 KiB each.
STACK_BYTES = 8 << 20
# Steps of a trial reply. A grammar with too many choices mostly has them at its beginning.
_NUM_STEPS = 64

# A schema enforced in full, a schema enforced as far as possible, or llguidance's dialect of Lark: a grammar of calls,
# or a client's.
Kind = Literal["strict", "lenient", "lark", "grammar"]

# Characters that a JSON string can hold only as `\\u`, which grammars here don't allow.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# A pattern's character outside classes: an escape with its digits, another escape, a class (left out), or itself.
_OF_PATTERN = re.compile(r"\\(?:x|u00)([0-9A-Fa-f]{2})|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([\s\S])", re.DOTALL)
# Keywords whose values' keys are names, not keywords.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# The child's vocabulary: all bytes, one control token and an end.
_CONTROL_ID, _END_ID = 256, 257
_CONTROL_TOKEN = re.compile(r"<\[\d+\]>")
# Lark's texts, regular expressions and comments, where `<` has no meaning of its own.
_LITERAL = re.compile(r"""//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/""")

# `overrides`, so that a schema can't change them with its own "x-guidance".
_OPTIONS: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}


class RefusalError(Exception):
    """A grammar can't constrain replies; the argument is the reason."""


def options(*, lenient: bool) -> Any:
    """llguidance's options for a JSON schema.

    Args:
        lenient: whether to ignore keywords that can't be enforced.
    """
    return {**_OPTIONS, "lenient": lenient}


def limits() -> Any:
    """llguidance's own limits, without its work on the whole vocabulary, whose time no limit counts."""
    from llguidance import LLParserLimits

    return LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)


def grammar_of(kind: Kind, text: str) -> str:
    """A schema or Lark text as llguidance's grammar.

    Raises:
        RefusalError: llguidance can't read the schema.
    """
    from llguidance import LLMatcher

    if kind in ("lark", "grammar"):
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, None, options(lenient=kind == "lenient"))
    except ValueError as error:
        raise RefusalError(str(error)) from error


def main() -> None:
    work = json.load(sys.stdin)
    # So that a library's output doesn't mix with the answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.append(work["packages"])
    import llguidance  # noqa: F401 - before the limits

    _limit_process(work["cpu_s"], work["memory_bytes"])
    threading.stack_size(STACK_BYTES)
    found: dict[str, Any] = {"at": 0, "error": "it can't be read"}
    thread = threading.Thread(target=lambda: found.update(_first_refused(work["grammars"])))
    thread.start()
    thread.join()
    json.dump({} if found["error"] is None else found, out)
    out.flush()
    os._exit(0)


def _limit_process(cpu_s: int, memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent's clock is the only limit.
        return
    for kind, limit in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _first_refused(grammars: Sequence[tuple[Kind, str]]) -> dict[str, Any]:
    """The first refused grammar and the reason. Tries a reply of the last one, which contains the others."""
    for at, (kind, text) in enumerate(grammars):
        try:
            check(kind, text, follows=at == len(grammars) - 1)
        except RefusalError as error:
            return {"at": at, "error": str(error)}
        except RecursionError:
            return {"at": at, "error": "it is nested too deeply"}
    return {"error": None}


def check(kind: Kind, text: str, *, follows: bool) -> None:
    """Checks one grammar in this process.

    Args:
        follows: whether to try a reply, too.

    Raises:
        RefusalError: it can't constrain replies; has the reason.
    """
    from llguidance import LLMatcher

    if kind == "grammar" and "<" in _LITERAL.sub(" ", text):
        raise RefusalError("it names tokens (<...>), and an answer is text")
    grammar = grammar_of(kind, _CONTROL_TOKEN.sub(f"<[{_CONTROL_ID}]>", text) if kind == "lark" else text)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if is_error:
        raise RefusalError(messages[0])
    if kind in ("strict", "lenient"):
        schema = json.loads(text)
        _check_values(schema)
        if not any_reply_ends(schema):
            raise RefusalError("each value contains another one, without end")
    if follows:
        _follow(_compiled(grammar))


class _Bytes:
    """A byte tokenizer in the form that llguidance asks for."""

    eos_token_id = _END_ID
    bos_token_id = None
    special_token_ids = (_CONTROL_ID, _END_ID)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<control>", b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _compiled(grammar: str) -> LLMatcher:
    """Compiles with a vocabulary of bytes: the vocabulary hardly changes the cost."""
    import llguidance

    wrapped = llguidance.TokenizerWrapper(_Bytes())
    vocabulary = llguidance.LLTokenizer(wrapped, eos_token=[_END_ID], slices=llguidance.LLTokenizer.json_slices())
    return llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits())


def _follow(matcher: LLMatcher) -> None:
    """Tries the first steps of a reply."""
    if matcher.is_error():
        raise RefusalError(matcher.get_error())
    choose = random.Random(0).choice
    for _ in range(_NUM_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(_END_ID) if mask >> token_id & 1]
        if not allowed or not matcher.consume_token(choose(allowed)):
            break
    if matcher.is_error():
        reason = matcher.get_error().splitlines()[0].split(";")[0]
        raise RefusalError(f"too many properties or choices may come next at one place ({reason[:80]})")


def _check_values(schema: Any) -> None:
    """Refuses values and patterns that llguidance would write without their control characters."""
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in ("const", "enum"):
            found = _UNWRITABLE.search("".join(_strings(value)))
            if found:
                raise RefusalError(f"a value of {keyword} holds the control character U+{ord(found[0]):04X}")
        elif keyword == "pattern" and isinstance(value, str):
            for digits, plain in _OF_PATTERN.findall(value):
                character = chr(int(digits, 16)) if digits else plain
                if _UNWRITABLE.match(character):
                    raise RefusalError(f"a pattern asks for the control character U+{ord(character):04X}")
        elif keyword in _BY_NAME and isinstance(value, dict):
            for each in value.values():
                _check_values(each)
        else:
            for each in value if isinstance(value, list) else [value]:
                _check_values(each)


def _strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value, including names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value:
            yield from _strings(each)
            if isinstance(value, dict):
                yield from _strings(value[each])


def any_reply_ends(schema: Any) -> bool:
    """Whether a value that follows the schema can be finite; one of `{"$ref": "#"}` contains itself without end."""
    # By a schema's identity: how many of its needs aren't met, and the needs that it meets once it is finite. A need
    # contains its owner's identity until it is met.
    unmet: dict[int, int] = {}
    meets: defaultdict[int, list[list[int]]] = defaultdict(list)
    finite: list[int] = []
    seen = [schema]
    while seen:
        each = seen.pop()
        if id(each) in unmet:
            continue
        needs = _needs(each, schema)
        unmet[id(each)] = len(needs)
        if not needs:
            finite.append(id(each))
        for choices in needs:
            need = [id(each)]
            for choice in choices:
                meets[id(choice)].append(need)
            seen += choices
    while finite:
        for need in meets[finite.pop()]:
            if need:
                owner = need.pop()
                unmet[owner] -= 1
                if not unmet[owner]:
                    finite.append(owner)
    return not unmet[id(schema)]


def _needs(schema: Any, root: Any) -> list[list[Any]]:
    """What must be finite for a schema's value to be finite: one schema of each list."""
    if not isinstance(schema, dict):
        return [[]] if schema is False else []
    needed = [*schema.get("allOf", ())]
    if schema.get("type") == "object":
        needed += [schema.get("properties", {}).get(name, True) for name in schema.get("required", ())]
    if schema.get("type") == "array":
        num_items, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed += first[: int(num_items)]
        needed += [schema.get("items", True)] if num_items > len(first) else []
    if isinstance(reference := schema.get("$ref"), str):
        needed.append(_target(root, reference))
    return [[each] for each in needed] + [schema[name] for name in ("anyOf", "oneOf") if name in schema]


def _target(schema: Any, reference: str) -> Any:
    """The target of a reference in the schema; True, which allows anything, if it isn't found."""
    found = schema
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return found


if __name__ == "__main__":
    main()
