"""Markdown as HTML: what is shown, and that nothing active comes through."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.web.rendering.code import LANGUAGES, MAX_CODE_CHARS, MAX_LINE_CHARS, PART_CHARS, highlight
from qwen35mm.web.rendering.formulas import MATHML_ATTRIBUTES, MATHML_TAGS, MAX_LATEX_CHARS, mathml
from qwen35mm.web.rendering.markdown import MAX_BRACKETS, render_blocks

_TEXT_TAGS = "a blockquote br button code div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong ul"
TEXT_TAGS = {*_TEXT_TAGS.split(), "details", "sub", "summary", "sup"}
TABLE_TAGS = {"table", "thead", "tbody", "tr", "th", "td"}
CLASSES = re.compile(r"align-(left|center|right)|code(-bar)?|footnote|math|plain|table|task( done)?|hl-[a-z0-9]{1,3}")
VOID = {"br", "hr"}
LINK = {"href", "target", "rel"}


class Checker(HTMLParser):
    """Fails on every tag and attribute that isn't on the list, and on tags that don't pair."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TEXT_TAGS | TABLE_TAGS | MATHML_TAGS, tag
        assert not (tag == "a" and "a" in self.open), "a link within a link"
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert self.is_allowed(tag, name, value or ""), (tag, name, value)
        if tag == "a":
            assert {name for name, _ in attrs} == LINK

    def is_allowed(self, tag: str, name: str, value: str) -> bool:
        if name == "class":
            return bool(CLASSES.fullmatch(value))
        if tag in MATHML_TAGS:
            return name in MATHML_ATTRIBUTES and not re.search(r"[:;()<>\"'\\]", value)
        if tag == "a":
            fixed = {"target": "_blank", "rel": "noopener noreferrer nofollow"}
            return fixed.get(name) == value or (
                name == "href" and bool(re.match(r"(https?://|mailto:)\S+$", value, re.I))
            )
        if name == "data-ending":
            return tag == "div" and re.fullmatch("[a-z][a-z0-9]*", value or "") is not None
        if name == "dir":
            return tag in ("code", "div") and value == "ltr"
        return tag == "ol" and name == "start" and value.isdigit()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(f"a declaration: {decl}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")

    unknown_decl = handle_pi


def checked(text: str) -> str:
    """The text that is shown; every block is valid by itself."""
    shown = ""
    for block in render_blocks(text):
        checker = Checker()
        checker.feed(block)
        checker.close()
        assert checker.open == []
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]", block)
        shown += checker.text
    return shown


def one(text: str) -> str:
    (block,) = render_blocks(text)
    checked(text)
    return block.strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b** ~~c~~\nd", "<p>a <strong>b</strong> <s>c</s><br>\nd</p>"),
        ("`a` b", '<p><code dir="ltr">a</code> b</p>'),
        ("<b>x</b>", "<p>&lt;b&gt;x&lt;/b&gt;</p>"),
        ("Here:\n-", "<p>Here:<br>\n-</p>"),
        ("3. c", '<ol start="3">\n<li>c</li>\n</ol>'),
        ("![a *cat*](data:image/png;base64,AAAA)", "<p>a cat</p>"),
        ("[x](javascript:alert(1)) [y](foo.md)", "<p>x y</p>"),
        ("<javascript:alert(1)>", "<p>javascript:alert(1)</p>"),
    ],
)
def test_text_is_shown(text: str, expected: str) -> None:
    assert one(text) == expected


def test_links_tell_nothing_and_open_apart() -> None:
    rel = 'target="_blank" rel="noopener noreferrer nofollow"'
    assert one("[a](http://b.c/d)") == f'<p><a href="http://b.c/d" {rel}>a</a></p>'
    assert one("https://b.c/d.") == f'<p><a href="https://b.c/d" {rel}>https://b.c/d</a>.</p>'
    assert one("![cat](http://b.c/d.png)") == f'<p><a href="http://b.c/d.png" {rel}>cat</a></p>'
    assert one("[![cat](http://i.c)](http://b.c)") == f'<p><a href="http://b.c" {rel}>cat</a></p>'


def test_tables_can_scroll_and_keep_their_alignment() -> None:
    table = one("|a|b|\n|-:|:-:|\n|1|2|")
    assert table.startswith('<div class="table"><table>')
    assert table.endswith("</table></div>")
    assert '<td class="align-right">1</td>\n<td class="align-center">2</td>' in table


