"""Calls as models write them, damaged, and how each is read. `CASES` lists what came, its calls and its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def _tool(name: str, required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required or list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
TOOLS = [
    _tool("read", path=_TEXT),
    _tool("write", path=_TEXT, content=_TEXT),
    _tool(
        "run", command=_TEXT, timeout=_WHOLE, env={"type": "object"}, args={"type": "array"}, quiet={"type": "boolean"}
    ),
    _tool("size", ratio={"type": "number"}, note={"type": ["string", "null"]}, unit={"enum": ["kg", 7, None]}),
    _tool("either", count={"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    _tool("now"),
]

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    reply: str
    calls: Calls
    text: str = ""
    is_cut: bool = False


def xml(name: str, **values: str) -> str:
    """A call as the template writes it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def _same(reply: str, *, is_cut: bool = False) -> Case:
    """No call: the text stays as it is."""
    return Case(reply, [], reply, is_cut)


READ = xml("read", path="a.py")
A: Calls = [("read", {"path": "a.py"})]
P, F, T = "</parameter>", "</function>", "</tool_call>"
_HEAD = "<tool_call>\n<function=read>\n<parameter=path>\na.py\n"
_BODY = "<function=read>\n<parameter=path>\na.py\n</parameter>\n</function>"
_WRITE = "<tool_call>\n<function=write>\n<parameter=path>\nb\n</parameter>\n<parameter=content>\n"


def _wrote(content: str) -> Calls:
    return [("write", {"path": "b", "content": content})]


def _ran(**values: Any) -> Calls:
    return [("run", values)]


def _valued(name: str, key: str, value: str) -> str:
    return xml(name, **{key: value})


WHOLE = [
    Case(READ, A),
    Case(f"I look.\n\n{READ}", A, "I look."),
    Case(f"I look. {READ}\n\nDone.", A, "I look.Done."),
    Case(f"{READ}\n{READ}", A * 2),
    Case(f"{READ}{READ}", A * 2),
    Case(xml("now"), [("now", {})]),
    Case("<tool_call><function=now></function></tool_call>", [("now", {})]),
    Case("<tool_call><function=read><parameter=path>a.py</parameter></function></tool_call>", A),
    Case(READ, A, is_cut=True),
    Case(f"{READ}\n", A, is_cut=True),
]

MARKS_MISSING = [
    Case(_BODY, A),
    Case(f"{_BODY}\n{T}", A),
    Case(f"I look.\n{_BODY}", A, "I look."),
    Case(f"I look.\n\n{_BODY}\n{T}", A, "I look."),
    Case(f"{_BODY}\n{T}\nThat was it.", A, "That was it."),
    Case(f"{_BODY}\n{_BODY}", A * 2),
    Case(f"{_BODY}\n{READ}", A * 2),
    Case(f"{READ}\n{_BODY}", A * 2),
    Case(f"{_HEAD}{P}\n{F}", A),
    Case(f"{_HEAD}{P}\n{F}\n", A),
    Case(f"{_HEAD}{P}\n{T}", A),
    Case(f"{_HEAD}{P}", A),
    Case(f"{_HEAD}{P}\n", A),
    Case(f"{_HEAD}{F}\n{T}", A),
    Case(f"{_HEAD}{F}", A),
    Case(f"{_HEAD}{T}", A),
    Case(f"{_HEAD}{T}\n\n", A),
    Case(f"{_HEAD}{P}\n{F}\n{READ}", A * 2),
    Case(f"{_HEAD}{P}\n{READ}", A * 2),
    Case(f"{_HEAD}{F}\n{READ}", A * 2),
    Case(f"{_HEAD}{T}\n{READ}", A * 2),
    Case(f"{_HEAD}{F}\n{T}\n{READ}", A * 2),
    Case(f"<tool_call>\n<function=now>\n{T}", [("now", {})]),
    Case("<tool_call>\n<function=now>\n</function>", [("now", {})]),
    Case(f"{_WRITE}x\n{F}\n{T}", _wrote("x")),
    Case(f"<tool_call>\n<function=write>\n<parameter=path>\nb\n<parameter=content>\nx\n{P}\n{F}\n{T}", _wrote("x")),
    Case(
        f"<tool_call>\n<function=run>\n<parameter=timeout>\n5\n<parameter=command>\nls\n{P}\n{F}\n{T}",
        _ran(timeout=5, command="ls"),
    ),
    Case(f"<tool_call>\n<function=run>\n<parameter=timeout>\n5\n{F}\n{T}", _ran(timeout=5)),
    Case(f"<tool_call>\n<function=run>\n<parameter=timeout>\n5\n{T}", _ran(timeout=5)),
    Case('<tool_call>\n<function=run>\n<parameter=env>\n{"A": "1"}\n', _ran(env={"A": "1"})),
    Case(f"{_HEAD}{P}\n{F}\n{F}\n{T}", A),
    Case(f"{_HEAD}{P}\n{F}\n{T}\n{T}", A, T),
    Case(f"<tool_call>\n<function=run>\n<parameter=timeout>\n5\n{P}\n{P}\n{F}\n{T}", _ran(timeout=5)),
    Case(f"<tool_call>\n{READ}", A, "<tool_call>"),
]

