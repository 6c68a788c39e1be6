"""Parses tool calls in a streaming reply, in the forms of Qwen's templates.

    <tool_call>                          <tool_call>
    <function=weather>                   {"name": "weather", "arguments": {"place": "Bonn"}}
    <parameter=place>                    </tool_call>
    Bonn
    </parameter>
    </function>
    </tool_call>

Models write these forms with damage, and any template's model writes either. What is read:

- The opening `<tool_call>` may be missing before a `<function=` that begins a line. Such a call counts if
  `</tool_call>` closes it, or if nothing but calls follows.
- Closing marks may be missing if the reply ends, or another call or (for `</parameter>`) another parameter follows, and
  at least one mark closes the last value. A reply that was cut off needs `</function>` or `</tool_call>`.
- Names may be in quotes or attributes, headers may lack their `>`, blocks may hold several calls.
- Values follow the schema: Python's literals, trailing commas, numbers in quotes. A text that its schema can't mean
  stays a string, for the tool to refuse. NaN and infinities stay text.

What stays text, as it was written: a call of a function that wasn't offered (if any were), a call whose value nothing
closes, one with a parameter given twice or with other text inside, one with marks in a value and a parameter missing or
unknown, and a call in a code fence or in code inside a line, unless nothing but calls follows it. Nothing is lost.

A string value is written raw, so some can't be told from the end of their parameter. Every string is read back as it
was written, except one with

- `</parameter>`, white space, and `<parameter=`, `<function=`, `<tool_call>` or both of `</function>` and
  `</tool_call>`, unless a whole call that the string quotes has them;
- a line that begins with `<parameter=` and the name of a parameter that wasn't given, before any other mark;
- the beginning of a call, up to the value of a parameter, without its end;
- the text `null` where the schema allows null, too, or the JSON of a value that is no string and that the schema lists.

The name of a parameter is read back unless it has `>`, a line end, quotes around it, space at its ends, or more than
256 characters.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qwen35mm.contract import ToolCall
from qwen35mm.errors import PromptError
from qwen35mm.prompt.call_marks import Code, Marks, Token
from qwen35mm.prompt.call_parts import NO_CALL, Call, JsonObject, JsonValue, RawValue, is_space, properties_of
from qwen35mm.prompt.call_values import ValueReader, read_literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CallForm = Literal["xml", "json"]


@dataclass(frozen=True)
class CallBegun:
    """A call that is certain to be one. Its arguments and its end follow."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next part of a call's arguments, as JSON; all parts together are the JSON of the call's arguments."""

    index: int
    json: str


@dataclass(frozen=True)
class CallLost:
    """A begun call won't end: the reply was cut off, or damaged. `text` is the call as it was written."""

    index: int
    text: str


Found = str | CallBegun | CallArguments | CallLost | ToolCall


