"""Previews of text files: the first rows of a table, or the first lines of highlighted code."""

from __future__ import annotations

import csv
import io
from typing import Any, Literal

from qwen35mm.web.rendering.code import LANGUAGES, code_html

# How much of a file is read for its preview.
PREVIEW_BYTES = 64 << 10
_MAX_ROWS = 20
_MAX_COLUMNS = 20
_MAX_CELL_CHARS = 120
_MAX_LINES = 60
_MAX_LINE_CHARS = 400
_TABLES = {"csv": ",;\t|", "tsv": "\t", "tab": "\t"}
# Suffixes that differ from the language's name.
_LANGUAGES = {
    "cjs": "js",
    "cxx": "cpp",
    "dockerfile": "dockerfile",
    "h": "c",
    "hh": "cpp",
    "htm": "html",
    "makefile": "makefile",
    "mjs": "js",
    "pl": "perl",
    "svg": "xml",
    "xsd": "xml",
    "xsl": "xml",
}


def form_of(name: str) -> Literal["table", "code"] | None:
    """The form of a text file's preview by its name; None without a preview."""
    if _suffix(name) in _TABLES:
        return "table"
    return "code" if _language(name) else None


def preview_text(text: str, name: str, *, is_whole: bool) -> dict[str, Any]:
    """A text's first rows or lines as JSON values: `rows` of cells or safe `html`, and whether there is `more`.

    Args:
        text: the file's text, or its beginning.
        is_whole: whether `text` is the whole file.
    """
    if _suffix(name) in _TABLES and (rows := _rows(text, _TABLES[_suffix(name)], is_whole)):
        cut = [[cell[:_MAX_CELL_CHARS] for cell in row[:_MAX_COLUMNS]] for row in rows[:_MAX_ROWS]]
        more = not is_whole or len(rows) > _MAX_ROWS or max(map(len, rows)) > _MAX_COLUMNS
        return {"rows": cut, "html": None, "more": more}
    lines = text.splitlines()
    cut = "\n".join(line[:_MAX_LINE_CHARS] for line in lines[:_MAX_LINES])
    return {
        "rows": None,
        "html": code_html(cut, _language(name) or "text"),
        "more": not is_whole or len(lines) > _MAX_LINES,
    }


def _rows(text: str, delimiters: str, is_whole: bool) -> list[list[str]]:
    """The rows of a table; empty if the text is no table."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(delimiters, key=first.count)
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if row]
    except csv.Error:
        return []
    # The last row may be cut off.
    return rows if is_whole else rows[:-1]


def _language(name: str) -> str | None:
    suffix = _suffix(name)
    return _LANGUAGES.get(suffix) or (suffix if suffix in LANGUAGES else None)


def _suffix(name: str) -> str:
    return name.lower().rpartition(".")[2]