# What a limit or a stop string left unfinished must not run.
CUT = [
    Case(f"{_HEAD}{P}\n{F}", A, is_cut=True),
    Case(f"{_HEAD}{P}\n{T}", A, is_cut=True),
    _same(f"{_HEAD}{P}\n", is_cut=True),
    _same(f"{_HEAD}{P}", is_cut=True),
    _same(_HEAD, is_cut=True),
    _same(_HEAD),
    _same("<tool_call>\n<function=read>\n<parameter=pa", is_cut=True),
    _same("<tool_call>\n<function=read>\n<para"),
    _same("<tool_call>\n<function=read>"),
    _same("<tool_call>\n<function=re", is_cut=True),
    _same("<tool_call>\n"),
    _same("I look. <tool_", is_cut=True),
    _same("<tool_call>\n<function=now>\n"),
    _same('<tool_call>\n{"name": "read", "argu', is_cut=True),
    _same('<tool_call>\n{"name": "read", "arguments": {"path": "a'),
    _same('<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}\n'),
    Case('<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}', A, is_cut=True),
    Case(f"{READ}\n{_HEAD}", A, _HEAD, is_cut=True),
    _same(f"{_BODY}\n", is_cut=True),
    _same('<tool_call>\n<function=run>\n<parameter=env>\n{"A": "1"}\n', is_cut=True),
    _same(f'<tool_call>\n<function=run>\n<parameter=env>\n{{"A": "1\n{P}\n{F}\n{T}'),
]

SEVERAL = [
    Case(f"<tool_call>\n{_BODY}\n{_BODY}\n{T}", A * 2),
    Case(f"<tool_call>\n{_BODY}\n<function=now>\n{F}\n{T}", [*A, ("now", {})]),
    Case(f"<tool_call>\n<function=now>\n{F}\n{_BODY}\n{T}", [("now", {}), *A]),
    Case(f"<tool_call>\n<function=read>\n<parameter=path>\na.py\n{P}\n{_BODY}\n{T}", A * 2),
    Case(
        f'<tool_call>\n{{"name": "read", "arguments": {{"path": "a.py"}}}}\n{{"name": "now", "arguments": {{}}}}\n{T}',
        [*A, ("now", {})],
    ),
    Case(
        f'<tool_call>\n[{{"name": "read", "arguments": {{"path": "a.py"}}}}, {{"name": "now"}}]\n{T}', [*A, ("now", {})]
    ),
    Case(f"First.\n{READ}\nSecond.\n{READ}\nThird.", A * 2, "First.Second.Third."),
    Case(f'{READ}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n{T}', [*A, ("now", {})]),
    Case(f"<tool_call>\n{_BODY}\n{READ}", A * 2),
]

NAMES = [
    Case(READ.replace("=read>", '="read">'), A),
    Case(READ.replace("=read>", "='read'>"), A),
    Case(READ.replace("=path>", '="path">'), A),
    Case(READ.replace("=path>", "='path'>"), A),
    Case(READ.replace("=read>", "= read >"), A),
    Case(READ.replace("=path>", " = path >"), A),
    Case(READ.replace("=read>", ' name="read">'), A),
    Case(READ.replace("=path>", ' name="path">'), A),
    Case(READ.replace("=read>", ' name = "read" >'), A),
    Case(READ.replace("<function=read>\n", "<function=read\n"), A),
    Case(READ.replace("<parameter=path>\n", "<parameter=path\n"), A),
    Case(READ.replace("</parameter>", "</parameter >"), A),
    Case(READ.replace("<tool_call>", "<tool_call >"), A),
    Case(READ.replace("\n", "\n\n", 1), A),
    Case(READ.replace(">\n<", ">\n  <"), [("read", {"path": "a.py"})]),
    _same(READ.replace("<parameter=path>\n", "<parameter=other\n")),
    _same(READ.replace("<parameter=path>", "<parameter=>")),
    _same(READ.replace("<function=read>\n", "<function=reader\n")),
]