def test_tasks_get_a_box_in_place_of_their_brackets() -> None:
    (block,) = render_blocks("- [ ] open\n- [x] done\n  - [X] inside\n- [y] neither\n- x [ ] neither")
    assert '<li class="task">open</li>' in block
    assert '<li class="task done">done' in block
    assert '<li class="task done">inside</li>' in block
    assert "<li>[y] neither</li>" in block
    assert "<li>x [ ] neither</li>" in block
    assert '<li class="task">counted</li>' in render_blocks("1. [ ] counted")[0]
    assert render_blocks("[ ] no list") == ["<p>[ ] no list</p>\n"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("H<sub>2</sub>O, **x<sup>*n*</sup>**", "<p>H<sub>2</sub>O, <strong>x<sup><em>n</em></sup></strong></p>"),
        ("**a<sub>b**</sub>", "<p>**a<sub>b**</sub></p>"),
        ("a<br>b<br/>c", "<p>a<br>b<br>c</p>"),
        ("a<sub>b </sup>`<sup>`", '<p>a&lt;sub&gt;b &lt;/sup&gt;<code dir="ltr">&lt;sup&gt;</code></p>'),
        ('<sub class="a">b</sub>', "<p>&lt;sub class=&quot;a&quot;&gt;b&lt;/sub&gt;</p>"),
        ("<details><summary>*Why*</summary>Because</details>", "<summary><em>Why</em></summary><p>Because</p>"),
        ("<details>\n<summary>Why</summary>\n\nBecause\n\n</details>\n", "<summary>Why</summary><p>Because</p>"),
        ("<details open>\n\n- a\n- b</details>", "<ul><li>a</li><li>b</li></ul>"),
        ("<details>\n<details>\na\n</details>\nb\n</details>", "<details><p>a</p></details><p>b</p>"),
        ("<details>\nstill written", "<p>still written</p>"),
        ("<details>", ""),
        ("<details></details>", ""),
    ],
)
def test_some_tags_are_drawn(text: str, expected: str) -> None:
    if "<details" in text:
        expected = f"<details>{expected}</details>"
    assert one(text).replace("\n", "") == expected


def test_details_end_where_they_should() -> None:
    assert len(render_blocks("<details>\na\n</details>\n\nb\n\n    <details>\n")) == 3
    code = "```html\n</details>\n```\n"
    (details, after) = render_blocks(f"<details>\n\n{code}\n</details>  \n\nafter")
    assert details.count("</details>") == 1
    assert after == "<p>after</p>\n"
    (item, _) = render_blocks("- <details>\n  a\n  </details>\n- b\n\nc")
    assert "<li><details><p>a</p></details></li>" in item.replace("\n", "")
    (unclosed, _) = render_blocks("- <details>\n  a\n\nb")
    assert "b" not in unclosed


def test_footnotes_keep_their_labels_and_places() -> None:
    text, note, end = render_blocks("A[^1] and[^note].\n\n[^1]: *One*\n\n    more\n\n[^other] [^1 ] `[^1]` \\[^1]")
    assert text == "<p>A<sup>1</sup> and[^note].</p>\n"
    assert note == '<div class="footnote"><sup>1</sup><div><p><em>One</em></p>\n<p>more</p>\n</div></div>\n'
    assert end == '<p>[^other] [^1 ] <code dir="ltr">[^1]</code> [^1]</p>\n'


@pytest.mark.parametrize(
    ("language", "ending"),
    [("Rust", "rs"), ("c++", "cpp"), ("bash", "sh"), ("hpp", "hpp"), ("psql", "sql"), ("zig2", "zig2"), ("a.b", "txt")],
)
def test_code_is_saved_under_its_language_s_ending(language: str, ending: str) -> None:
    assert f'data-ending="{ending}"' in one(f"```{language}\nx\n```")


def test_code_has_a_bar_and_colours() -> None:
    code = one("```python title=x\nif a < b: pass\n```")
    bar = '<div class="code-bar"><span>python</span></div>'
    start = f'<div class="code" dir="ltr" data-ending="py">{bar}'
    assert code.startswith(f'{start}<pre><code><span class="hl-k">if</span> a ')
    assert checked("```py\nif a < b: pass\n```").endswith("if a < b: pass\n\n")
    assert "<span>text</span>" in one("```<script>\nx\n```")
    assert "<span>Nonesuch</span>" in one("```Nonesuch\nif\n```")
    assert "hl-" not in one("```Nonesuch\nif\n```")


