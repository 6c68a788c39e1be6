"""Grammars of JSON schemas: random models write by them, jsonschema judges them."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

from qwen35mm.contract import SamplingParams
from qwen35mm.engine import check_grammar, check_json_schema, grammar
from qwen35mm.engine.grammar import MAX_COMPILED, Grammars, Matcher
from qwen35mm.errors import MissingExtraError, RequestError
from qwen35mm.model import LoadedModel
from tests.engine.exact import Chat, serve, user, words
from tests.engine.schemas import CAPTION, HOSTILE, SCHEMAS, SHORT, check, engine_of, params, record

pytestmark = pytest.mark.usefixtures("checked_here")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_reply_that_stops_satisfies_its_schema(name: str, loaded: LoadedModel, chat: Chat) -> None:
    schema = SCHEMAS[name]
    requests = [
        chat.request([user(words(seed, name))], params=params(schema, seed=seed, temperature=temperature))
        for seed, temperature in enumerate((0.0, 1.5, 3.0))
    ]
    stopped = [check(answer.result, schema) for answer in serve(engine_of(loaded), *requests)]
    assert sum(stopped) >= 2


def test_text_is_one_line_as_json_writes_it(loaded: LoadedModel, chat: Chat) -> None:
    engine = engine_of(loaded)
    requests = [chat.request([user("hi")], params=params(CAPTION, seed=seed)) for seed in range(8)]
    texts = [answer.result.text for answer in serve(engine, *requests) if answer.result.finish_reason == "stop"]
    assert len(set(texts)) >= 4
    for text in texts:
        assert text == json.dumps(json.loads(text), ensure_ascii=False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "a condition": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "a schema that asks for leniency": ({"x-guidance": {"lenient": True}, "not": {"type": "string"}}, "not"),
    "a remote reference": ({"$ref": "https://example.com/schema.json"}, r"example\.com"),
    "a missing reference": ({"$ref": "#/$defs/name"}, "name"),
    "overlapping choices": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    "nothing fits": ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    "a type": ({"type": "text"}, "text"),
    "a pattern": ({"type": "string", "pattern": "[a"}, "regex"),
    "a control character": ({"const": {"a": ["b\x00"]}}, r"const .*U\+0000"),
    "a choice with one": ({"items": {"anyOf": [{"type": "null"}, {"enum": ["b", "\x1bc"]}]}}, r"enum .*U\+001B"),
    "a deletion": ({"enum": ["a\x7fb", "c"]}, r"enum .*U\+007F"),
    "a pattern with one": ({"items": {"pattern": "^a\x7fb$"}}, r"pattern .*U\+007F"),
    "a pattern that escapes one": ({"pattern": r"^[\]x]a\u0001b$"}, r"pattern .*U\+0001"),
    "itself": ({"$ref": "#"}, "without end"),
    "two that ask for each other": (
        {
            "$defs": {
                "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}]}, "minItems": 1},
            },
            "$ref": "#/$defs/b",
        },
        "without end",
    ),
}
# What looks like them, and can be followed.
TAKEN: list[dict[str, Any]] = [
    {"properties": {"const": {"enum": ["a\n\tb", "\x80"]}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "string", "pattern": r"^[\x01-\x7f]\\x7f\x0a$"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {
        "$defs": {
            "tree": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "string"}]},
            "node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "required": ["left"]},
        },
        "$ref": "#/$defs/node",
    },
]


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_in_words(name: str, loaded: LoadedModel, chat: Chat) -> None:
    schema, named = REFUSED[name]
    message = rf"(?s)^Replies can't be constrained to this JSON schema: .*{named}.*leave that part out\.$"
    with pytest.raises(RequestError, match=message):
        check_json_schema(json.dumps(schema))
    engine = engine_of(loaded)
    with pytest.raises(RequestError, match=message):
        engine.add(chat.request([user("hi")], params=params(schema)))
    assert not engine.has_work


@pytest.mark.parametrize("schema", TAKEN)
def test_a_schema_that_has_an_end_is_taken(schema: dict[str, Any]) -> None:
    check_json_schema(json.dumps(schema))


def test_without_the_extra_its_name_is_said(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, chat: Chat) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"qwen35mm\[schema\]"):
        engine_of(loaded).add(chat.request([user("hi")], params=params({"type": "null"})))
    (answer,) = serve(engine_of(loaded), chat.request([user("hi")]))
    assert answer.result.token_ids


def grammars(loaded: LoadedModel) -> Grammars:
    return Grammars(loaded.vocabulary, vocab_size=loaded.config.text.vocab_size)


def test_only_the_end_may_follow_a_complete_answer(loaded: LoadedModel) -> None:
    matcher = grammars(loaded).matcher('{"enum": ["a", "b"]}', '"a"')
    assert set(matcher.allowed().nonzero().flatten().tolist()) == loaded.eos_ids
    assert set((~matcher.while_thinking).nonzero().flatten().tolist()) == loaded.eos_ids


@pytest.mark.parametrize(
    ("schema", "beginning"),
    [
        ({"type": "string"}, '"\\ud800'),
        ({"type": "string"}, '"\\u0000'),
        (record({"a": {"type": "integer"}}, []) | {"additionalProperties": True}, '{"\\u0061'),
        (record({"a": {"type": "integer"}, "b": {"type": "integer"}}), '{"b'),
        (CAPTION, "{ "),
        (CAPTION, '{"caption":"'),
        (CAPTION | {"x-guidance": {"whitespace_flexible": True}}, "{ "),
        (SHORT, '"1234567890123'),
    ],
)
def test_other_ways_of_writing_it_are_closed(schema: dict[str, Any], beginning: str, loaded: LoadedModel) -> None:
    """White space without end, half surrogates, a bound name spelt in another way: all valid JSON somewhere."""
    with pytest.raises(RequestError, match="doesn't fit"):
        grammars(loaded).matcher(json.dumps(schema), beginning)


def test_matchers_of_one_schema_are_apart(loaded: LoadedModel) -> None:
    compiled = grammars(loaded)
    first, second = (compiled.matcher('{"enum": ["ab", "ac"]}', so_far) for so_far in ('"a', ""))
    quote, b = (loaded.tokenizer.encode_plain(text)[0] for text in ('"', "b"))
    assert first.allowed()[b]
    assert not second.allowed()[b]
    first.accept(b)
    assert first.allowed()[quote]
    assert second.allowed()[quote]
    assert not second.allowed()[b]


def test_what_passes_the_check_and_goes_beyond_the_limits_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel
) -> None:
    monkeypatch.setattr(grammar, "check_json_schema", lambda text: None)
    schema, _ = HOSTILE["optional properties"]
    matcher = grammars(loaded).matcher(json.dumps(schema))
    (brace,) = loaded.tokenizer.encode_plain("{")
    assert matcher.allowed()[brace]
    with pytest.raises(RequestError, match=r"can no longer follow its JSON schema"):
        matcher.accept(brace)


def test_a_bounded_number_of_schemas_is_kept(loaded: LoadedModel) -> None:
    compiled = grammars(loaded)
    for number in [*range(MAX_COMPILED + 5), 0]:
        text = f'{{"const": "{number:03}"}}'
        assert compiled.matcher(text, f'"{number:03}').allowed()[loaded.tokenizer.encode_plain('"')[0]]
        assert compiled._compiled.cache_info().currsize <= MAX_COMPILED


GRAMMARS: list[tuple[Any, str]] = [
    (re.compile(r"[A-Z]{2}-\d{3}/[a-f]+!"), r"[A-Z]{2}-\d{3}/[a-f]+!"),
    (["red", "dark red", "blue"], "red|dark red|blue"),
    ('root ::= pair+ "."\npair ::= "(" pair? ")"', r"[()]+\."),
    ('start: "<" /[a-z]{3}/ ">" // <so>\n', "<[a-z]{3}>"),
]


@pytest.mark.parametrize(("given", "pattern"), GRAMMARS)
def test_every_reply_that_stops_follows_its_grammar(given: Any, pattern: str, loaded: LoadedModel, chat: Chat) -> None:
    moved: dict[str, Any] = {"stop": ["e", "(", "1"], "min_tokens": 40, "ignore_eos": True, "stop_token_ids": [101]}
    options = [{}, {"temperature": 0.0}, moved]
    requests = [chat.request([user("hi")], params=params(None, grammar=given, **how)) for how in options]
    results = [answer.result for answer in serve(engine_of(loaded), *requests)]
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert len(stopped) >= 2
    for result in stopped:
        assert re.fullmatch(pattern, result.text), result.text
        assert result.stopped_by is None
    assert results[2].text == results[0].text, "nothing else ends it"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (re.compile("(?=a)b"), "look-around"),
        ("start: other", "other"),
        ("start: <|im_end|>", "names tokens"),
        ('start: "a" <[5]>', "names tokens"),
        ("nonsense", "."),
        ("start: %json " + json.dumps(HOSTILE["choices in allOf"][0]), "."),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_in_words(given: Any, words: str, loaded: LoadedModel) -> None:
    text = SamplingParams(grammar=given).grammar
    assert text is not None
    with pytest.raises(RequestError, match=rf"(?s)^Replies can't be constrained to this grammar: .*{words}"):
        check_grammar(text)


def test_a_reply_that_does_not_fit_its_grammar_is_not_continued(loaded: LoadedModel) -> None:
    compiled = grammars(loaded)
    lark = SamplingParams(grammar=["ab"]).grammar  # pyright: ignore[reportArgumentType]
    assert lark is not None
    assert compiled.matcher_of_grammar(lark, "a").allowed()[loaded.tokenizer.encode_plain("b")[0]]
    with pytest.raises(RequestError, match="doesn't fit the grammar"):
        compiled.matcher_of_grammar(lark, "b")


LABELS = [f"{'a long label ' * (number % 7)}{number}" for number in range(5000)]


def test_an_enum_of_thousands_of_labels_is_followed(loaded: LoadedModel, chat: Chat) -> None:
    schema = record({"label": {"enum": LABELS}})
    held = [params(schema, max_tokens=400), params(None, grammar=LABELS, max_tokens=400)]
    by_schema, by_choice = serve(engine_of(loaded), *(chat.request([user("hi")], params=each) for each in held))
    assert check(by_schema.result, schema)
    assert by_choice.result.text in LABELS


class PanicException(BaseException):
    """As a library in Rust raises it."""


class Failing:
    """A matcher of llguidance that fails."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def compute_bitmask(self) -> bytes:
        if self._error is not None:
            raise self._error
        return bytes(8)

    def consume_token(self, token_id: int) -> None:
        self.compute_bitmask()

    def is_error(self) -> bool:
        return False