NOT_OFFERED = [
    _same(xml("delete", path="a.py")),
    _same(f"I look.\n\n{xml('delete', path='a.py')}\nDone."),
    _same(xml("Read", path="a.py")),
    _same('<tool_call>\n{"name": "delete", "arguments": {"path": "a.py"}}\n</tool_call>'),
    _same('<tool_call>\n[{"name": "now"}, {"name": "delete"}]\n</tool_call>'),
    _same(f"<function=delete>\n<parameter=path>\na.py\n{P}\n{F}"),
    _same(xml("delete", path=READ)),
    _same(f"<function=delete>\n<parameter=path>\n{READ}\n{P}\n{F}\n{T}"),
    Case(f"{xml('delete', path='a.py')}\n{READ}", A, xml("delete", path="a.py")),
    Case(f"{READ}\n{xml('delete', path='a.py')}", A, xml("delete", path="a.py")),
    Case(f"<tool_call>\n<function=delete>\n{F}\n{_BODY}\n{T}", A, f"<tool_call>\n<function=delete>\n{F}"),
    Case(f"<tool_call>\n{_BODY}\n<function=delete>\n{F}\n{T}", A, f"<function=delete>\n{F}\n{T}"),
    _same("<tool_call>\n<function=>\n</function>\n</tool_call>"),
]

VALUES = [
    *(
        Case(_valued("run", key, written), _ran(**{key: value}))
        for key, written, value in (
            ("timeout", "5", 5),
            ("timeout", "+5", 5),
            ("timeout", '"5"', 5),
            ("timeout", "'5'", 5),
            ("timeout", "5.0", 5),
            ("timeout", " 5 ", 5),
            ("timeout", "-3", -3),
            ("timeout", "None", None),
            ("timeout", "null", None),
            ("timeout", "five", "five"),
            ("timeout", "5 s", "5 s"),
            ("timeout", "1,000", "1,000"),
            ("timeout", "1_000", "1_000"),
            ("timeout", "007", "007"),
            ("timeout", "NaN", "NaN"),
            ("timeout", "", ""),
            ("quiet", "true", True),
            ("quiet", "True", True),
            ("quiet", "FALSE", False),
            ("quiet", '"false"', False),
            ("quiet", "yes", "yes"),
            ("env", '{"A": "1"}', {"A": "1"}),
            ("env", "{'A': '1'}", {"A": "1"}),
            ("env", "{'A': \"it's\"}", {"A": "it's"}),
            ("env", "{'A': None, 'B': True, 'C': False}", {"A": None, "B": True, "C": False}),
            ("env", '{"A": 1, "B": [1, 2,],}', {"A": 1, "B": [1, 2]}),
            ("env", '{"A": +5}', {"A": 5}),
            ("env", '{"A": NaN}', '{"A": NaN}'),
            ("env", '{"A": Infinity, "B": 1e999}', '{"A": Infinity, "B": 1e999}'),
            ("env", '{"A": "two\nlines"}', {"A": "two\nlines"}),
            ("env", '{\n  "A": "1"\n}', {"A": "1"}),
            ("env", '{"A": 1', '{"A": 1'),
            ("env", "{A: 1}", "{A: 1}"),
            ("env", '{"A": 1, "A": 2}', {"A": 2}),
            ("env", "\"{'A': 1}\"", {"A": 1}),
            ("env", '{"A": "\\ud83d\\ude00"}', {"A": "😀"}),
            ("args", "['a', 'b']", ["a", "b"]),
            ("args", '["a", "b",]', ["a", "b"]),
            ("args", '"[1, 2]"', [1, 2]),
            ("args", "[]", []),
            ("args", "a b", "a b"),
            ("args", f'["{P}\\n{F}\\n{T}"]', [f"{P}\n{F}\n{T}"]),
            ("args", f"['{P}<parameter=quiet>']", [f"{P}<parameter=quiet>"]),
            ("command", "None", "None"),
            ("command", "5", "5"),
            ("command", '{"a": 1}', '{"a": 1}'),
            ("command", "'quoted'", "'quoted'"),
        )
    ),
    Case(xml("size", ratio="0.5", note="null", unit="kg"), [("size", {"ratio": 0.5, "note": None, "unit": "kg"})]),
    Case(xml("size", ratio="5", note="nullable", unit="7"), [("size", {"ratio": 5, "note": "nullable", "unit": 7})]),
    Case(xml("size", ratio="1e3", note="", unit="None"), [("size", {"ratio": 1000.0, "note": "", "unit": None})]),
    Case(xml("size", ratio="-Infinity", unit="8"), [("size", {"ratio": "-Infinity", "unit": "8"})]),
    Case(xml("size", ratio="1e999"), [("size", {"ratio": "1e999"})]),
    Case(xml("either", count="None"), [("either", {"count": None})]),
    Case(xml("either", count="'7'"), [("either", {"count": 7})]),
    Case(xml("read", path="a.py", other="5"), [("read", {"path": "a.py", "other": "5"})]),
]