def test_too_long_code_has_no_colours() -> None:
    assert "hl-" in highlight("if x:\n" * 2000, "python")
    assert "hl-" not in highlight("if x:\n" * (MAX_CODE_CHARS // 6 + 1), "python")
    assert "hl-" not in highlight("if x:\n#" + "a" * MAX_LINE_CHARS, "python")


# A lexer is loaded for each language.
@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_colours_change_no_character(stride: int) -> None:
    code = "\n\n  def f(a):\n\treturn 'é' <b> & \"x\n# c /* d\n<?php $x = 1; ?>\n\n"
    for language in sorted(LANGUAGES)[::stride]:
        for text in (code, code.rstrip(), "x"):
            checker = Checker()
            checker.feed(highlight(text, language))
            checker.close()
            assert (language, checker.text) == (language, text)


def test_long_code_is_coloured_in_parts_that_stay() -> None:
    code = "def f(x):\n    return x + 1\n\n\n" * 600
    whole = highlight(code, "python")
    checker = Checker()
    checker.feed(whole)
    assert checker.text == code
    assert whole.startswith(highlight(code[: 2 * PART_CHARS], "python")[:PART_CHARS])


@pytest.mark.parametrize("text", [r"\(x^2\)", "$x^2$", r"so \(x^2\).", "the $x^2$th", "(a $x^2$)"])
def test_a_formula_in_a_line(text: str) -> None:
    assert '<math display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>' in one(text)


@pytest.mark.parametrize(
    "text",
    [
        "$$x^2$$",
        "$$\nx^2\n$$",
        "\\[\nx^2\n\\]",
        r"\[x^2\]",
        "a $$x^2$$ b",
        "> $$\n> x^2\n> $$",
        "- \\[\n  x^2\n  \\]",
    ],
)
def test_a_formula_of_its_own(text: str) -> None:
    assert '<math display="block"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>' in one(text)


@pytest.mark.parametrize(
    "text",
    [
        "$5 and $6",
        "5$ or 6$",
        "$HOME and $PATH",
        r"\$x\$",
        r"\\(x\\)",
        "`$x$`",
        "$ x $",
        "costs $5/$6",
        "$$",
        "$$\n\nx\n\n$$",
    ],
)
def test_no_formula(text: str) -> None:
    shown = "".join(render_blocks(text))
    assert "<math" not in shown
    assert 'class="math"' not in shown


@pytest.mark.parametrize(
    ("latex", "parts"),
    [
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", ['<mtd class="align-right"><mi>a</mi>', "<mtr>"]),
        (r"\begin{align} a &= b \end{align}", ["<mtable"]),
        (r"\begin{equation} E = mc^2 \tag{1} \end{equation}", ["<mi>E</mi>", "(1)"]),
        (r"\begin{cases} 1 & x < 0 \\ 0 & \text{else} \end{cases}", ["<mtext>else</mtext>", "&lt;"]),
        (r"\boxed{42}", ['<menclose notation="box">']),
        (r"\mathbb{R}^{n \times d}", ["ℝ", "×"]),
        (r"\sum\limits_{i=1}^n \frac{\partial L}{\partial w_i}", ["∑", "<mfrac>"]),
        (
            r"\bar{x} \hat{y} \vec{v} \overbrace{a}^b \underset{x}{\min} \xrightarrow{n} \binom{n}{k} \dot{x}",
            ["<munder>"],
        ),
        (
            r"\lim_{x \to 0} \max_i \prod_{i}^{n} \int_0^1 x' f'' \overline{ab} \stackrel{a}{=} \underbrace{a+b}_{c}",
            ["lim"],
        ),
        (r"\left\{ \sqrt[3]{x} \right\}", ["<mroot>"]),
        (r"\operatorname{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)V", ["softmax", "⊤"]),
    ],
)
def test_usual_formulas_are_set(latex: str, parts: list[str]) -> None:
    written = mathml(latex, True)
    assert written is not None
    assert all(part in written for part in parts), written


@pytest.mark.parametrize(
    "latex",
    [
        r"\nonesuch{x}",
        r"\frac{a}",
        "{" * 500,
        "x^{" * 300 + "}" * 300,
        "x" * (MAX_LATEX_CHARS + 1),
        r"\def\a{\b\b}\a",
        r"\sideset{}{}{" * 24 + "x" + "}" * 24,
        r"a^b^c",
        r"\left( x",
    ],
)
def test_what_cannot_be_set_is_shown_as_written(latex: str) -> None:
    assert mathml(latex, False) is None
    assert latex.strip() in checked(f"$${latex}$$")


@pytest.mark.parametrize(
    "latex",
    [
        r"\text{<img src=x onerror=alert(1)>}",
        r"\href{javascript:alert(1)}{x}",
        r"\style{position:fixed;background:url(//e.vil)}{x}",
        r"\color{red;background:url(x)}{x}",
        r"\mathrm{</math><script>}",
        r"\unicode{x3c}script\unicode{x3e}",
        r"\text{&#x3c;script&#x3e;} &lt;script&gt;",
        r"\operatorname{a}<script>",
        r"\hspace{1em\" onclick=x}",
        r"\tag{<b>} \begin{array}{c|c}<i&\\ \hline x\end{array}",
        "\\unicode{0} \\unicode{d800} \\unicode{ffffff}",
    ],
)
def test_a_formula_brings_nothing_active(latex: str) -> None:
    checked(f"$${latex}$$\n\n\\({latex}\\)")


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- x --><![CDATA[x]]><?x?>",
    "[a](JaVaScRiPt:alert(1))",
    "[a](java\nscript:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "[a](vbscript:x) [b](data:text/html,<script>) [c](file:///etc/passwd)",
    '[a](http://b.c "\\" onmouseover=x")',
    '[a](http://b.c/"onmouseover="x)',
    "<http://b.c/'onclick=x>",
    "![a](http://b.c/x.png)![b](//e.vil/x)",
    "[a]: javascript:alert(1)\n\n[a] ![a]",
    '```"><script>\nx</code></pre><script>\n```',
    "~~~html onload=x\n<script>\n~~~",
    "|<script>|\n|-|\n|`<b>`|",
    "a\0b\x1b[0m \ud800 \u202egnp\u202c \u2066x",
    'http://a.b/<script> www.x.y/"onclick=z me@x.y javascript:alert(1)',
    "# <b>\n> <i>\n1. <u>",
    "<sub onclick=x>a</sub><sup\n>b</sup><SUB>c</SUB><br onclick=x>",
    "<details ontoggle=x><summary onclick=x>a\n<summary><script></summary>",
    "<details>\n<summary><img src=x></summary>\n<script></details>",
    '[^<script>]\n\n[^<script>]: <img src=x>\n\n[^"onclick=x]: y',
    "[a](<http://b.c/\u202e>)",
    "&lt;script&gt; &#0; &#x110000; &NotAnEntity;",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_brings_nothing_active(text: str) -> None:
    checked(text)


_UNITS = r"[ ]( ![ ![a]( ` < $ $$ \( | & { <sub> <sub><sup> <details> <details></details> [^a"
_LINES = ["\\[\n", "[a]: b\n", "[^a]: b\n", "<details>\n"]


@pytest.mark.parametrize("unit", [*_UNITS.split(), *_LINES, "> ", "- ", "*a ", "a\0"])
def test_huge_repetitions_end(unit: str) -> None:
    checked(unit * (100_000 // len(unit)))


def test_deep_nesting_ends() -> None:
    checked("".join(" " * (2 * depth) + "- a\n" for depth in range(200)))
    checked("> " * 5000 + "a")
    checked("*" * 2000 + "a" + "*" * 2000)
    columns = "|" + "a|" * 5000
    checked(f"{columns}\n{columns.replace('a', '-')}\n" + "|\n" * 1000)


@pytest.mark.parametrize(
    ("open", "close"),
    [("<details><summary>s</summary>\n\n", "\n\n</details>\n"), ("> ", ""), ("- ", ""), ("1. > ", "")],
)
def test_what_is_nested_too_deep_is_shown_as_it_was_written(open: str, close: str) -> None:
    for depth in (10, 40):
        shown = checked(f"{open * depth}first\n\nlast{close * depth}\n\nafter")
        assert all(word in shown for word in ("first", "last", "after"))
    assert open.split("\n")[0].strip() in shown


def test_links_past_the_limit_are_shown_as_typed() -> None:
    assert "<a " in one("[a](http://b.c) " * MAX_BRACKETS)
    assert "[a](http://b.c)" in one("[a](http://b.c) " * (MAX_BRACKETS + 1))


_WORDS = '** _ ` ``` $ $$ \\( \\) \\[ \\] [ ]( ) < > " | & \\begin{align} \\end{align} \\text{ } http://a.b x'
_TAGS = "<sub> </sub> <sup> </sup> <br> <details> </details> <summary> </summary> [^a] [^a]:"
PIECES = [*HOSTILE, *_WORDS.split(), *_TAGS.split(), "|-|\n", "\n", "\n\n", "    ", "- ", "1. ", "> "]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=20))
def test_any_text_brings_nothing_active(pieces: list[str]) -> None:
    checked("".join(pieces))
