"""What is checked of a grammar before anything is compiled: in a child process, whose time and memory have an end."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.contract.sampling import MAX_JSON_SCHEMA_CHARS
from qwen35mm.engine import check_json_schema, grammar, grammar_check
from qwen35mm.engine.call_grammar import grammar_of_calls
from qwen35mm.engine.grammar_check import any_reply_ends
from qwen35mm.errors import EngineError, RequestError
from qwen35mm.model import LoadedModel
from tests.engine.schemas import HOSTILE, SCHEMAS, TOO_MUCH, record


@pytest.fixture
def little_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check has a third of its time and half of its memory, so that nobody waits for what exceeds them."""
    monkeypatch.setattr(grammar_check, "CPU_S", 1)
    monkeypatch.setattr(grammar_check, "MEMORY_BYTES", 64 << 20)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_and_remembered(name: str, request: pytest.FixtureRequest) -> None:
    schema, words = HOSTILE[name]
    if words == TOO_MUCH:
        request.getfixturevalue("little_is_too_much")
    text = json.dumps(schema)
    assert len(text) <= MAX_JSON_SCHEMA_CHARS
    for _ in range(2):
        began_s = time.process_time()
        with pytest.raises(RequestError, match=words):
            check_json_schema(text)
        # Of this process: the child's isn't counted, however busy the machine is.
        assert time.process_time() - began_s < 1.0


def test_a_verdict_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def says(work: str, last: int) -> tuple[int, str] | None:
        asked.append(work)
        return (last, "so") if "bad" in work else None

    monkeypatch.setattr(grammar, "_child_says", says)
    monkeypatch.setattr(grammar, "_verdicts", {})
    monkeypatch.setattr(grammar, "_MAX_VERDICTS", 3)
    for name in ("a", "bad", "a", "bad", "b", "bad", "c", "a"):
        text = json.dumps({"const": name})
        if name == "bad":
            with pytest.raises(RequestError, match="so"):
                check_json_schema(text)
        else:
            check_json_schema(text)
        assert len(grammar._verdicts) <= 3
    assert [json.loads(json.loads(work)["grammars"][0][1])["const"] for work in asked] == ["a", "bad", "b", "c", "a"]


def test_without_a_process_there_is_no_verdict_and_none_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"const": "no process"}'
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/no/such/python")
        with pytest.raises(EngineError, match="couldn't be checked"):
            check_json_schema(text)
    check_json_schema(text)