def test_failures_of_the_library_are_words() -> None:
    def matcher(error: BaseException | None) -> Matcher:
        return Matcher(Failing(error), torch.ones(64, dtype=torch.bool))  # pyright: ignore[reportArgumentType]

    for error in (PanicException("index out of bounds"), ValueError("a mask")):
        for step in (matcher(error).allowed, lambda error=error: matcher(error).accept(1)):
            with pytest.raises(RequestError, match=r"can no longer follow .*the library fails on it"):
                step()
    with pytest.raises(RequestError, match="nothing may come next"):
        matcher(None).allowed()
    with pytest.raises(KeyboardInterrupt):
        matcher(KeyboardInterrupt()).allowed()


def test_a_reply_that_fails_ends_alone(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, chat: Chat) -> None:
    (alone,) = serve(engine_of(loaded), chat.request([user("hi")], params=params({"type": "boolean"})))
    engine = engine_of(loaded)
    failing = chat.request([user("hi")], params=params({"type": "string", "maxLength": 40}))
    other = chat.request([user("hi")], params=params({"type": "boolean"}))
    engine.add(failing)
    engine.add(other)
    accept, num_accepted = Matcher.accept, 0

    def fails_later(self: Matcher, token_id: int) -> None:
        nonlocal num_accepted
        accept(self, token_id)
        if self.allowed().sum() > 10:  # in the string
            num_accepted += 1
            if num_accepted > 3:
                self._state = Failing(PanicException())  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(Matcher, "accept", fails_later)
    told: dict[str, list[Any]] = {failing.id: [], other.id: []}
    while engine.has_work:
        for output in engine.step():
            told[output.request_id].append(output.event)
    assert isinstance(told[failing.id][-1], RequestError)
    assert "can no longer follow" in str(told[failing.id][-1])
    assert told[other.id][-1].result.text == alone.result.text
