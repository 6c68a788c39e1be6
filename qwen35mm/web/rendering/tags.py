"""The HTML tags that models write into Markdown: sub, sup, br, details and summary. All others stay text."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from mdit_py_plugins.utils import is_code_block

_RAISED = re.compile(r"<(su[bp])>")
_BREAK = re.compile(r"<br ?/?>")
_DETAILS = re.compile(r"<details(?: open)?>")
_SUMMARY, _SUMMARY_END, _DETAILS_END = "<summary>", "</summary>", "</details>"
_FENCES = ("```", "~~~")


def tags_plugin(markdown: MarkdownIt) -> None:
    """Adds the tags to a parser, which renders them without attributes."""
    markdown.inline.ruler.before("autolink", "tags", _inline)
    ends = ["paragraph", "reference", "blockquote", "list"]
    markdown.block.ruler.before("fence", "details", _details, {"alt": ends})


def _inline(state: StateInline, silent: bool) -> bool:
    if found := _BREAK.match(state.src, state.pos, state.posMax):
        if not silent:
            state.push("hardbreak", "br", 0)
        state.pos = found.end()
        return True
    found = _RAISED.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    tag, most = found[1], state.posMax
    end = state.src.find(f"</{tag}>", found.end(), most)
    if end < 0:
        return False
    if not silent:
        state.push(f"{tag}_open", tag, 1)
        state.pos, state.posMax = found.end(), end
        state.md.inline.tokenize(state)
        state.posMax = most
        state.push(f"{tag}_close", tag, -1)
    state.pos = end + len(f"</{tag}>")
    return True


def _details(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """A details element, up to its closing tag at a line's end, or to the end of what it stands in."""
    if is_code_block(state, start_line):
        return False
    opened = _DETAILS.match(state.src, _begin(state, start_line), state.eMarks[start_line])
    if opened is None or silent:
        return opened is not None
    end_line = parent_end(state, start_line, end_line)
    token = state.push("details_open", "details", 1)
    line, at = _skip_blank(state, start_line, opened.end(), end_line)
    if state.src.startswith(_SUMMARY, at):
        end = state.src.find(_SUMMARY_END, at, state.eMarks[line])
        if end >= 0:
            _push_summary(state, line, state.src[at + len(_SUMMARY) : end].strip())
            line, at = _skip_blank(state, line, end + len(_SUMMARY_END), end_line)
    last, end = _find_end(state, line, at, end_line)
    _tokenize(state, line, at, last, end)
    state.push("details_close", "details", -1)
    state.line = last + 1
    token.map = [start_line, state.line]
    return True


def _begin(state: StateBlock, line: int) -> int:
    return state.bMarks[line] + state.tShift[line]


def parent_end(state: StateBlock, start_line: int, end_line: int) -> int:
    """The line after the list item, or whatever else the line is in."""
    for line in range(start_line + 1, end_line):
        if state.sCount[line] < state.blkIndent and not state.isEmpty(line):
            return line
    return end_line


def _skip_blank(state: StateBlock, line: int, at: int, end_line: int) -> tuple[int, int]:
    """The place after spaces, on the next line if this one has nothing else."""
    at = state.skipSpaces(at)
    if at < state.eMarks[line] or line + 1 >= end_line:
        return line, min(at, state.eMarks[line])
    return line + 1, _begin(state, line + 1)


def _push_summary(state: StateBlock, line: int, text: str) -> None:
    state.push("summary_open", "summary", 1)
    token = state.push("inline", "", 0)
    token.content, token.map, token.children = text, [line, line + 1], []
    state.push("summary_close", "summary", -1)


def _find_end(state: StateBlock, line: int, at: int, end_line: int) -> tuple[int, int]:
    """The line and the place of the closing tag, or of the end if there is none. Tags in code don't count."""
    depth, fence = 1, ""
    for number in range(line, end_line):
        begin = at if number == line else _begin(state, number)
        text = state.src[begin : state.eMarks[number]].rstrip()
        if text.startswith(fence or _FENCES):
            fence = "" if fence else text[:3]
        elif not fence:
            depth += text.startswith("<details") - text.endswith(_DETAILS_END)
            if depth == 0:
                return number, begin + len(text) - len(_DETAILS_END)
    return end_line - 1, state.eMarks[end_line - 1]


def _tokenize(state: StateBlock, line: int, at: int, last: int, end: int) -> None:
    """Parses the blocks from the place `at` in `line` to the place `end` in `last`."""
    before = state.bMarks[line], state.tShift[line], state.sCount[line], state.eMarks[last], state.lineMax
    if at != _begin(state, line):
        state.bMarks[line], state.tShift[line], state.sCount[line] = at, 0, state.blkIndent
    state.eMarks[last], state.lineMax = end, last + 1
    state.md.block.tokenize(state, line, last + 1)
    state.bMarks[line], state.tShift[line], state.sCount[line], state.eMarks[last], state.lineMax = before
