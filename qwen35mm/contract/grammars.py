"""Grammars of replies in llguidance's dialect of Lark, made from what clients say: a regular expression, a list of
choices, or llama.cpp's GBNF. Pure texts: nothing here compiles a grammar.

A GBNF grammar without recursion becomes one terminal, so that its parts may overlap as llama.cpp allows. In a recursive
one, each rule without recursion is a terminal, and a terminal takes the longest text that it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qwen35mm.errors import ConfigError

MAX_GRAMMAR_CHARS = 524_288
# Reading it takes Python some microseconds a character.
MAX_GBNF_CHARS = 65_536

# Escapes that a regular expression between slashes needs.
_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
_FLAGS = {re.IGNORECASE: "i", re.MULTILINE: "m", re.DOTALL: "s"}
# No two neighbours of these patterns match the same character, so that each takes linear time.
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start(?:[ \t]*\[[^\]\n]*\])?\s*:(?!:=))", re.MULTILINE)
_GBNF = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:\\.|[^"\\])*)"
    |\[(?P<chars>(?:\\.|[^\]\\])*)\]
    |\{\s*(?P<least>[0-9]{1,9})\s*(?:(?P<comma>,)\s*(?:(?P<most>[0-9]{1,9})\s*)?)?\}
    |(?P<sign>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_MOST_NESTED = 64
_MOST_CODE_POINT = 0x10FFFF


def grammar_of_regex(pattern: str) -> str:
    """The grammar of answers that a regular expression matches as a whole, in the syntax of Rust's `regex`.

    Raises:
        ConfigError: it ends within an escape.
    """
    parts: list[str] = []
    characters = iter(pattern)
    for character in characters:
        if character != "\\":
            parts.append(_IN_SLASHES.get(character, character))
            continue
        escaped = next(characters, None)
        if escaped is None:
            raise ConfigError("grammar: a regular expression can't end with a single backslash.")
        parts.append(_IN_SLASHES.get(escaped, f"\\{escaped}"))
    return f"start: /{''.join(parts) or '()'}/"


def grammar_of_pattern(pattern: re.Pattern[str]) -> str:
    """`grammar_of_regex` for a compiled pattern with its flags.

    Raises:
        ConfigError: a pattern of bytes or with re.VERBOSE.
    """
    if not isinstance(pattern.pattern, str) or pattern.flags & re.VERBOSE:
        raise ConfigError("grammar: a regular expression must be one of str, not of bytes, and without re.VERBOSE.")
    flags = "".join(letter for flag, letter in _FLAGS.items() if pattern.flags & flag)
    return grammar_of_regex(f"(?{flags}:{pattern.pattern})" if flags else pattern.pattern)


def grammar_of_choices(choices: Sequence[str]) -> str:
    """The grammar of answers that are one of these texts.

    Raises:
        ConfigError: there is no choice, or one isn't a string.
    """
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"grammar: choices must be strings, at least one; got {list(choices)[:3]!r:.80}.")
    # As a terminal, thousands of choices are one automaton.
    return f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(choice) for choice in dict.fromkeys(choices))}"


def lark_of(grammar: str) -> str:
    """A grammar as Lark: GBNF converted, anything else as it is.

    Raises:
        ConfigError: it is too long, or GBNF that can't be read.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ConfigError(f"grammar may have {MAX_GRAMMAR_CHARS:,} characters; it has {len(grammar):,}.")
    return grammar_of_gbnf(grammar) if _GBNF.search(grammar) and not _LARK.search(grammar) else grammar


def grammar_of_gbnf(grammar: str) -> str:
    """The grammar of answers that a GBNF grammar describes, from its rule `root` on.

    Raises:
        ConfigError: it can't be read; says where.
    """
    if len(grammar) > MAX_GBNF_CHARS:
        raise ConfigError(f"grammar: GBNF may have {MAX_GBNF_CHARS:,} characters; got {len(grammar):,}.")
    rules = _Reader(grammar).rules()
    if "root" not in rules:
        raise ConfigError("grammar: it must have a rule named root, as in `root ::= ...`.")
    for node in rules.values():
        for name in node.names():
            if name not in rules:
                raise ConfigError(f"grammar: the rule {name[:80]!r} is used but not defined.")
    order = _from_the_leaves(rules, "root")
    finite: set[str] = set()
    for name in order:
        if all(each in finite for each in rules[name].names()):
            finite.add(name)
    named = {name: ("R" if name in finite else "r") + str(at) for at, name in enumerate(reversed(order))}
    return "\n".join([f"start: {named['root']}", *(f"{named[name]}: {rules[name].lark(named)}" for name in named)])


@dataclass
class _Node:
    """A part of a GBNF rule: a name, a terminal's Lark text, or parts one after the other or to choose from."""

    name: str | None = None
    text: str | None = None
    choices: list[list[_Node]] = field(default_factory=list["list[_Node]"])
    repeats: str = ""

    def names(self) -> Iterator[str]:
        """The rules that it refers to."""
        if self.name is not None:
            yield self.name
        for parts in self.choices:
            for part in parts:
                yield from part.names()

    def lark(self, named: Mapping[str, str]) -> str:
        if self.name is not None:
            text = named[self.name]
        elif self.text is not None:
            text = self.text
        else:
            choices = [" ".join(part.lark(named) for part in parts) or '""' for parts in self.choices]
            text = f"({' | '.join(choices)})"
        return f"{text}{self.repeats}"


