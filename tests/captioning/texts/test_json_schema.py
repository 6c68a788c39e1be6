"""Schemas as people bring them, and captions that satisfy them or don't."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.errors import CaptioningError, MissingExtraError

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 5}, "count": {"type": "integer", "minimum": 0}},
    "required": ["title"],
    "additionalProperties": False,
}


def schema(values: dict[str, Any] | None = None) -> JsonSchema:
    return JsonSchema.read(json.dumps(SCHEMA if values is None else values))


def test_a_file_and_its_text_are_the_same_schema(tmp_path: Path) -> None:
    path = tmp_path / "caption.json"
    for text in (json.dumps(SCHEMA, indent=4), "\ufeff" + json.dumps(SCHEMA)):
        path.write_text(text, encoding="utf-8")
        assert JsonSchema.read(path) == schema()
    assert json.loads(schema().text) == SCHEMA
    assert list(json.loads(schema().text)["properties"]) == ["title", "count"]
    assert " " not in schema().text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "as JSON"),
        ("{", "as JSON"),
        ("[1]", "JSON object; got list"),
        ("true", "JSON object; got bool"),
        ('{"type": "text"}', r"isn't a JSON schema: \$\.type"),
        ('{"properties": {"a": {"minLength": -1}}}', r"\$\.properties\.a\.minLength"),
        ('{"pattern": "[a"}', r"\$\.pattern"),
        ('{"minimum": NaN}', "NaN isn't JSON"),
        ('{"maximum": 1e999}', "out of range"),
        ('{"const": "\\ud800"}', "as JSON"),
        ('{"$schema": "http://json-schema.org/draft-03/schema#"}', "draft 4 and later"),
        ('{"$schema": 4}', "draft"),
        ('{"items": ' * 100_000, "as JSON"),
        ('{"items": ' * 700 + "{}" + "}" * 700, "nested too deeply|as JSON"),
    ],
)
def test_what_is_no_schema_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(CaptioningError, match=words):
        JsonSchema.read(text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CaptioningError, match=r"^none\.json can't be read"):
        JsonSchema.read(tmp_path / "none.json")
    (tmp_path / "picture.json").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(CaptioningError, match=r"^picture\.json must hold"):
        JsonSchema.read(tmp_path / "picture.json")


def test_a_caption_that_satisfies_it_is_its_value() -> None:
    assert schema().parse('{"title": "é\\n日", "count": 3}') == {"title": "é\n日", "count": 3}
    assert schema({}).parse(" 3.5\n") == 3.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"title": "abcdef"}', r"\$\.title: 'abcdef' is too long"),
        ('{"title": "a", "count": -1}', r"\$\.count"),
        ("{}", "'title' is a required property"),
        ('{"title": "a", "more": 1}', "Additional properties"),
        ('{"title": "a', "isn't JSON"),
        ('{"title": "a"} {}', "isn't JSON"),
        ("", "isn't JSON"),
        ('{"title": "\\ud800"}', "isn't JSON that can be kept"),
        ('{"title": "a", "count": 1e999}', "out of range"),
        ('{"title": "a", "count": Infinity}', "Infinity isn't JSON"),
        (f'{{"title": "a", "count": {"9" * 5000}}}', "isn't JSON that can be kept"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_caption_that_does_not_satisfy_it_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(CaptioningError, match=words):
        schema().parse(text)


def test_a_reference_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("urllib.request.urlopen", fetched)
    for reference in ("https://example.com/caption.json", "#/$defs/none"):
        with pytest.raises(CaptioningError, match="refers to"):
            schema({"$ref": reference}).parse("1")
    assert schema({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}).parse("1") == 1


def test_without_the_extra_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingExtraError, match=r"qwen35mm\[schema\]"):
        schema()
