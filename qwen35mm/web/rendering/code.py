"""Highlights code in Markdown with Pygments and CSS classes (assets/web/styles/code.css)."""

from __future__ import annotations

import html
import re
from functools import lru_cache
from itertools import chain

# Longer code, or code with a longer line, is shown without colours.
MAX_CODE_CHARS = 64_000
MAX_LINE_CHARS = 1_000
# Code is highlighted in parts of whole lines: some lexers take quadratic time, and of growing code only the last part
# is highlighted again. A string over several lines may lose its colour where two parts meet.
PART_CHARS = 4_000
CLASS_PREFIX = "hl-"

# Only these lexers, chosen by name, since a lexer is a program that runs on untrusted text.
_LANGUAGE_NAMES = """
apacheconf asm awk bash bat batch bibtex c c# c++ cc clj clojure cmake coffee coffeescript console cpp cs csharp
css cu cuda dart diff docker dockerfile elisp elixir elm erl erlang ex exs f# f90 fish fortran fsharp gas gherkin
glsl go golang gql gradle graphql groovy haskell hcl hlsl hpp hs html http ini java javascript jinja jl js json
json5 jsonc jsonl jsx julia kotlin kt kts latex less lisp llvm lua make makefile markdown mathematica matlab md
mermaid meson mysql nasm nginx nim nix objc objective-c ocaml octave pas pascal patch perl php pl postgres
postgresql powershell prolog properties proto protobuf ps1 psql pwsh py py3 pycon pyi python python3 qml r racket rb
rs rst ruby rust sas sass scala scheme scss sh shell shell-session sol solidity sql sqlite3 swift systemverilog tcl
tex tf terraform toml ts tsx twig typescript v vala vb.net vbnet verilog vhdl vim vue wast wat wgsl xml yaml yml zig
zsh
"""
LANGUAGES = frozenset(_LANGUAGE_NAMES.split())
# Names that models use and Pygments lacks.
_ALIASES = {
    "cc": "cpp",
    "gql": "graphql",
    "gradle": "groovy",
    "hpp": "cpp",
    "jsonc": "json",
    "jsonl": "json",
    "kt": "kotlin",
    "kts": "kotlin",
    "mermaid": "text",
    "patch": "diff",
    "sol": "solidity",
    "tf": "terraform",
    "vue": "html",
}
_NAME = re.compile(r"[\w.+#-]{1,24}", re.ASCII)
_ENDING = re.compile(r"[a-z][a-z0-9]*")
# How Pygments writes the names of a language's files.
_PATTERN = re.compile(r"\*\.([a-z]\w*)")
# How files end, of languages that Pygments knows no ending of, or one that is rarely seen.
_ENDINGS = dict.fromkeys(("postgres", "postgresql", "psql", "sqlite3"), "sql") | {
    "apacheconf": "conf",
    "docker": "dockerfile",
    "dockerfile": "dockerfile",
    "fortran": "f90",
    "glsl": "glsl",
    "jinja": "j2",
    "lisp": "lisp",
    "make": "makefile",
    "makefile": "makefile",
    "mathematica": "wl",
    "mermaid": "mmd",
    "nginx": "conf",
    "prolog": "pl",
    "pycon": "txt",
}


def code_html(code: str, info: str) -> str:
    """A block of code under a bar with the language's name, to which the page adds buttons.

    Args:
        code: the source text.
        info: the text after the opening fence; its first word is the language.
    """
    words = info.split()
    written = words[0] if words else ""
    language = written if _NAME.fullmatch(written) else "text"
    body = highlight(code, language.lower())
    return (
        f'<div class="code" dir="ltr" data-ending="{file_ending(language.lower())}">'
        f'<div class="code-bar"><span>{html.escape(language)}</span></div>'
        f"<pre><code>{body}</code></pre></div>\n"
    )


def file_ending(language: str) -> str:
    """How files of a language end, without the dot; "txt" where that isn't known."""
    if language in _ENDINGS:
        return _ENDINGS[language]
    lexer = _lexer(language) if language in LANGUAGES else None
    known = [found[1] for pattern in getattr(lexer, "filenames", []) if (found := _PATTERN.fullmatch(pattern))]
    # Names such as "cc" are endings, those such as "bash" are the language's.
    if known and (language not in known or len(language) > 3):
        return known[0]
    return language if _ENDING.fullmatch(language) else "txt"


def highlight(code: str, language: str) -> str:
    """HTML of `code`: spans with Pygments' classes if `language` is in `LANGUAGES`, else escaped text."""
    if language not in LANGUAGES or len(code) > MAX_CODE_CHARS:
        return html.escape(code)
    if max(map(len, code.splitlines()), default=0) > MAX_LINE_CHARS:
        return html.escape(code)
    return "".join(_highlighted(part, _ALIASES.get(language, language)) for part in _parts(code))


def _parts(code: str) -> list[str]:
    """Splits `code` at line ends. A split depends only on the text before it, so growing code keeps its parts."""
    parts, start = [], 0
    while len(code) - start > PART_CHARS:
        end = start + PART_CHARS
        # Best after a blank line, before one that isn't indented. A line is never longer than a part.
        blank = max((m.end() for m in re.finditer(r"\n\n(?=\S)", code[start:end])), default=0)
        cut = start + blank if blank > PART_CHARS // 2 else code.rindex("\n", start, end) + 1
        parts.append(code[start:cut])
        start = cut
    return [*parts, code[start:]]


@lru_cache(maxsize=256)
def _highlighted(code: str, language: str) -> str:
    from pygments.token import STANDARD_TYPES, Token

    lexer = _lexer(language)
    if lexer is None:
        return html.escape(code)
    # Some lexers lose a last line without a line end.
    added = "" if code.endswith("\n") else "\n"
    tokens = list(lexer.get_tokens(code + added))
    if "".join(text for _, text in tokens) != code + added:
        return html.escape(code)
    if added:
        while not tokens[-1][1]:
            tokens.pop()
        kind, text = tokens.pop()
        tokens.append((kind, text[:-1]))
    out: list[str] = []
    last, pending = "", ""
    # The empty token at the end flushes what is pending.
    for kind, text in chain(tokens, [(Token, "")]):
        name = next(STANDARD_TYPES[known] for known in reversed(kind.split()) if known in STANDARD_TYPES)
        name = "" if name in ("w", "n", "p") or kind is Token else name
        if text and name == last:
            pending += text
            continue
        if pending:
            escaped = html.escape(pending)
            out.append(f'<span class="{CLASS_PREFIX}{last}">{escaped}</span>' if last else escaped)
        last, pending = name, text
    return "".join(out)


@lru_cache(maxsize=256)
def _lexer(language: str):
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False, startinline=True)
    except ClassNotFound:
        return None
