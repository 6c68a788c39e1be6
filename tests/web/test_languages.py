"""The page's languages: each has every text that the page can ask for, and no other."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

import pytest

import qwen35mm
import qwen35mm.errors
import qwen35mm_preprocess.errors
from qwen35mm.assets import asset_path

PYTHON = Path(qwen35mm.__file__).parent
PREPROCESS = PYTHON.parent / "preprocess/qwen35mm_preprocess"
WEB = asset_path("web")
TABLES = sorted((WEB / "languages").glob("*.json"))
# `t(` as a call: not a method, not the end of another name, not the function's own head.
CALL = re.compile(r"(?<![\w.$])(?<!function )t\(\s*")
STRING = r'"(?:[^"\\\n]|\\.)*"'
# A long text stands on several lines; a call of values with braces in them isn't written here.
TEXT = re.compile(rf"({STRING}(?:\s*\+\s*{STRING})*)\s*(?:,\s*(?:(\{{[^{{}}]*\}})\s*,?\s*)?)?\)")
PLACEHOLDER = re.compile(r"\{(\w+)(?:\|[^{}]*)?\}")
VALUE = re.compile(r"\{(\w+)\}")
PLURAL = re.compile(r"\{\w+\|([^{}]*)\}")
# As many as Intl.PluralRules says: tests/web/scripts/words.test.js.
NUM_CATEGORIES = {"en": 2, "de": 2, "es": 3, "fr": 3, "zh": 1}
# What raises the errors that a person may read on the page.
HEARD = (
    *(
        PYTHON / name
        for name in ("backends/remote", "backends/zero_gpu", "chat", "decoding", "http", "model_library", "review")
    ),
    PYTHON / "tools",
    PYTHON / "web",
    *(PYTHON / name for name in ("engine/engine.py", "engine/request.py", "engine/settings.py", "model/devices.py")),
    PYTHON / "checkpoints/shards.py",
    PREPROCESS,
)
# Those that nobody reads there: how many sentences, and why they stay English.
ENGLISH_ONLY = {
    "qwen35mm/backends/remote/backend.py": (3, "options of the command line and of scripts, by their names"),
    "qwen35mm/backends/remote/deadline.py": (1, "a script's options, by their names"),
    "qwen35mm/backends/remote/media.py": (1, "a caller's sources; the page passes files only"),
    "qwen35mm/backends/remote/pool.py": (2, "servers of one caption run, as the command line names them"),
    "qwen35mm/backends/remote/request.py": (1, "a caller's arguments; the page passes checked ones"),
    "qwen35mm/backends/remote/served.py": (3, "a program's mistake: a page connects before it asks"),
    "qwen35mm/backends/remote/texts.py": (9, "what scripts alone ask for"),
    "qwen35mm/backends/zero_gpu/duration.py": (1, "options of the command line, checked before there is a page"),
    "qwen35mm/decoding/decoders.py": (1, "whoever reads it has no page any more"),
    "qwen35mm/decoding/process.py": (1, "nobody waits for it"),
    "qwen35mm/decoding/processor.py": (1, "a caller's plans; of stored ones the records speak"),
    "qwen35mm/engine/request.py": (1, "a caller's arguments; the page passes checked ones"),
    "qwen35mm/engine/settings.py": (3, "options of the command line and of scripts, checked before there is a page"),
    "qwen35mm/model/devices.py": (4, "what --device says, checked before there is a page"),
    "qwen35mm/http/run.py": (2, "what the command line names, checked before there is a page"),
    "qwen35mm/tools/servers.py": (1, "the extra that is not installed, named to whoever starts the program"),
    "qwen35mm/http/settings.py": (6, "options of the command line, checked before there is a page"),
    "qwen35mm/review/folder.py": (1, "what the command line names, checked before there is a page"),
    "qwen35mm/review/journal.py": (1, "what the command line reads; the page only writes it"),
    "qwen35mm/review/opening.py": (1, "what the command line names, checked before there is a page"),
    "qwen35mm/review/records.py": (2, "what the command line names, checked before there is a page"),
    "qwen35mm/web/__init__.py": (1, "without the extra there is no page"),
    "qwen35mm/model_library/sharing.py": (1, "an option of the command line, checked before there is a page"),
    "qwen35mm/web/desktop/window.py": (2, "said in the terminal, where there is no window"),
    "qwen35mm/web/serving/guest.py": (1, "what the command line names, checked before there is a page"),
    "qwen35mm/web/serving/mcp_tool.py": (1, "an option of the command line, checked before there is a page"),
    "qwen35mm/web/serving/server.py": (8, "options of the command line, checked before there is a page"),
    "preprocess/qwen35mm_preprocess/frames.py": (7, "what programs alone send; the page passes files only"),
    "preprocess/qwen35mm_preprocess/media.py": (4, "a caller's sources; the page passes files only"),
    "preprocess/qwen35mm_preprocess/media_plan.py": (3, "a caller's plans; of stored ones the records speak"),
    "preprocess/qwen35mm_preprocess/processor.py": (1, "a caller's plans; of stored ones the records speak"),
    "preprocess/qwen35mm_preprocess/types.py": (
        6,
        "fields of a checkpoint's files and a caller's settings, by their names",
    ),
}
OUR_ERRORS = {
    *(name for module in (qwen35mm.errors, qwen35mm_preprocess.errors) for name in vars(module) if "Error" in name),
    *("NoRoomError", "TooLongError"),
}
# What the page shows of an answer's JSON.
SHOWN = ("message", "detail", "error", "label", "hint", "reason", "note")
ENDS = {".": ".。", "?": "?？", ":": ":：", ",": ",，"}


def texts_asked_for(file: str, script: str) -> set[str]:
    """The texts of a script's calls of `t`.

    Raises:
        ValueError: a call's text can't be known from here, or a placeholder gets no value.
    """
    texts: set[str] = set()
    for call in CALL.finditer(script):
        line = f"{file}, line {script.count(chr(10), 0, call.start()) + 1}: {script[call.start() : call.end() + 60]}"
        literal = TEXT.match(script, call.end())
        if not literal:
            raise ValueError(f"{line}: expected a text in double quotes, and values")
        text = "".join(json.loads(part) for part in re.findall(STRING, literal[1]))
        for placeholder in PLACEHOLDER.findall(text):
            if not re.search(rf"[{{,]\s*{placeholder}\s*[:,}}]", literal[2] or ""):
                raise ValueError(f"{line}: {{{placeholder}}} gets no value")
        texts.add(text)
    return texts


def texts_said(file: str, source: str) -> set[str]:
    """The texts of a module's calls of `say`.

    Raises:
        ValueError: a call's text can't be known from here, or its placeholders and values differ.
    """
    texts: set[str] = set()
    for call in ast.walk(ast.parse(source if "say(" in source else "")):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "say"):
            continue
        line = f"{file}, line {call.lineno}: {ast.unparse(call)[:60]}"
        match call.args:
            case [ast.Constant(value=str(text))]:
                pass
            case _:
                raise ValueError(f"{line}: expected one text, written out")
        if {*PLACEHOLDER.findall(text)} != {str(keyword.arg) for keyword in call.keywords}:
            raise ValueError(f"{line}: expected a value for each placeholder, and no other")
        texts.add(text)
    return texts


@functools.cache
def all_texts() -> frozenset[str]:
    asked = [texts_asked_for(path.name, path.read_text("utf-8")) for path in WEB.rglob("*.js")]
    said = [
        texts_said(path.name, path.read_text("utf-8")) for part in (PYTHON, PREPROCESS) for path in part.rglob("*.py")
    ]
    return frozenset().union(*asked, *said)


def unsaid(source: str) -> list[str]:
    """English sentences of a module that go into errors, or to the page, without `say`."""
    tree = ast.parse(source)
    plain = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_sentence(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in OUR_ERRORS or node.func.id == "problem":
                found += node.args[:1]
            elif node.func.id == "Failure":
                found += node.args[1:]
        elif isinstance(node, ast.Dict):
            named = zip(node.keys, node.values, strict=True)
            found += [each for name, each in named if isinstance(name, ast.Constant) and name.value in SHOWN]
    return [
        ast.unparse(each) for each in found if _is_sentence(each) or (isinstance(each, ast.Name) and each.id in plain)
    ]


def _is_sentence(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=str(text)):
            return " " in text
        case ast.JoinedStr() | ast.Call(func=ast.Attribute(attr="format" | "join")):
            return True
        case ast.BinOp(left=left, right=right):
            return _is_sentence(left) or _is_sentence(right)
        case ast.IfExp(body=body, orelse=orelse):
            return _is_sentence(body) or _is_sentence(orelse)
    return False


def read_table(path: Path) -> dict[str, str]:
    def once(pairs: list[tuple[str, str]]) -> dict[str, str]:
        names = [name for name, _ in pairs]
        assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
        return dict(pairs)

    return json.loads(path.read_text("utf-8"), object_pairs_hook=once)


def test_the_page_offers_the_languages_there_are() -> None:
    listed = re.search(r"LANGUAGES = \{(.*?)\}", (WEB / "common/words.js").read_text("utf-8"))
    assert listed
    assert sorted(re.findall(r"(\w+):", listed[1])) == sorted(["en", *(path.stem for path in TABLES)])


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_text_is_translated_and_nothing_else(path: Path) -> None:
    assert set(read_table(path)) == all_texts()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_translations_are_whole(path: Path) -> None:
    for text, translation in read_table(path).items():
        assert isinstance(translation, str), text
        assert translation == translation.strip() != "", text
        assert sorted(VALUE.findall(translation)) == sorted(VALUE.findall(text)), text
        assert {*PLACEHOLDER.findall(translation)} <= {*PLACEHOLDER.findall(text)}, text
        for language, words in (("en", text), (path.stem, translation)):
            for forms in PLURAL.findall(words):
                assert all(form.strip() for form in forms.split("|")), text
                assert len(forms.split("|")) == NUM_CATEGORIES[language] > 1, text
        assert not re.search(r"[<>&\n]|\bundefined\b", translation), text
        assert translation[-1] in ENDS[text[-1]] if text[-1] in ENDS else translation[-1] not in ".。:：,，", text
        # Typographic quotes and apostrophes, one sign for an ellipsis.
        assert not re.search(r"[\"'`]|\.\.\.| {2}", translation), text


def test_no_visitor_is_told_what_only_an_owner_can_do() -> None:
    """On a Space and in a network visitors read the page; they have no terminal."""
    unfit = [
        text
        for text in all_texts()
        if re.search(r"Ctrl-C|make chat|(?:^|\. )(?:Start|Stop|End) (?:it|the program)", text)
    ]
    assert unfit == []


def test_french_has_its_spaces() -> None:
    for translation in read_table(WEB / "languages/fr.json").values():
        assert not re.search(r"[^\u00a0\u202f][;?!»]|[^\u00a0\u202f]:(?!//)|«[^\u00a0\u202f]", translation), translation


def test_chinese_has_its_marks() -> None:
    for translation in read_table(WEB / "languages/zh.json").values():
        assert not re.search(r"[\u4e00-\u9fff][,;:?!.]|[,;:?!][\u4e00-\u9fff]", translation), translation
        # A space between Chinese and Latin writing, placeholders too.
        assert not re.search(r"[\u4e00-\u9fff][A-Za-z0-9{]|[A-Za-z0-9}][\u4e00-\u9fff]", translation), translation


def test_errors_and_notes_are_said() -> None:
    files = [file for part in HEARD for file in ([part] if part.is_file() else part.rglob("*.py"))]
    found = {file.relative_to(PYTHON.parent).as_posix(): unsaid(file.read_text("utf-8")) for file in files}
    expected = {name: number for name, (number, _) in ENGLISH_ONLY.items()}
    wrong = {name: texts for name, texts in found.items() if len(texts) != expected.get(name, 0)}
    assert not wrong, "make them with `say`, and translate them"
    assert expected.keys() <= found.keys()


def test_unsaid_sentences_are_found() -> None:
    source = """
