r"""Finds LaTeX formulas in Markdown and renders them as MathML.

Formulas are `\( \)`, `\[ \]`, `$ $`, `$$ $$` and amsmath's environments. latex2mathml makes the tree of a formula. This
module writes the tree with an allow-list, because latex2mathml's own writer lets `\text{<script>}` through.
"""

from __future__ import annotations

import html
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

# A longer formula is shown as its source.
MAX_LATEX_CHARS = 2_000
MAX_MATHML_CHARS = 60_000
MAX_DEPTH = 60

_MATHML_TAGS = """
math mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow mspace msqrt mstyle msub
msubsup msup mtable mtd mtext mtr munder munderover menclose none
"""
MATHML_TAGS = frozenset(_MATHML_TAGS.split())
_MATHML_ATTRIBUTES = """
accent columnspacing depth display displaystyle fence form height largeop linethickness lspace mathbackground
mathcolor mathsize mathvariant maxsize minsize movablelimits notation rowspacing rspace scriptlevel stretchy
voffset width
"""
MATHML_ATTRIBUTES = frozenset(_MATHML_ATTRIBUTES.split())
_NUM_CHILDREN = {"mfrac": 2, "mover": 2, "mroot": 2, "msub": 2, "msubsup": 3, "msup": 2, "munder": 2, "munderover": 3}
ALIGNMENTS = frozenset(("left", "center", "right"))
_VALUE = re.compile(r"[\w#%.+ -]{1,64}", re.ASCII)
_CHARACTER = re.compile(r"&#x([0-9A-Fa-f]{1,6});")
# Commands that define macros or double the tree at every level: a few characters could take gigabytes.
_REFUSED = re.compile(r"\\(?:def|newcommand|newenvironment|DeclareMathOperator|sideset)(?![A-Za-z])")
# Environments that latex2mathml lacks, or would number.
_RENAMED = re.compile(
    r"\\(begin|end)\s*\{(?:aligned|align|alignat\*?|alignedat|flalign\*?|eqnarray\*?|gather\*?|gathered|multline\*?)\}"
)
_COLUMNS = re.compile(r"(\\begin\s*\{align(?:at\*?|edat)\})\s*\{\d*\}")
_DROPPED = re.compile(r"\\(?:begin|end)\s*\{equation\*?\}|\\label\s*\{[^{}]*\}|\\(?:nonumber|notag)(?![A-Za-z])")

_ENVIRONMENTS = (
    "align|alignat|aligned|array|Bmatrix|bmatrix|cases|eqnarray|equation|flalign|gather|gathered|matrix|multline|"
    "pmatrix|split|Vmatrix|vmatrix"
)
_OPENING = re.compile(rf"\$\$|\\\[|\\begin\{{((?:{_ENVIRONMENTS})\*?)\}}")
_PAIRS = {r"\(": r"\)", r"\[": r"\]", "$$": "$$"}


def math_plugin(md: MarkdownIt) -> None:
    """Adds block and inline formulas to `md`."""
    interrupted = ["paragraph", "reference", "blockquote", "list"]
    md.block.ruler.before("fence", "math_block", _math_block, {"alt": interrupted})
    md.inline.ruler.before("escape", "math_inline", _math_inline)
    md.add_render_rule("math_block", lambda _self, tokens, index, _options, _env: _block_html(tokens[index]))
    md.add_render_rule("math_inline", lambda _self, tokens, index, _options, _env: _inline_html(tokens[index]))


@lru_cache(maxsize=512)
def mathml(latex: str, display: bool) -> str | None:
    """A formula as MathML; None if it is too long or not supported.

    Args:
        latex: the formula without its delimiters.
        display: True for a formula on its own line.
    """
    if len(latex) > MAX_LATEX_CHARS or _REFUSED.search(latex):
        return None
    # Imported here, because it reads a table of 2,500 symbols that the first page doesn't need.
    from latex2mathml.converter import Converter

    try:
        tree = Converter(display="block" if display else "inline").convert_to_element(_prepared(latex))
        out: list[str] = []
        _write(tree, out, 0)
    except Exception:  # The library raises many kinds: KeyError, StopIteration, RecursionError and its own.
        return None
    written = "".join(out)
    return written if len(written) <= MAX_MATHML_CHARS else None


def source_html(latex: str) -> str:
    """A formula as its LaTeX source."""
    return f'<code class="math">{html.escape(latex.strip())}</code>'


def _prepared(latex: str) -> str:
    latex = _COLUMNS.sub(r"\1", latex)
    return _RENAMED.sub(r"\\\1{align*}", _DROPPED.sub(" ", latex)).strip()


