"""Templates that make much of little: refused in words, before they have made it."""

from __future__ import annotations

import pytest

from qwen35mm.errors import CheckpointError, PromptError
from qwen35mm.prompt import ChatTemplate, limits
from qwen35mm.prompt.sandbox import MAX_SOURCE_CHARS

HELLO = [{"role": "user", "content": "Hello"}]


def again(source: str, times: int, start: str = "'a'") -> str:
    """What is in the namespace as `x`, made anew so many times."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{source}{{% endfor %}}"


# Where nothing is counted, each of these makes some 100 MB, or takes some seconds.
TEXTS = [
    "{{ 'a' * 10**8 }}",
    "{{ 10**8 * 'a' }}",
    "{{ ([0] * 10**7) | length }}",
    "{{ 'a' | center(10**8) }}",
    "{{ 'a'.center(10**8) }}{{ 'a'.zfill(10**8) }}",
    "{{ ('a\n' * 1000) | indent(10**5) }}",
    "{{ ('a\n' * 1000) | indent(width='b' * 10**5, first=true) }}",
    "{{ '%100000000d' | format(1) }}",
    "{{ '%*d' | format(10**8, 1) }}",
    "{{ '%.100000000f' % 1.0 }}",
    "{{ '{:>100000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**8) }}",
    "{{ '{a:>100000000}'.format_map({'a': 1}) }}",
    "{{ ('{0}' * 1000).format('a' * 10**5) }}",
    "{{ ('%(a)s' * 1000) % {'a': 'a' * 10**5} }}",
    "{{ ('a' * 10**4) | replace('a', 'b' * 10**4) }}",
    "{{ ('a' * 10**4) | replace(old='a', new='b' * 10**4) }}",
    "{{ ('a' * 10**4).replace('', 'b' * 10**4) }}",
    "{{ range(1000) | join('a' * 10**5) }}",
    "{{ ('a' * 10**5).join(['b'] * 1000) }}",
    "{{ (['a' * 10**5] * 1000) | join }}",
    "{{ (['a' * 10**5] * 1000) | string }}",
    "{{ ['a' * 10**5] * 1000 }}",
    "{{ ([[]] * 1000) | tojson(indent=10**5) }}",
    "{{ [1, 2, 3] | tojson(separators=['a' * 10**7, 'b' * 10**8]) }}",
    "{{ [1] | batch(10**7, 0) | list }}",
    "{{ ('a' * 10**4) | wordwrap(1, wrapstring='b' * 10**4) }}",
    "{{ ('\t' * 10**4).expandtabs(10**4) }}",
    "{{ ('a' * 10**4).translate({97: 'b' * 10**4}) }}",
    "{{ (5).to_bytes(10**8, 'big') }}",
    "{{ 'a'.encode().center(10**8) }}",
    "{{ 1.5 | round(10**6, 'ceil') }}",
    "{{ ([[1]] * 20000) | sum(start=[]) | length }}",
    "{{ lipsum(1000) }}",
    "{{ strftime_now('%c' * 10**6) }}",
    "{{ 10 ** (10**6) }}",
    again("{% set ns.x = ns.x * ns.x %}", 18, "10"),
    again("{% set ns.x = ns.x ~ ns.x %}", 27),
    again("{% set ns.x = ns.x + ns.x %}", 27),
    again("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", 27),
    again("{% set ns.x = ns.x + ns.x %}", 27, "[1]"),
    again("{% set ns.x = ns.x + [0] %}", 99_999, "[]"),
    again("{% set ns.x = ns.x + [[0] * 10**4] %}", 99_999, "[]"),
    again("{% set ns.x = [ns.x, ns.x] %}", 23) + "{{ ns.x }}",
    again("{% set ns.x = (ns.x, ns.x) %}", 23) + "{{ ns.x }}",
    again("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", 22) + "{{ ns.x | tojson }}",
    again("{% set ns.x = dict(a=ns.x, b=ns.x) %}", 22) + "{{ ns.x }}",
    again("{% set ns.x = [1, 2, 3] | map(attribute='z', default=ns.x) | list %}", 15) + "{{ ns.x | string }}",
    "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 27,
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}a{% endif %}{% endmacro %}{{ m(22) }}",
    "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}",
    "{% for i in range(5000) %}{% for j in range(5000) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(10000) %}" + "a" * 10_000 + "{% endfor %}",
    "{% for x in range(5000) recursive %}{{ loop(range(5000)) if x is number and loop.depth < 3 }}{% endfor %}",
    "{% set l = range(9999) | list %}{% for i in range(9999) %}{% set x = l[1:] %}{% endfor %}",
    "a" * (MAX_SOURCE_CHARS + 1),
]


@pytest.mark.parametrize("source", TEXTS, ids=lambda source: source[:60])
def test_much_of_little_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A hundredth of the work that is allowed, for the tests' time.
    monkeypatch.setattr(limits, "_LEAST", limits._LEAST // 100)
    with pytest.raises(
        CheckpointError, match=r"^The chat template .* (needs|read|there are|no number), and can't be used\.$"
    ):
        ChatTemplate(source)


def test_it_is_refused_when_messages_lead_to_it() -> None:
    template = ChatTemplate("{% if messages[0].content == 'big' %}{{ 'a' * 10**8 }}{% endif %}")
    with pytest.raises(PromptError, match=r"^The model's chat template makes more of these messages than any prompt"):
        template.render([{"role": "user", "content": "big"}], enable_thinking=False, add_generation_prompt=True)


def test_many_short_steps_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPU_S", 0.0)
    with pytest.raises(CheckpointError, match="takes longer for these messages than any prompt needs"):
        ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(3) %}{{ loop.length }}{{ loop.last }}{% else %}x{% endfor %}", "3False3False3True"),
        ("{% for i in nothing %}{% else %}x{% endfor %}", "x"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ b ~ none ~ true }}{% endfor %}", "x1NoneTrue"),
        ("{{ '%s of %5.1f' % ('a', 2) }}{{ '{} {a:>3}'.format(1, a=2) }}", "a of   2.01   2"),
        ('{{ \'{{"a": {{"b": {}}}}}\'.format(1) }}', '{"a": {"b": 1}}'),
        (
            "{{ 'a\nb' | indent(2) }}{{ 'ab' | center(4) }}|{{ [1, 2, 3] | batch(2) | list }}",
            "a\n  b ab |[[1, 2], [3]]",
        ),
        ("{{ [1, 2] | sum }}{{ [{'a': 1}] | sum(attribute='a') }}{{ 1.26 | round(1) }}", "311.3"),
        ("{{ messages[::-1][0].content[1:3] }}{{ (1, 2) + (3,) }}{{ 'a' in ('a', 'b') }}", "el(1, 2, 3)True"),
        ("{{ 'a,b'.split(',', 1)[1] }}{{ ','.join(['a', 'b']) }}{{ 'aXa'.replace('a', 'b', 1) }}", "ba,bbXa"),
        ("{{ namespace(a=1) }}{% set x %}a{{ 1 }}{% endset %}{{ x | upper | e }}{{ -7 // 2 }}{{ 2 ** 10 }}", None),
    ],
)
def test_ordinary_templates_are_as_they_were(source: str, expected: str | None) -> None:
    rendered = ChatTemplate(source).render(HELLO, enable_thinking=False, add_generation_prompt=True)
    assert rendered == (expected if expected is not None else "<Namespace>A1-41024")


def test_the_largest_conversation_is_far_from_the_limit(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_LEAST", limits._LEAST // 5)
    monkeypatch.setattr(limits, "_TIMES", limits._TIMES // 5)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "x" * 100, "b": [1, {"c": 2}]}}}
    turn = [
        {"role": "user", "content": "a\n" * 100},
        {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": [call]},
        {"role": "tool", "content": "d" * 300},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": ["x" * 10] * 100}}}] * 20
    for messages in (turn * 500, [{"role": "user", "content": "a\n" * 1_000_000}]):
        assert template.render(messages, tools=tools, enable_thinking=True, add_generation_prompt=True)


GATHERED = (
    "{% set ns = namespace(x=START) %}{% for m in messages %}{% set ns.x = MORE %}{% endfor %}{{ ns.x | length }}"
)


@pytest.mark.parametrize(
    ("start", "more", "expected"),
    [
        ("[]", "ns.x + [m]", 3000),
        ("[]", "[m] + ns.x", 3000),
        ("()", "ns.x + (m,)", 3000),
        ("[]", "ns.x + [{'role': m.role, 'content': [{'text': m.content}]}]", 3000),
        ("[0]", "ns.x + [m.content, loop.index] + []", 6001),
        ("''", "ns.x + m.role[:1]", 3000),
    ],
)
def test_a_long_conversation_is_gathered_one_message_after_the_other(start: str, more: str, expected: int) -> None:
    template = ChatTemplate(GATHERED.replace("START", start).replace("MORE", more))
    rendered = template.render(HELLO * 3000, enable_thinking=False, add_generation_prompt=True)
    assert rendered == str(expected)