class _Reader:
    """Reads GBNF. A rule ends where the next one begins, on whatever line."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._tokens: list[re.Match[str]] = []
        at = 0
        while at < len(grammar):
            token = _TOKEN.match(grammar, at)
            if token is None:
                raise self._error(at)
            if token["space"] is None:
                self._tokens.append(token)
            at = token.end()
        self._at = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._at < len(self._tokens):
            if not self._begins_rule:
                raise self._error()
            name = self._tokens[self._at]["name"]
            self._at += 2
            if name in rules:
                raise ConfigError(f"grammar: the rule {name[:80]!r} is defined twice.")
            rules[name] = self._choices(0)
        return rules

    @property
    def _begins_rule(self) -> bool:
        ahead = self._tokens[self._at : self._at + 2]
        return len(ahead) == 2 and ahead[0]["name"] is not None and ahead[1]["define"] is not None

    def _choices(self, depth: int) -> _Node:
        if depth > _MOST_NESTED:
            raise ConfigError(f"grammar: more than {_MOST_NESTED} parentheses are open at one place.")
        choices: list[list[_Node]] = [[]]
        while self._at < len(self._tokens) and not self._begins_rule:
            token = self._tokens[self._at]
            if token["sign"] == ")":
                break
            self._at += 1
            if token["sign"] == "|":
                choices.append([])
            else:
                self._take(token, choices[-1], depth)
        return _Node(choices=choices)

    def _take(self, token: re.Match[str], parts: list[_Node], depth: int) -> None:
        """Adds a token to the parts before it."""
        if token["name"] is not None:
            parts.append(_Node(token["name"]))
        elif token["text"] is not None:
            parts.append(_Node(text=self._quoted(token)))
        elif token["chars"] is not None:
            parts.append(_Node(text=self._class(token)))
        elif token["sign"] == ".":
            parts.append(_Node(text="/(?s:.)/"))
        elif token["sign"] == "(":
            parts.append(self._choices(depth + 1))
            if self._at == len(self._tokens) or self._tokens[self._at]["sign"] != ")":
                raise ConfigError("grammar: a parenthesis isn't closed.")
            self._at += 1
        elif token["define"] is None and parts and not parts[-1].repeats:
            parts[-1].repeats = _repeats(token)
        else:
            raise self._error(token.start())

    def _quoted(self, token: re.Match[str]) -> str:
        text = "".join(chr(code) for code, _ in self._characters(token, "text"))
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise self._error(token.start())
        return json.dumps(text)

    def _class(self, token: re.Match[str]) -> str:
        characters = list(self._characters(token, "chars"))
        is_negated = characters[:1] == [(ord("^"), False)]
        characters = characters[1:] if is_negated else characters
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(characters):
            is_range = characters[at + 1 : at + 2] == [(ord("-"), False)] and at + 2 < len(characters)
            ranges.append((characters[at][0], characters[at + 2 * is_range][0]))
            at += 3 if is_range else 1
        if not ranges or any(low > high for low, high in ranges):
            raise self._error(token.start())
        parts = [f"\\u{{{low:X}}}" + ("" if low == high else f"-\\u{{{high:X}}}") for low, high in ranges]
        return f"/[{'^' if is_negated else ''}{''.join(parts)}]/"

    def _characters(self, token: re.Match[str], group: str) -> Iterator[tuple[int, bool]]:
        """The code points of a text or a class, each with whether it was escaped."""
        for found in _CHARACTER.finditer(token[group]):
            code = next((int(digits, 16) for digits in found.group(1, 2, 3) if digits), None)
            if code is None:
                escaped, plain = found.group(4, 5)
                code = ord(plain if escaped is None else _ESCAPED.get(escaped, escaped))
            if code > _MOST_CODE_POINT:
                raise self._error(token.start())
            yield code, found.group(5) is None

    def _error(self, at: int | None = None) -> ConfigError:
        """An error at a character, or at the next token."""
        at = self._tokens[self._at].start() if at is None else at
        line = self._grammar.count("\n", 0, at) + 1
        return ConfigError(f"grammar: line {line} can't be read as GBNF at {self._grammar[at : at + 40]!r}.")


def _repeats(token: re.Match[str]) -> str:
    if token["sign"] is not None:
        return token["sign"]
    least, most = token["least"], token["most"]
    return f"{{{least}}}" if token["comma"] is None else f"{{{least},{most or ''}}}"


def _from_the_leaves(rules: Mapping[str, _Node], root: str) -> list[str]:
    """The rules that `root` needs, each after the rules that it refers to where there is no circle."""
    order: list[str] = []
    seen = {root}
    open_: list[tuple[str, Iterator[str]]] = [(root, rules[root].names())]
    while open_:
        name, names = open_[-1]
        following = next((each for each in names if each not in seen), None)
        if following is None:
            order.append(name)
            open_.pop()
        else:
            seen.add(following)
            open_.append((following, rules[following].names()))
    return order
