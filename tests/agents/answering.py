"""A script that answers any client: it calls each offered tool once, follows a schema, and then tells the weather."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from qwen35mm.contract import GenerationRequest, ToolCall
from tests.agents.scripted import Said

ANSWER = "It is sunny in Rome."
# Tools that end an agent's session.
_LAST = ("final_answer", "final_result")
_VALUES = {"integer": 3, "number": 1.5, "boolean": True, "null": None}
# A message that holds this says itself what the reply is.
_TOLD = re.compile(r"SAY<<(.*?)>>(?!>)", re.DOTALL)


def answer(request: GenerationRequest) -> Said:
    """Replies to a client's request."""
    schema = request.params.json_schema if request.params else None
    if schema is not None:
        described = json.loads(schema)
        is_open = not described.keys() & {"properties", "anyOf", "$ref"}
        return Said(json.dumps({"name": "Ann", "age": 3} if is_open else value_of(described)))
    if told := _TOLD.search(request.messages[-1].text):
        return Said(told[1])
    called = {call.name for message in request.messages for call in message.tool_calls}
    # smolagents gives calls back as text.
    written = "".join(message.text for message in request.messages if message.role == "assistant")
    called |= set(re.findall(r"'name': '(\w+)'", written))
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    left = sorted(functions.keys() - called, key=lambda name: (name in _LAST, list(functions).index(name)))
    if request.tool_choice in functions:
        left = [request.tool_choice]
    if left:
        arguments = value_of(functions[left[0]].get("parameters") or {"type": "object"})
        return Said(calls=(ToolCall(left[0], arguments),))
    num_media = sum(len(message.media) for message in request.messages)
    return Said(f"{ANSWER} I saw {num_media} media." if num_media else ANSWER)


def value_of(schema: Any, name: str = "", roots: Mapping[str, Any] | None = None) -> Any:
    """A value that follows a schema, as far as clients' schemas go."""
    if not isinstance(schema, dict):
        return name
    roots = roots or schema.get("$defs") or {}
    if "$ref" in schema:
        return value_of(roots[schema["$ref"].rpartition("/")[2]], name, roots)
    if schema.get("const", schema.get("default")) is not None:
        return schema.get("const", schema.get("default"))
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return value_of(schema[key][0], name, roots)
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {key: value_of(each, key, roots) for key, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [value_of(schema.get("items"), name, roots)]
    return _VALUES.get(kind, "Rome" if name == "city" else f"some {name or 'text'}")
