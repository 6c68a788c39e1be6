"""instructor: structured output by every mode that a server like this one can take."""

from __future__ import annotations

import anthropic
import instructor
import openai
from checks import BASE, MODEL, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0)
# What the server's script says if nothing constrains it.
WHO = 'Who? SAY<<```json\n{"name": "Ann", "age": 3}\n```>>'
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "max_retries": 0}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def _mode(mode):
    assert instructor.from_openai(client, mode=mode).create(response_model=Person, **ASKED).age == 3, mode


def tools():
    _mode(instructor.Mode.TOOLS)


def tools_strict():
    _mode(instructor.Mode.TOOLS_STRICT)


def parallel_tools():
    from collections.abc import Iterable

    found = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    assert next(iter(found.create(response_model=Iterable[Person], **ASKED))).age == 3


def json():
    _mode(instructor.Mode.JSON)


def json_schema():
    _mode(instructor.Mode.JSON_SCHEMA)


def markdown_json():
    asked = {**ASKED, "messages": [{"role": "user", "content": WHO}]}
    assert instructor.from_openai(client, mode=instructor.Mode.MD_JSON).create(response_model=Person, **asked).age == 3


def partial():
    parts = list(instructor.from_openai(client).create_partial(response_model=Person, **ASKED))
    assert parts[-1].age == 3


def anthropic_tools():
    found = instructor.from_anthropic(claude, mode=instructor.Mode.ANTHROPIC_TOOLS)
    assert found.create(response_model=Person, max_tokens=100, **ASKED).age == 3


if __name__ == "__main__":
    run(tools, tools_strict, parallel_tools, json, json_schema, markdown_json, partial, anthropic_tools)
