"""Renders answers, which are Markdown with code, tables and LaTeX, as safe HTML.

The text is untrusted: its HTML is escaped except for a few tags (tags.py), it loads no pictures, and it only links to
web and mail addresses.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from mdit_py_plugins.footnote import footnote_plugin
from mdit_py_plugins.gfm_autolink import gfm_autolink_plugin

from qwen35mm.web.rendering.code import code_html
from qwen35mm.web.rendering.formulas import math_plugin
from qwen35mm.web.rendering.tags import parent_end, tags_plugin

MAX_NESTING = 30
# A paragraph or a table over these limits is shown as plain text, since parsing takes quadratic time.
MAX_INLINE_CHARS = 20_000
MAX_BRACKETS = 500
MAX_COLUMNS = 100

_SAFE_LINK = re.compile(r"(?:https?://|mailto:)[^\s\x00-\x20]+", re.IGNORECASE)
_LINE_END = re.compile(r"\r\n?")
# Not allowed in HTML: control characters except tabs and line ends, and halves of surrogate pairs.
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_TASK = re.compile(r"\[([ xX])\]\s+")
_ALIGN_STYLE = re.compile(r"text-align:(left|center|right)")

# Of links by their labels, and of footnotes by "[^label]", which no link can have.
References = dict[str, dict[str, Any]]


def render_blocks(text: str) -> list[str]:
    """The HTML of each top-level block of a Markdown text, in order."""
    blocks, _, _ = _render(_normalised(text), {})
    return [block for _, block in blocks]


class StreamingMarkdown:
    """`render_blocks` for a growing text: renders only blocks that can still change again.

    The result always equals that of `render_blocks`: a later definition of a reference (`[name]: https://...`) or of a
    footnote (`[^1]: ...`) renders the whole text again.
    """

    def __init__(self) -> None:
        self._forget()

    def blocks(self, text: str) -> list[str]:
        """The HTML of each top-level block. A text that doesn't continue the last one is rendered from the start."""
        text = _normalised(text)
        if not text.startswith(self._done_text):
            self._forget()
        tail = text[len(self._done_text) :]
        rendered, references, lines = _render(tail, self._done_references)
        if _targets(references) != self._targets:
            # The finished blocks may use a reference that changed.
            self._forget()
            tail = text
            rendered, references, lines = _render(tail, {})
            self._targets = _targets(references)
        blocks = [*self._done, *(block for _, block in rendered)]
        self._finish(tail, rendered, references, lines)
        return blocks

    def _forget(self) -> None:
        self._done: list[str] = []
        self._done_text = ""
        self._done_references: References = {}
        self._targets: dict[str, tuple[str, str]] = {}

    def _finish(self, tail: str, rendered: list[tuple[int, str]], references: References, lines: list[str]) -> None:
        """Keeps the blocks that no further text can change: all before the last block that follows a blank line.

        The last line is unfinished, so it may still join the block before it ("2" becomes "2. item").
        """
        for index in range(len(rendered) - 1, 0, -1):
            line = rendered[index][0]
            if line < len(lines) - 1 and not lines[line - 1].strip(" \t"):
                break
        else:
            return
        self._done += [block for _, block in rendered[:index]]
        known = self._done_references
        for label, reference in references.items():
            # Line numbers of references that were already known count from an earlier start.
            if label not in known and reference["map"][0] < line:
                known[label] = reference
        self._done_text += tail[: sum(len(text) + 1 for text in lines[:line])]


def _normalised(text: str) -> str:
    return _NO_TEXT.sub("\ufffd", _LINE_END.sub("\n", text))


def _targets(references: References) -> dict[str, tuple[str, str]]:
    return {label: (reference["href"], reference["title"]) for label, reference in references.items()}


def _render(text: str, references: References) -> tuple[list[tuple[int, str]], References, list[str]]:
    """The blocks of `text` with their first lines' numbers, all references known at its end, and its lines."""
    notes = {f":{label[2:-1]}": -1 for label in references if label.startswith("[^")}
    env: dict[str, Any] = {"references": dict(references), "footnotes": {"refs": notes, "list": {}}}
    lines = text.split("\n")
    try:
        tokens = _MARKDOWN.parse(text, env)
        for token in tokens:
            if token.type == "footnote_reference_open":
                place = {"href": "", "title": "", "map": token.map}
                env["references"].setdefault(f"[^{token.meta['label']}]", place)
        rendered = [
            (group[0].map[0] if group[0].map else 0, _MARKDOWN.renderer.render(group, _MARKDOWN.options, env))
            for group in _top_level(tokens)
        ]
    except Exception:
        # The answer must be shown even if the parser fails.
        return [(0, f'<p class="plain">{html.escape(text)}</p>\n')], references, lines
    return rendered, env["references"], lines


def _top_level(tokens: Sequence[Token]) -> list[list[Token]]:
    groups: list[list[Token]] = []
    depth = 0
    for token in tokens:
        if depth == 0:
            groups.append([])
        groups[-1].append(token)
        depth += token.nesting
    return groups