JSON_FORM = [
    Case('<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>', A),
    Case('<tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call>', A),
    Case('<tool_call>\n{"name": "read", "arguments": "{\\"path\\": \\"a.py\\"}"}\n</tool_call>', A),
    Case('<tool_call>\n{"name": "read", "parameters": {"path": "a.py"}}\n</tool_call>', A),
    Case('<tool_call>\n{"arguments": {"path": "a.py"}, "name": "read"}\n</tool_call>', A),
    Case(
        '<tool_call>\n{"type": "function", "function": {"name": "read", "arguments": {"path": "a.py"}}}\n</tool_call>',
        A,
    ),
    Case('<tool_call>\n{"name": "now"}\n</tool_call>', [("now", {})]),
    Case('<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', [("now", {})]),
    Case('<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}\n</tool_call>', A),
    Case('<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}}\n</tool_call>', A),
    Case("<tool_call>\n{'name': 'read', 'arguments': {'path': 'a.py'}}\n</tool_call>", A),
    Case('<tool_call>\n{"name": "read", "arguments": {"path": "a.py",},}\n</tool_call>', A),
    Case('<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}', A),
    Case(
        '<tool_call>\n{"name": "run", "arguments": {"timeout": "5", "quiet": "True", "args": "[1]"}}\n</tool_call>',
        _ran(timeout=5, quiet=True, args=[1]),
    ),
    Case(
        '<tool_call>\n{"name": "run", "arguments": {"timeout": +5, "env": {"A": None}}}\n</tool_call>',
        _ran(timeout=5, env={"A": None}),
    ),
    Case(f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{T}"}}}}\n{T}', [("read", {"path": T})]),
    Case('<tool_call>\n{"name": "write", "arguments": {"path": "b", "content": "a\nb"}}\n</tool_call>', _wrote("a\nb")),
    Case('<tool_call>\n<function=read>\n{"path": "a.py"}\n</function>\n</tool_call>', A),
    Case('<function=read>{"path": "a.py"}</function>', A),
    Case('<tool_call>\n<function=run>{"timeout": "5"}</function></tool_call>', _ran(timeout=5)),
    _same('<tool_call>\n{"name": "run", "arguments": {"timeout": NaN}}\n</tool_call>'),
    _same('<tool_call>\n{"arguments": {"path": "a.py"}}\n</tool_call>'),
    _same('<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
    _same('<tool_call>\n{"name": "read", "arguments": [1]}\n</tool_call>'),
    _same('<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}} and\n</tool_call>'),
    _same("<tool_call>\n[1]\n</tool_call>"),
    _same("<tool_call>\n{}\n</tool_call>"),
    _same('<tool_call>\n{"name": "read", "arguments": {"path": "say "hi" now"}}\n</tool_call>'),
    _same('{"name": "read", "arguments": {"path": "a.py"}}'),
]

QUOTED = [
    _same("a <tool_call> is a mark"),
    _same("<tool_call>no</tool_call> x"),
    _same("Models write <function=read> and <parameter=path>."),
    _same("Use `<tool_call>` and `</tool_call>`."),
    _same(f"```xml\n{READ}\n```\nSo it is."),
    _same(f"~~~\n{READ}\n~~~"),
    _same(f"````\n```\n{READ}\n```\n````\n"),
    _same(f"As in `{READ}`."),
    _same(f"```\n{_BODY}\n```"),
    _same(f"Example: {_BODY}"),
    _same(f"{_BODY}\nis how I call."),
    Case(f"```xml\n{READ}\n```\nNow:\n{READ}", A, f"```xml\n{READ}\n```\nNow:"),
    Case(f"```xml\n{READ}", A, "```xml"),
    _same(f"```xml\n{READ}\nand so on"),
    Case(f"It's `a` and ``b``: {READ}", A, "It's `a` and ``b``:"),
    Case(xml("write", path="b", content=READ), _wrote(READ)),
    Case(
        xml("write", path="b", content=f"First:\n{READ}\nthen:\n{READ}\n"), _wrote(f"First:\n{READ}\nthen:\n{READ}\n")
    ),
    Case(xml("write", path="b", content=_BODY), _wrote(_BODY)),
    Case(
        xml("write", path="b", content=xml("write", path="c", content=READ)),
        _wrote(xml("write", path="c", content=READ)),
    ),
    Case(f"{_WRITE}```\n{READ}\n```\n{P}\n{F}\n{T}", _wrote(f"```\n{READ}\n```")),
    Case(xml("write", path="b", content=f"x{P}y"), _wrote(f"x{P}y")),
    Case(xml("write", path="b", content=T), _wrote(T)),
    Case(xml("write", path="b", content=F), _wrote(F)),
    Case(xml("write", path="b", content=P), _wrote(P)),
    Case(xml("write", path="b", content=f"{F}\n{T}"), _wrote(f"{F}\n{T}")),
    Case(xml("write", path="b", content=f"{P}\n{F} x"), _wrote(f"{P}\n{F} x")),
    Case(xml("write", path="b", content="<tool_call>"), _wrote("<tool_call>")),
    Case(
        xml("write", path="b", content="<function=read> and <parameter=path>"),
        _wrote("<function=read> and <parameter=path>"),
    ),
    Case(
        xml("write", path="b", content='<tool_call>\n{"name": "now"}\n</tool_call>'),
        _wrote('<tool_call>\n{"name": "now"}\n</tool_call>'),
    ),
    Case(
        xml("write", path="b", content="<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        _wrote("<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ),
    Case(xml("write", path="b", content="\n\na\n\n"), _wrote("\n\na\n\n")),
    Case(xml("write", path="b", content="a < b <"), _wrote("a < b <")),
    Case(xml("write", path="b", content='"\\\n\t\x00'), _wrote('"\\\n\t\x00')),
    Case(f"{_WRITE}x\n{P}\n{F}\n{T}", _wrote("x")),
]

# Nothing says which reading is meant.
AMBIGUOUS = [
    _same(f"<tool_call>\n<function=write>\n<parameter=path>\nb\n{P}\n\nx\n{P}\n{F}\n{T}"),
    _same(f"<tool_call>\n<function=run>\n<parameter=command>\nls\n{P}\n5\n{P}\n{F}\n{T}"),
    _same(f"{_WRITE}x\n{P}\n{F}\n<tool_call>\n<parameter=command>\nls\n{P}\n<parameter=timeout>\n5\n{P}\n{F}\n{T}"),
    _same(f"{_WRITE}x\n{F}\n{T}\n<parameter=command>\nls\n{P}\n<parameter=timeout>\n5\n{P}\n{F}\n{T}"),
    _same(f"<tool_call>\n<function=read>\n<parameter=path>\na\n{P}\n<parameter=path>\nb\n{P}\n{F}\n{T}"),
    _same(f"<tool_call>\n<function=read>\npath: a.py\n{F}\n{T}"),
    _same(f"<tool_call>\nread\n<parameter=path>\na.py\n{P}\n{F}\n{T}"),
    _same(f"<tool_call>\n<parameter=path>\na.py\n{P}\n{F}\n{T}"),
    _same(f"{_WRITE}{READ}"),
    _same(f"{_WRITE}{_HEAD}{P}\n{F}\n{T}"),
    _same(f"<tool_call>\n<function=run>\n<parameter=timeout>\n5\n{P}\nand\n{F}\n{T}"),
    _same(f'<tool_call>\n<function=read>\n{{"path": "a.py"}}\n<parameter=path>\nb\n{P}\n{F}\n{T}'),
]

CASES = [
    *WHOLE,
    *MARKS_MISSING,
    *CUT,
    *SEVERAL,
    *NAMES,
    *NOT_OFFERED,
    *VALUES,
    *JSON_FORM,
    *QUOTED,
    *AMBIGUOUS,
]