def _write(element: Element, out: list[str], depth: int) -> None:
    if depth > MAX_DEPTH or element.tag not in MATHML_TAGS:
        raise ValueError(element.tag)
    if len(element) != _NUM_CHILDREN.get(element.tag, len(element)):
        raise ValueError(element.tag)  # For example half a fraction, for which browsers show an error.
    text = _CHARACTER.sub(_character, element.text or "")
    if element.tag == "mi" and (text.startswith("\\") or text == "&"):
        raise ValueError(text)  # An unknown command, or a column outside a table.
    # Browsers no longer read a width relative to the content; the attributes with it would misplace the label.
    given = {} if element.get("width", "").startswith("+") else element.attrib
    attributes = [f' {k}="{v}"' for k, v in given.items() if k in MATHML_ATTRIBUTES and _VALUE.fullmatch(v)]
    # Browsers no longer read `columnalign`; the style sheet does.
    if (alignment := element.get("columnalign")) in ALIGNMENTS:
        attributes.append(f' class="align-{alignment}"')
    out.append(f"<{element.tag}{''.join(attributes)}>{html.escape(text)}")
    for child in element:
        _write(child, out, depth + 1)
    out.append(f"</{element.tag}>")


def _character(match: re.Match[str]) -> str:
    number = int(match[1], 16)
    is_text = 0x20 <= number <= 0x10FFFF and not 0xD800 <= number <= 0xDFFF
    return chr(number) if is_text else "\ufffd"


def _block_html(token) -> str:
    latex = token.content
    if token.meta["open"]:
        # Unfinished: as source, so that half a formula doesn't change its layout at every character.
        return f'<div class="math">{source_html(latex)}</div>\n'
    return f'<div class="math">{mathml(latex.strip(), True) or source_html(latex)}</div>\n'


def _inline_html(token) -> str:
    return mathml(token.content.strip(), token.markup in ("$$", r"\[")) or source_html(token.content)


def _math_block(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """A formula from the beginning of a line to the end of one, or unfinished at the end of the text."""
    begin = state.bMarks[start_line] + state.tShift[start_line]
    opening = _OPENING.match(state.src, begin, state.eMarks[start_line])
    if opening is None or state.is_code_block(start_line):
        return False
    closing = _PAIRS.get(opening.group()) or f"\\end{{{opening[1]}}}"
    closed = ""
    lines: list[str] = []
    for line in range(start_line, end_line):
        position = opening.end()
        if lines:
            if state.isEmpty(line):
                return False  # A formula has no blank lines: this is text.
            if state.sCount[line] < state.blkIndent:
                break
            position = state.bMarks[line] + state.tShift[line]
        text, closed, rest = state.src[position : state.eMarks[line]].partition(closing)
        if rest.strip(" \t.,;"):
            return False
        lines.append(text)
        if closed:
            break
    content = "\n".join(lines)
    if not closed:
        if not content.strip():
            return False  # Only the opening delimiter so far.
        halves = (closing[:length] for length in range(len(closing) - 1, 0, -1))
        content = content.removesuffix(next(filter(content.endswith, halves), ""))
    if not silent:
        token = state.push("math_block", "math", 0)
        token.block = True
        token.map = [start_line, start_line + len(lines)]
        token.meta = {"open": not closed}
        token.markup = opening.group()
        token.content = f"{opening.group()}{content}{closed}" if opening[1] else content
    state.line = start_line + len(lines)
    return True


def _math_inline(state: StateInline, silent: bool) -> bool:
    r"""`\( \)`, `\[ \]`, `$$ $$`, and `$ $` unless it may be an amount of money."""
    position, source = state.pos, state.src
    if source[position] not in "\\$":
        return False
    pair = source[position : position + 2]
    if pair in _PAIRS:
        opening, closing = pair, _PAIRS[pair]
        end = _find(source, closing, position + 2, state.posMax)
    else:
        if source[position] != "$" or not _can_open(source, position):
            return False
        opening = closing = "$"
        end = _find(source, "$", position + 1, state.posMax)
        if end is not None and not _can_close(source, position, end):
            return False
    if end is None:
        return False
    content = source[position + len(opening) : end]
    if not content.strip():
        return False
    if not silent:
        token = state.push("math_inline", "math", 0)
        token.content = content
        token.markup = opening
    state.pos = end + len(closing)
    return True


def _find(source: str, closing: str, start: int, end: int) -> int | None:
    """The position of `closing` that no backslash escapes."""
    end = min(end, start + MAX_LATEX_CHARS)
    position = source.find(closing, start, end)
    while position >= 0:
        before = source[max(start, position - 50) : position]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return position
        position = source.find(closing, position + 1, end)
    return None


def _can_open(source: str, position: int) -> bool:
    before = source[position - 1 : position]
    after = source[position + 1 : position + 2]
    return not (before.isalnum() or before == "$") and bool(after) and not (after.isspace() or after == "$")


def _can_close(source: str, position: int, end: int) -> bool:
    before, after = source[end - 1], source[end + 1 : end + 2]
    return not (before.isspace() or after.isdigit() or after == "$" or "\n" in source[position:end])