def _parser() -> MarkdownIt:
    markdown = MarkdownIt("js-default", {"html": False, "linkify": False, "breaks": True, "maxNesting": MAX_NESTING})
    # Otherwise "Here they are:\n-" is a heading until the list continues.
    markdown.disable("lheading")
    markdown.use(gfm_autolink_plugin)
    markdown.use(math_plugin)
    markdown.use(tags_plugin)
    # A footnote stays where it is defined, and keeps its label: nothing that is finished gets another number.
    markdown.use(footnote_plugin, inline=False, move_to_end=False)
    # `_only_safe` checks links instead, so that a refused link still shows its text.
    markdown.validateLink = lambda url: True  # type: ignore[method-assign]
    markdown.block.ruler.before("table", "too_deep", _too_deep)
    markdown.block.ruler.at("table", _bounded_table(markdown), {"alt": ["paragraph", "reference"]})
    markdown.inline.ruler.before("text", "bounded", _bounded_inline)
    markdown.core.ruler.push("only_safe", _only_safe)
    markdown.core.ruler.push("tasks", _tasks)
    rules = {"fence": _fence, "code_block": _fence, "table_open": _table, "table_close": _table}
    rules |= {f"footnote_{name}": _footnote for name in ("ref", "reference_open", "reference_close")}
    for name, rule in rules.items():
        markdown.add_render_rule(name, rule)
    return markdown


def _bounded_inline(state: StateInline, silent: bool) -> bool:
    source = state.src
    if state.pos or (len(source) <= MAX_INLINE_CHARS and source.count("[") <= MAX_BRACKETS):
        return False
    if not silent:
        state.pending += source
    state.pos = state.posMax
    return True


def _too_deep(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """Shows blocks at the deepest levels as they are written: the parser would drop what is deeper still."""
    # A list and its item are two levels.
    if silent or state.level < MAX_NESTING - 2:
        return False
    last = parent_end(state, start_line, end_line)
    state.push("paragraph_open", "p", 1)
    token = state.push("inline", "", 0)
    token.content, token.children = state.getLines(start_line, last, state.blkIndent, False).strip(), []
    state.push("paragraph_close", "p", -1)
    state.line = last
    return True


def _bounded_table(markdown: MarkdownIt) -> Callable[[StateBlock, int, int, bool], bool]:
    rules = markdown.block.ruler
    table = next(rule.fn for rule in rules.__rules__ if rule.name == "table")

    def bounded(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
        if state.src.count("|", state.bMarks[start_line], state.eMarks[start_line]) > MAX_COLUMNS:
            return False
        return table(state, start_line, end_line, silent)

    return bounded


def _only_safe(state: StateCore) -> None:
    """Turns pictures into links, and links to anything but web and mail addresses into their text."""
    for token in state.tokens:
        if token.type == "inline" and token.children:
            token.children = _safe_children(token.children)
        elif token.type in ("th_open", "td_open"):
            alignment = _ALIGN_STYLE.fullmatch(str(token.attrs.pop("style", "")))
            if alignment:
                token.attrs["class"] = f"align-{alignment[1]}"


def _tasks(state: StateCore) -> None:
    """Marks items that begin with `[ ]` or `[x]`; the style sheet draws a box instead of their bullet."""
    for item, paragraph, content in zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False):
        if (item.type, paragraph.type) != ("list_item_open", "paragraph_open") or not content.children:
            continue
        first = content.children[0]
        if first.type == "text" and (box := _TASK.match(first.content)):
            item.attrs["class"] = "task" if box[1] == " " else "task done"
            first.content = first.content[box.end() :]


def _safe_children(children: list[Token]) -> list[Token]:
    safe: list[Token] = []
    # For each open link, whether it is shown as a link.
    open_links: list[bool] = []
    for token in children:
        if token.type == "link_open":
            href = str(token.attrs.get("href", ""))
            open_links.append(bool(_SAFE_LINK.fullmatch(href)) and not any(open_links))
            if open_links[-1]:
                token.attrs = _link_attributes(href)
                safe.append(token)
        elif token.type == "link_close":
            if open_links.pop():
                safe.append(token)
        elif token.type == "image":
            safe += _image_as_link(token, inside_link=any(open_links))
        else:
            if token.type == "code_inline":
                # Or its first letter would decide how the paragraph around it runs.
                token.attrs["dir"] = "ltr"
            safe.append(token)
    return safe


def _link_attributes(href: str) -> dict[str, str | int | float]:
    return {"href": href, "target": "_blank", "rel": "noopener noreferrer nofollow"}


def _image_as_link(token: Token, *, inside_link: bool) -> list[Token]:
    source = str(token.attrs.get("src", ""))
    is_link = bool(_SAFE_LINK.fullmatch(source)) and not inside_link
    alternative = _RENDERER.renderInlineAsText(token.children or [], _MARKDOWN.options, {}).strip()
    text = Token("text", "", 0, content=alternative or (source if is_link else "image"))
    if not is_link:
        return [text]
    return [Token("link_open", "a", 1, attrs=_link_attributes(source)), text, Token("link_close", "a", -1)]


def _fence(_self: RendererHTML, tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    return code_html(tokens[index].content, tokens[index].info)


def _footnote(_self: RendererHTML, tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    token = tokens[index]
    if token.nesting < 0:
        return "</div></div>\n"
    mark = f"<sup>{html.escape(token.meta['label'])}</sup>"
    return f'<div class="footnote">{mark}<div>' if token.nesting else mark


def _table(_self: RendererHTML, tokens: Sequence[Token], index: int, _options: Any, _env: Any) -> str:
    return '<div class="table"><table>\n' if tokens[index].nesting == 1 else "</table></div>\n"


_RENDERER = RendererHTML()
_MARKDOWN = _parser()
