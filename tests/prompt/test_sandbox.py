"""The templates' sandbox, against transformers' own."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from qwen35mm.prompt.sandbox import compile_template, plain

MESSAGES = [
    {"role": "user", "content": "<b>héllo</b>"},
    {"role": "assistant", "content": "  x", "tool_calls": [{"function": {"arguments": {"b": [1, None], "a": 0.5}}}]},
]


class Colour(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }} {{ messages | tojson(ensure_ascii=true, indent=2, sort_keys=true) }}",
        "{{ messages[1].tool_calls | tojson(separators=(',', ':')) }}",
        "  {% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m.content }}\n  {% endfor %}\n",
        "{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}{{ documents is none }}{{ tools is none }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{{ messages[0].role }}{% endgeneration %}{{ x }}",
        "{% set ns = namespace(self=1, n=2) %}{% set ns.n = 3 %}{{ ns.self }}{{ ns.n }}{{ dict(a=1) }}",
        "{{ dict.fromkeys(['a', 'b'], 0) }}{{ strftime_now('%Y-%m-%d') }}{{ missing }}|{{ messages[0].missing }}|",
        "{{ range(3) | list }}{{ 'a-b'.split('-') }}{{ lipsum is defined }}{{ messages[0] is mapping }}",
    ],
)
def test_a_template_renders_as_in_transformers(source: str) -> None:
    (theirs,), _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True)
    ours = compile_template(source).render(messages=plain(MESSAGES), tools=None, documents=None)
    assert ours == theirs


@pytest.mark.parametrize("value", ["namespace(_x=1)", "namespace({'__class__': 1})"])
def test_a_namespace_holds_nothing_of_pythons_own(value: str) -> None:
    with pytest.raises(SecurityError):
        compile_template("{% set ns = " + value + " %}").render()
    with pytest.raises(SecurityError):
        compile_template("{% set ns = namespace() %}{% set ns.__class__ = 1 %}").render()


def test_a_template_gets_nothing_but_json() -> None:
    class Writer:
        def write(self) -> str:
            raise AssertionError("a template reached an object")

    value: Any = {"a": [Writer(), True, None, 2, 0.5, ("b",)], Colour.RED: Colour.RED}
    found = plain(value)
    assert found == {"a": ["<Writer>", True, None, 2, 0.5, ["b"]], "red": "red"}
    assert type(found["red"]) is str
    assert compile_template("{{ x.write }}").render(x=plain(Writer())) == ""