NotFoundError(say("There is none.")), NotFoundError(said_of(error)), NotFoundError(words), ValueError("Not ours.")
ConfigError("An error."), ConfigError(f"{n} left"), problem("A " + "sum", "not found", 404), Failure(E, "Of two.")
words = say("Said.")
text = "By name."
ConfigError(text), {"message": "A row.", "kind": "not found"}, {"error": "One." if x else "The other."}
ConfigError("{n}".format(n=1))
"""
    assert len(unsaid(source)) == 8


def test_calls_are_found() -> None:
    script = 'h(t("One"), { title: t( "{n} of {m}", { n, m: 3 }) }); insert(x); this.t(y); start("Two");'
    script += '\nh(t(\n  "A long " +\n    "text, {n}",\n  { n: number(3) },\n));'
    script += "\nexport function t(text) {}"
    assert texts_asked_for("x.js", script) == {"One", "{n} of {m}", "A long text, {n}"}
    module = 'ROWS = {"a": say("One")}\nsay("{n} of {m}", m=say("Two"), n=3)\npage.say(x)\ndef say(text): ...'
    assert texts_said("x.py", module) == {"One", "{n} of {m}", "Two"}


@pytest.mark.parametrize(
    "script", ["t(words)", "t(`Hello`)", "t('Hello')", 't("a" + b)', "t(\n'x')", 't("{n} left")', 't("{n}", { no: 1 })']
)
def test_a_text_that_cannot_be_known_is_refused(script: str) -> None:
    with pytest.raises(ValueError, match=r"x\.js, line 1"):
        texts_asked_for("x.js", script)


@pytest.mark.parametrize(
    "call",
    [
        "say(words)",
        'say(f"{n} left", n=1)',
        'say("{n} " + "left", n=1)',
        'say("a", "b")',
        'say("{n:,} left", n=1)',
        'say("{n} left")',
        'say("{n}", no=1)',
        'say("left", n=1)',
        'say("{n}", **values)',
    ],
)
def test_a_said_text_that_cannot_be_known_is_refused(call: str) -> None:
    with pytest.raises(ValueError, match=r"x\.py, line 1"):
        texts_said("x.py", call)
