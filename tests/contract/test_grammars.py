"""Grammars made from regular expressions, choices and GBNF accept the texts that these describe."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from qwen35mm.contract import SamplingParams
from qwen35mm.contract.grammars import (
    MAX_GBNF_CHARS,
    MAX_GRAMMAR_CHARS,
    grammar_of_choices,
    grammar_of_gbnf,
    grammar_of_pattern,
    grammar_of_regex,
    lark_of,
)
from qwen35mm.engine import grammar_check
from qwen35mm.errors import ConfigError


def accepts(lark: str, text: str) -> bool:
    matcher = grammar_check._compiled(grammar_check.grammar_of("grammar", lark))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = list(text.encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


PATTERNS = [
    (r"[a-z]{2,4}-\d+", ["ab-1", "abcd-42"], ["a-1", "ab-", "ab-1x"]),
    (r"a/b\/c[/]", ["a/b/c/"], ["a/b/c"]),
    ("a\nb\\\nc", ["a\nb\nc"], ["anbnc"]),
    (r"\\\"x", ['\\"x'], ['"x']),
    ("^(yes|no)$", ["yes", "no"], ["yesno", "^yes$"]),
    ("", [""], ["a"]),
    ("//", ["//"], ["/"]),
    ("a|ab|é😀", ["a", "ab", "é😀"], ["b"]),
]


@pytest.mark.parametrize(("pattern", "fit", "others"), PATTERNS)
def test_a_regular_expression_matches_the_whole_answer(pattern: str, fit: list[str], others: list[str]) -> None:
    lark = grammar_of_regex(pattern)
    assert [text for text in fit if not accepts(lark, text)] == []
    assert [text for text in others if accepts(lark, text)] == []


def test_a_compiled_pattern_keeps_its_flags() -> None:
    lark = grammar_of_pattern(re.compile("a.b", re.IGNORECASE | re.DOTALL))
    assert accepts(lark, "A\nb")
    assert not accepts(grammar_of_pattern(re.compile("a.b")), "a\nb")
    with pytest.raises(ConfigError, match="VERBOSE"):
        grammar_of_pattern(re.compile("a b", re.VERBOSE))


def test_choices_are_texts_not_patterns() -> None:
    choices = ["a", "ab", 'say "hi"', "a.c", "tab\t\\", "日本 😀", ""]
    lark = grammar_of_choices(choices)
    assert all(accepts(lark, choice) for choice in choices)
    assert not any(accepts(lark, text) for text in ("abc", "axc", "b"))


# A text, the grammar in GBNF, texts that it describes, and others.
GBNF: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "yes" | "no" # or so', ["yes", "no"], ["yesno", ""]),
    # Parts may overlap: a reader that takes the longest part first would find no "x".
    ('root ::= [a-z]+ "x"', ["abcx", "xx"], ["abc", "x"]),
    ('root ::= item{2} item{0,1} "."\nitem ::= "a" | "b"', ["ab.", "aba."], ["a.", "abab."]),
    ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
    ('root ::= ("a" |\n  "b")*\n  "c"?', ["", "ab", "abc"], ["cc"]),
    ('root ::= [^"\\\\\\x7F\\x00-\\x1F]+', ["é x😀", "-"], ['a"', "\\", "\x1f"]),
    ('root ::= "\\"\\n\\t\\\\\\u00e9\\U0001F600\\x41"', ['"\n\t\\é😀A'], ["A"]),
    ("root ::= [a\\]^-] [-x]", ["^-", "]x", "a-", "-x"], ["b-"]),
    ("root ::= . .", ["é\n"], ["a"]),
    (
        'root ::= list\nlist ::= "[" (value ("," value)*)? "]"\nvalue ::= num | list\nnum ::= [0-9]+',
        ["[]", "[1,[22,3]]"],
        ["[", "1"],
    ),
    ('root ::= pair\npair ::= "(" pair? ")" tail\ntail ::= | " "', ["()", "(() ) "], ["(", ") "]),
    ('my-rule ::= "a"\nroot ::= my-rule my_rule\nmy_rule ::= "b"', ["ab"], ["aa"]),
]


@pytest.mark.parametrize(("gbnf", "fit", "others"), GBNF)
def test_gbnf_describes_the_same_texts_as_lark(gbnf: str, fit: list[str], others: list[str]) -> None:
    lark = lark_of(gbnf)
    assert lark == grammar_of_gbnf(gbnf)
    assert [text for text in fit if not accepts(lark, text)] == []
    assert [text for text in others if accepts(lark, text)] == []


JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def drawn(chance: random.Random, depth: int) -> Any:
    match chance.randrange(7 if depth else 4):
        case 0:
            return chance.choice([True, False, None])
        case 1:
            return chance.randrange(-50, 50)
        case 2:
            return chance.choice(["", "a b", 'q"\\', "\n\t", "日本 😀", "{[,:]}"])
        case 3:
            return chance.random()
        case 4:
            return [drawn(chance, depth - 1) for _ in range(chance.randrange(3))]
        case _:
            return {chance.choice("abc") * (n + 1): drawn(chance, depth - 1) for n in range(chance.randrange(3))}


def test_json_in_gbnf_accepts_json() -> None:
    """The grammar that most recursive ones look like."""
    lark, chance = lark_of(JSON_GBNF), random.Random(0)
    for _ in range(40):
        value = {"v": drawn(chance, 3)}
        for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, separators=(",", ":"))):
            assert accepts(lark, text), text
            assert not accepts(lark, text[:-1])


@pytest.mark.parametrize(
    ("gbnf", "words"),
    [
        ('rule ::= "a"', "a rule named root"),
        ("root ::= other", "'other' is used but not defined"),
        ('root ::= "a"\nroot ::= "b"', "'root' is defined twice"),
        ('root ::= ("a"', "isn't closed"),
        ('root ::= "a")', r"line 1 .*'\)'"),
        ('root ::= "a"\nb ::= "c', "line 2 "),
        ("root ::= *", r"line 1 .*'\*'"),
        ("root ::= a**\na ::= []", r"line 1 .*'\*"),
        ("root ::= []", r"'\[\]'"),
        ("root ::= [b-a]", r"\[b-a\]"),
        ('root ::= "\\uD800"', "D800"),
        ('root ::= "\\U00110000"', "00110000"),
        (f"root ::= {'(' * 5000}", "parentheses are open"),
        (f"root ::= {'a ' * (MAX_GBNF_CHARS // 2)}", "characters; got"),
    ],
)
def test_gbnf_that_cannot_be_read_is_refused_in_words(gbnf: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^grammar: .*{words}"):
        grammar_of_gbnf(gbnf)


def test_parameters_take_what_can_only_mean_one_grammar() -> None:
    def kept(given: Any) -> str | None:
        return SamplingParams(grammar=given).grammar

    assert kept(re.compile("a+")) == grammar_of_regex("a+")
    assert kept(["b", "c"]) == kept(("b", "c")) == grammar_of_choices(["b", "c"])
    assert kept('root ::= "a"') == grammar_of_gbnf('root ::= "a"')
    for lark in ('start: "a"', "%llguidance {}\nstart: /a ::= b/"):
        assert kept(lark) == lark
    params = SamplingParams(grammar=["b"])  # pyright: ignore[reportArgumentType]
    assert params.with_overrides(seed=1).grammar == params.grammar
    assert params.is_constrained
    assert hash(params)


@pytest.mark.parametrize(
    "grammar",
    [
        "\n" * MAX_GRAMMAR_CHARS,
        "\n \t" * (MAX_GRAMMAR_CHARS // 3),
        "start" + " " * (MAX_GRAMMAR_CHARS - 5),
        "start[\n" * (MAX_GRAMMAR_CHARS // 7),
        "a" + "\n" * (MAX_GRAMMAR_CHARS - 1),
        "-" * MAX_GRAMMAR_CHARS,
    ],
    ids=["lines", "blank", "start", "attributes", "name", "long name"],
)
def test_the_kind_of_a_long_grammar_takes_linear_time(grammar: str) -> None:
    """In quadratic time, one of these takes an hour."""
    assert lark_of(grammar) == grammar
    with pytest.raises(ConfigError, match="may have 524,288 characters"):
        lark_of(grammar + "-" * 8)


def test_gbnf_with_long_blanks_in_a_repetition_is_refused_at_once() -> None:
    """In cubic time, this takes a day."""
    blanks = " " * (MAX_GBNF_CHARS // 4)
    with pytest.raises(ConfigError, match="can't be read as GBNF"):
        lark_of(f'root ::= "a"{{1{blanks}{blanks}{blanks}x')
    assert accepts(lark_of(f'root ::= "a"{{ 1{blanks},{blanks}2 }}'), "aa")