def test_a_check_in_progress_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends, asked = threading.Event(), threading.Event(), 0

    def says(work: str, last: int) -> tuple[int, str] | None:
        nonlocal asked
        asked += 1
        begun.set()
        assert ends.wait(60)
        if "broken" in work:
            raise EngineError("no verdict")
        return last, "so"

    monkeypatch.setattr(grammar, "_child_says", says)
    monkeypatch.setattr(grammar, "_verdicts", {})
    for text, error, words in (
        ('{"const": 1}', RequestError, "so"),
        ('{"const": "broken"}', EngineError, "no verdict"),
    ):
        asked = 0
        begun.clear()
        ends.clear()
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(check_json_schema, text)
            assert begun.wait(60)
            waiting = [threads.submit(check_json_schema, text) for _ in range(3)]
            ends.set()
            for each in (first, *waiting):
                with pytest.raises(error, match=words):
                    each.result(60)
        # What failed may be asked for anew by one that came late.
        assert asked == 1 or error is EngineError
        assert grammar._checks == {}
    assert len(grammar._verdicts) == 1


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    ("end", "is_remembered"),
    [
        *((f"os.kill(os.getpid(), signal.{name})", True) for name in ("SIGXCPU", "SIGKILL", "SIGSEGV", "SIGABRT")),
        *(("os.kill(os.getpid(), signal.SIGTERM)", False), ("sys.exit(1)", False)),
    ],
)
def test_only_what_takes_too_much_is_refused_for_good(
    end: str, is_remembered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "check.py"
    script.write_text(f"import os, resource, signal, sys\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{end}")
    monkeypatch.setattr(grammar, "_SCRIPT", script)
    monkeypatch.setattr(grammar, "_verdicts", {})
    words = "takes more than" if is_remembered else "couldn't be checked"
    with pytest.raises(RequestError if is_remembered else EngineError, match=words):
        check_json_schema("{}")
    assert len(grammar._verdicts) == is_remembered


def test_where_the_clock_is_the_limit_it_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "check.py"
    script.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(grammar, "_SCRIPT", script)
    monkeypatch.setattr(grammar, "_verdicts", {})
    monkeypatch.setattr(grammar, "_TIMEOUT_S", 0.2)
    with pytest.raises(EngineError, match="couldn't be checked"):
        check_json_schema("{}")
    monkeypatch.setattr(grammar, "_IS_CLOCK_THE_LIMIT", True)
    for _ in range(2):
        with pytest.raises(RequestError, match="takes more than"):
            check_json_schema("{}")
        monkeypatch.setattr(grammar, "_SCRIPT", tmp_path / "none.py")


def test_many_tools_have_one_limit(loaded: LoadedModel, little_is_too_much: None) -> None:
    """Each of them is within it alone."""
    patterns = {f"^x{i}_.*$": {"type": "integer"} for i in range(40)}
    tools = [
        {"name": f"tool{at}", "parameters": record({"a": {"type": "object", "patternProperties": patterns}})}
        for at in range(200)
    ]
    with pytest.raises(RequestError, match="these tools: checking it takes more than"):
        grammar_of_calls(tools, "xml", loaded.tokenizer, several=True, only_calls=True)
    grammar_of_calls(tools[:1], "xml", loaded.tokenizer, several=True, only_calls=True)


def test_whether_a_reply_ends_is_as_defined() -> None:
    chance = random.Random(0)
    answers = [0, 0]
    for _ in range(500):
        schema = {**drawn(chance, 3), "$defs": {name: drawn(chance, 2) for name in "abc"}}
        ends = any_reply_ends(schema)
        assert ends == defined(schema), schema
        answers[ends] += 1
    assert min(answers) > 5


def test_a_long_chain_of_references_takes_no_square_of_its_length() -> None:
    chain: dict[str, Any] = {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(20_000)}
    assert not any_reply_ends({"$defs": {**chain, "20000": {"$ref": "#"}}, "$ref": "#/$defs/0"})
    assert any_reply_ends({"$defs": {**chain, "20000": {"type": "null"}}, "$ref": "#/$defs/0"})


def test_ordinary_schemas_pass_within_the_limits() -> None:
    ordinary: list[tuple[grammar_check.Kind, str]] = [("strict", json.dumps(schema)) for schema in SCHEMAS.values()]
    assert grammar.first_refused(*ordinary) is None


def drawn(chance: random.Random, depth: int) -> dict[str, Any]:
    """A small schema with references to definitions, to itself and into both."""

    def part() -> Any:
        return drawn(chance, depth - 1) if depth else {"$ref": f"#/$defs/{chance.choice('abc')}"}

    match chance.randrange(8):
        case 0:
            return {"type": "null"}
        case 1:
            return {"$ref": chance.choice(["#", "#/$defs/a", "#/$defs/b", "#/$defs/c", "#/$defs/a/anyOf/0", "#/none"])}
        case 2:
            return {"type": "object", "properties": {"p": part(), "q": part()}, "required": chance.sample("pqr", 2)}
        case 3:
            return {"type": "array", "items": part(), "prefixItems": [part()], "minItems": chance.randrange(3)}
        case 4:
            return {"allOf": [part(), part()]}
        case 5:
            return {"anyOf": [part(), part()], "oneOf": [part(), chance.choice([part(), False])]}
        case 6:
            return {"type": "array", "items": part()}
        case _:
            return {"anyOf": [part(), part()]}


def defined(schema: dict[str, Any]) -> bool:
    """The definition: what is finite by what is finite already, from nothing on, until it grows no more."""
    references = [f"#/$defs/{name}" for name in "abc"] + ["#", "#/$defs/a/anyOf/0", "#/none"]
    targets = {name: target(schema, name) for name in references}
    finite: set[str] = set()
    while found := {name for name in targets.keys() - finite if ends(targets[name], finite)}:
        finite |= found
    return ends(schema, finite)


def target(schema: Any, reference: str) -> Any:
    for name in reference.split("/")[1:]:
        try:
            schema = schema[int(name) if isinstance(schema, list) else name]
        except KeyError:
            return True
    return schema


def ends(schema: Any, finite: Collection[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    needed = [*schema.get("allOf", ())]
    if schema.get("type") == "object":
        needed += [schema.get("properties", {}).get(name, True) for name in schema.get("required", ())]
    if schema.get("type") == "array":
        num_items, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed += first[:num_items] + ([schema.get("items", True)] if num_items > len(first) else [])
    choices = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    return (
        schema.get("$ref") in (None, *finite)
        and all(ends(each, finite) for each in needed)
        and all(any(ends(each, finite) for each in some) for some in choices)
    )