class CallParser:
    """Takes a reply's text in deltas; returns its text and its calls.

    A call comes as `CallBegun`, its `CallArguments` and the whole `ToolCall`, or ends with `CallLost`. How the text is
    cut into deltas changes nothing. The work is linear in the text.

    Args:
        tools: definitions in OpenAI's form, whose schemas tell numbers from strings; only these may be called. Without
            any, every name may.
        only_last: calls count only if nothing but calls follows; else they are text.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), *, only_last: bool = False) -> None:
        self._schemas = dict(_schema(tool) for tool in tools)
        self._only_last = only_last
        self._marks = Marks()
        self._code = Code()
        self._found: list[Found] = []
        self._num_calls = 0
        self._state: Callable[[Token], None] = self._outside
        # Tokens that the state has yet to take.
        self._waiting: deque[Token] = deque()
        # White space before what comes next: text keeps it, a call drops it.
        self._space: list[str] = []
        self._drops_space = False
        # The block that is being read, as it was written since its last whole call.
        self._raw: list[str] = []
        self._is_held = False
        self._is_quoted = False
        # Calls that count only if nothing but calls follows, and their text.
        self._held: list[ToolCall] = []
        self._held_raw: list[str] = []
        self._call = NO_CALL
        self._raw_value = RawValue("", ValueReader(None, {}), has_begun=False)
        self._value = JsonValue("", ValueReader(None, {}))
        self._json = JsonObject()

    def push(self, text: str) -> list[Found]:
        """Takes the next delta. Returns non-empty texts and calls, in order."""
        self._take(*self._marks.push(text))
        return self._taken()

    def flush(self, *, is_cut: bool = False) -> list[Found]:
        """Returns the rest at the end.

        Args:
            is_cut: a limit or a stop string ended the reply, so that its last call may be incomplete.
        """
        self._take(*self._marks.flush())
        self._end(is_cut=is_cut)
        return self._taken()

    # The states: each takes a token and chooses the next.

    def _outside(self, token: Token) -> None:
        if token.kind == "tool_call":
            self._open(token, is_bare=False)
            self._state = self._opened
        elif token.kind == "function" and not token.is_broken and self._code.is_at_start:
            self._open(token, is_bare=True)
            self._function(token)
        else:
            self._say(token.raw)

    def _opened(self, token: Token) -> None:
        """After `<tool_call>`."""
        if token.kind == "function" and (not token.is_broken or token.name in self._schemas):
            self._function(token)
        elif _begins(token, "{["):
            self._json = JsonObject()
            self._state = self._json_call
            self._json_call(token)
        elif not is_space(token):
            self._fail(token)

    def _function(self, token: Token) -> None:
        """After `<function=...>`, and after each of its parameters."""
        call = self._call
        if token.kind == "function" and not call.is_open:
            self._call = Call(token.name, self._schemas.get(token.name, {}), is_offered=self._is_offered(token.name))
            self._state = self._function
        elif token.kind == "parameter":
            self._parameter(token)
        elif token.kind == "/function":
            self._end_call()
        elif token.kind == "/tool_call" or (token.kind in ("function", "tool_call") and call.arguments):
            # Its closing mark is missing.
            self._untake(1)
            self._end_call()
            self._retake(token)
        elif _begins(token, "{") and not call.arguments:
            self._json = JsonObject()
            self._state = self._json_arguments
            self._json_arguments(token)
        elif token.kind != "/parameter" and not is_space(token):
            self._fail(token)

    def _parameter(self, token: Token) -> None:
        call = self._call
        is_unsure = (token.is_broken or (call.is_doubtful and call.properties)) and token.name not in call.properties
        if is_unsure or call.is_whole or token.name in call.arguments:
            self._fail(token)
            return
        reader = ValueReader(call.properties.get(token.name), call.schema)
        if not self._is_held and call.is_offered:
            self._tell_parameter(token.name)
        if reader.is_text:
            self._raw_value = RawValue(token.name, reader, has_begun=token.is_broken)
            self._state = self._in_raw_value
        else:
            self._value = JsonValue(token.name, reader)
            self._state = self._in_value

    def _in_raw_value(self, token: Token) -> None:
        """Inside a value that is written as it is: a mark may belong to it."""
        value, run = self._raw_value, self._raw_value.run_kinds
        is_ended = run[:2] == ["/parameter", "/function"]
        if token.kind == "text":
            if run and is_space(token):
                value.wait(token)
            elif run and run[-1] == "tool_call" and _begins(token, "{"):
                self._end_raw_value(token)
            else:
                self._add(token)
        elif token.kind == "/parameter":
            if value.closes(token):
                self._add(token)
            else:
                self._add()
                value.wait(token)
        elif token.kind in ("/function", "/tool_call"):
            if run[:1] != ["/parameter"] and value.closes(token):
                self._add(token)
                return
            value.wait(token)
            if is_ended and token.kind == "/tool_call":
                self._end_raw_value()
        elif token.kind == "parameter":
            is_next = run == ["/parameter"] and (not token.is_broken or token.name in self._call.properties)
            if is_next or (not run and self._is_next(token)):
                self._end_raw_value(token)
            else:
                self._add(token)
        elif token.kind == "tool_call" and run and value.is_sure and "tool_call" not in run:
            value.wait(token)
        elif token.kind == "function" and run and value.is_sure and (is_ended or self._is_offered(token.name)):
            self._end_raw_value(token)
        else:
            self._add(token)

    def _is_next(self, token: Token) -> bool:
        """Whether a parameter begins although the one before isn't closed."""
        value, call = self._raw_value, self._call
        is_new = token.name in call.properties and token.name not in call.arguments and token.name != value.name
        return is_new and not token.is_broken and value.is_at_line and value.is_plain

    def _add(self, token: Token | None = None) -> None:
        """Adds the marks that wait, and the token, to the value."""
        value = self._raw_value
        known = value.add(token)
        if known and self._call.is_begun:
            self._tell(_escaped(known) if value.is_told else f'"{_escaped(known)}')
            value.is_told = True

    def _end_raw_value(self, *following: Token) -> None:
        """Ends the value before the marks that wait, and takes these again, and the tokens after them."""
        value, call = self._raw_value, self._call
        read = value.reader.read(value.text)
        call.arguments[value.name] = read
        call.is_doubtful |= not value.is_plain
        if call.is_begun:
            self._tell('"' if value.is_told else _dumped(read))
        tokens = [*value.run, *following]
        self._untake(len(tokens))
        self._state = self._function
        self._retake(*tokens)

    def _in_value(self, token: Token) -> None:
        """Inside a JSON value, whose strings may hold marks."""
        value, call = self._value, self._call
        is_end = token.kind == "/parameter" or (not value.scanner.depth and not token.is_broken)
        if token.kind == "text" or value.scanner.in_string or not is_end:
            value.push(token.raw)
            return
        read = value.reader.read(value.text)
        call.arguments[value.name] = read
        if call.is_begun:
            self._tell(_dumped(read))
        self._state = self._function
        if token.kind != "/parameter":
            self._untake(1)
            self._retake(token)

    def _json_call(self, token: Token) -> None:
        """Inside `{"name": ..., "arguments": ...}` or a list of these."""
        if token.kind == "text" or self._json.scanner.in_string:
            rest = self._json.push(token.raw)
            if rest is not None:
                self._split(token, rest, self._after_json)
        elif token.kind == "/tool_call" and self._json.close():
            self._untake(1)
            self._state = self._after_json
            self._retake(token)
        else:
            self._fail(token)

    def _after_json(self, token: Token) -> None:
        """After a JSON call: something must close it, or another call must follow."""
        if token.kind == "text":
            following = token.raw.lstrip(" \t\r\n,}")
            if not following:
                return
            if following[0] != "{":
                self._fail(token)
                return
        calls = self._json_calls() if token.kind in ("text", "tool_call", "/tool_call") else None
        if calls is None:
            self._fail(token)
            return
        self._untake(1)
        self._finish(calls)
        if token.kind == "text":
            self._state = self._opened
            token = Token("text", token.raw.lstrip(" \t\r\n,}"))
        self._retake(token)

    def _json_calls(self) -> list[ToolCall] | None:
        """The calls that were read; None if one isn't a call of an offered function."""
        try:
            read = read_literal(self._json.text)
            calls = [self._call_of(each) for each in (read if isinstance(read, list) else [read])]
        except (ValueError, KeyError, TypeError, AttributeError, PromptError):
            return None
        return calls if calls and all(self._is_offered(call.name) for call in calls) else None

    def _call_of(self, values: Any) -> ToolCall:
        values = values["function"] if isinstance(values.get("function"), dict) else values
        arguments = values["arguments"] if "arguments" in values else values.get("parameters")
        arguments = read_literal(arguments) if isinstance(arguments, str) else arguments
        return self._fitted(values["name"], {} if arguments is None else arguments)

    def _fitted(self, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        schema = self._schemas.get(name, {})
        properties = properties_of(schema)
        fitted = {key: ValueReader(properties.get(key), schema).fitted(value) for key, value in arguments.items()}
        return ToolCall(name, fitted)

    def _json_arguments(self, token: Token) -> None:
        """Inside a JSON object that a function has instead of parameters."""
        if token.kind != "text" and not self._json.scanner.in_string:
            self._fail(token)
            return
        rest = self._json.push(token.raw)
        if rest is None:
            return
        try:
            made = self._fitted(self._call.name, read_literal(self._json.text))
        except (ValueError, AttributeError, PromptError):
            self._fail(token)
            return
        self._call.arguments = dict(made.arguments)
        self._call.is_whole = True
        self._split(token, rest, self._function)

    def _after_call(self, token: Token) -> None:
        """Inside a block, after a whole call."""
        if token.kind == "/tool_call":
            self._end_block(is_closed=True)
        elif token.kind == "function" and not token.is_broken:
            if not self._call.is_offered:
                self._untake(1)
                self._say(self._taken_raw())
                self._raw = [token.raw]
            self._function(token)
        elif token.kind in ("tool_call", "parameter", "function") or (token.kind == "text" and not is_space(token)):
            self._untake(1)
            self._end_block(is_closed=False)
            self._retake(token)

    # What the states do.

    def _take(self, *tokens: Token) -> None:
        self._waiting += tokens
        while self._waiting:
            token = self._waiting.popleft()
            if self._state != self._outside:
                self._raw.append(token.raw)
            self._state(token)

    def _retake(self, *tokens: Token) -> None:
        """Leaves tokens to the next state: the last act of a state. One text may hold any number of calls."""
        self._waiting.extendleft(reversed(tokens))

    def _untake(self, number: int) -> None:
        """Forgets the last tokens, which another state will take."""
        del self._raw[len(self._raw) - number :]

    def _split(self, token: Token, rest: str, state: Callable[[Token], None]) -> None:
        """Leaves the end of the last token to another state."""
        self._raw[-1] = token.raw[: len(token.raw) - len(rest)]
        self._state = state
        if rest:
            self._retake(Token("text", rest))

    def _open(self, token: Token, *, is_bare: bool) -> None:
        self._raw = [*self._space, token.raw]
        self._space = []
        self._is_quoted = self._only_last or self._code.is_inside
        self._is_held = self._is_quoted or is_bare or bool(self._held)
        self._call = NO_CALL

    def _is_offered(self, name: str) -> bool:
        return bool(name) and (name in self._schemas or not self._schemas)

    def _fail(self, token: Token | None = None) -> None:
        """What was read since the last whole call is text, and the token comes after it."""
        if token is not None:
            self._untake(1)
        raw, call = self._taken_raw(), self._call
        self._state, self._call = self._outside, NO_CALL
        if call.is_begun:
            self._found.append(CallLost(self._num_calls - 1, raw))
            self._drops_space = False
        else:
            self._say(raw)
        if token is not None:
            self._retake(token)

    def _taken_raw(self) -> str:
        raw, self._raw = "".join(self._raw), []
        return raw

    def _tell_parameter(self, name: str) -> None:
        call = self._call
        if not call.is_begun:
            call.is_begun = True
            self._found.append(CallBegun(self._num_calls, call.name))
            self._num_calls += 1
        self._tell(f"{', ' if call.arguments else '{'}{_dumped(name)}: ")

    def _tell(self, text: str) -> None:
        self._found.append(CallArguments(self._num_calls - 1, text))

    def _end_call(self) -> None:
        """The call is whole."""
        call = self._call
        call.is_open = False
        self._state = self._after_call
        if not call.is_offered:
            return
        if call.is_doubtful and call.lacks_arguments:
            self._fail()
            return
        try:
            made = ToolCall(call.name, call.arguments)
        except PromptError:
            self._fail()
            return
        if not call.is_begun:
            self._finish([made])
            return
        self._tell("}")
        self._found.append(made)
        self._raw, self._call = [], NO_CALL
        self._forget_space()

    def _finish(self, calls: Sequence[ToolCall]) -> None:
        """Takes whole calls that weren't told."""
        self._state, self._call = self._after_call, NO_CALL
        if self._is_held:
            self._held += calls
            self._held_raw.append(self._taken_raw())
        else:
            self._raw = []
            self._give(calls)

    def _give(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            index, self._num_calls = self._num_calls, self._num_calls + 1
            told = CallArguments(index, _dumped(dict(call.arguments)))
            self._found += [CallBegun(index, call.name), told, call]
        self._forget_space()

    def _forget_space(self) -> None:
        self._space, self._drops_space = [], True
        self._code.end_line()

    def _end_block(self, *, is_closed: bool) -> None:
        self._state = self._outside
        raw = self._taken_raw()
        if not self._call.is_offered:
            self._say(raw)
        elif self._held and (self._is_quoted or not is_closed):
            self._held_raw.append(raw)
        elif self._held:
            self._give(self._taken_held())

    def _taken_held(self) -> list[ToolCall]:
        held, self._held, self._held_raw = self._held, [], []
        return held

    def _say(self, text: str) -> None:
        """Takes text outside calls."""
        if self._held and not text.strip():
            self._held_raw.append(text)
            return
        if self._held:
            # They were no calls, since this follows.
            text = "".join([*self._held_raw, text])
            self._taken_held()
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        self._code.push(text)
        known = text.rstrip()
        if known:
            self._found.append("".join([*self._space, known]))
            self._space = []
        if len(text) > len(known):
            self._space.append(text[len(known) :])

    def _end(self, *, is_cut: bool) -> None:
        if self._state == self._in_raw_value and self._raw_value.is_closed(is_cut=is_cut):
            self._end_raw_value()
            self._take()
        elif self._state == self._in_value and self._value.is_closed and not is_cut:
            self._in_value(Token("/parameter", ""))
        elif self._state == self._after_json and (calls := self._json_calls()) is not None:
            self._finish(calls)
        if self._state == self._function and self._call.arguments and not is_cut:
            self._end_call()
        if self._state == self._after_call:
            self._end_block(is_closed=False)
        elif self._state != self._outside:
            self._fail()
        if self._held and is_cut:
            held = "".join(self._held_raw)
            self._taken_held()
            self._say(held)
        elif self._held:
            self._give(self._taken_held())
        self._found += self._space
        self._space = []

    def _taken(self) -> list[Found]:
        """What was found, with neighbours joined."""
        found: list[Found] = []
        texts: list[str] = []

        def join() -> None:
            if texts:
                last = found[-1]
                text = "".join(texts)
                found[-1] = CallArguments(last.index, text) if isinstance(last, CallArguments) else text
                texts.clear()

        for each in self._found:
            last = found[-1] if found else None
            is_same = isinstance(each, CallArguments) and isinstance(last, CallArguments) and each.index == last.index
            if not is_same and not (isinstance(each, str) and isinstance(last, str)):
                join()
                found.append(each)
            if isinstance(each, str | CallArguments):
                texts.append(each if isinstance(each, str) else each.json)
        join()
        self._found = []
        return found


def read_calls(
    text: str, tools: Sequence[Mapping[str, Any]], *, is_cut: bool = False, only_last: bool = False
) -> tuple[str, tuple[ToolCall, ...]]:
    """A whole reply's text without its calls, and the calls. Arguments as `CallParser`'s."""
    parser = CallParser(tools, only_last=only_last)
    found = [*parser.push(text), *parser.flush(is_cut=is_cut)]
    calls = tuple(each for each in found if isinstance(each, ToolCall))
    texts = (each.text if isinstance(each, CallLost) else each for each in found)
    return "".join(each for each in texts if isinstance(each, str)), calls


def form_of(template: str) -> CallForm | None:
    """The form of a template's calls; None if it has no calls."""
    return None if OPEN not in template else "xml" if "<function=" in template else "json"


def _schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A tool's name and its parameters' schema."""
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    return str(function.get("name")), parameters if isinstance(parameters, Mapping) else {}


def _begins(token: Token, marks: str) -> bool:
    """Whether a text begins with one of these characters, after white space."""
    text = token.raw.lstrip()
    return token.kind == "text" and text[:1] != "" and text[0] in marks


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _escaped(text: str) -> str:
    """A part of a JSON string."""
    return _dumped(text)[1:-1]
