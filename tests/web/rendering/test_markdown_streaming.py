"""A text that grows is rendered as the whole text is, and only its end anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.web.rendering import markdown
from qwen35mm.web.rendering.markdown import StreamingMarkdown, render_blocks

TEXTS = {
    "prose": "# Title\nA **bold** start.\n\nSecond\nparagraph.\n\n---\nThird\n***\n",
    "lists": "Here:\n- a\n- b\n\n  more\n\n1. x\n\n2. y\n   - z\n\n\n3. w\n* other\n*b\n\nend",
    "code": "Text\n```python\ndef f():\n\n    return 1\n```\nafter\n\n    indented\n\n    more\n~~~\nopen",
    "table": "Words\n| a | b |\n|---|--:|\n| 1 | 2 |\n| 3 |\nafter\n\n|x|\n|-|x\n",
    "maths": "See \\(a_1\\):\n\\[\n\\frac{a}{b}\n\\]\nand $$x$$ then\n"
    "$$\ny\n\nno\n\n$$\nz $$ tail\n\n\\begin{align}\na\n\\end{align}\n",
    "quotes": "> a\nb\n\n> c\n>\n> - d\n\n    e\n\n>\n> f",
    "references": '[a] and [b]\n\n[a]: http://x.y\n"ti\ntle"\n\n[b]: http://z "u" v\n\n[b]\n\n[b]: http://w\n\n- [a]\n',
    "footnotes": "a[^1]\n\n[^2] b\n\n[^1]: One\n\n    more\n\nc[^2]\n\n> [^2]: Two\n\n[^2]: Else\n\nd[^1]",
    "tags": "a\n<details><summary>b</summary>\n\nc\n\n- d<sub>e</sub>\n\n</details>\n\nf<br>g\n\n<details>\n\nh\n\ni",
    "line ends": "a\r\n\r\nb\rc\r\r\n- d\r\n",
}


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("step", [1, 3, 7])
def test_every_beginning_is_rendered_as_the_whole_is(name: str, step: int) -> None:
    text, streaming = TEXTS[name], StreamingMarkdown()
    for end in [*range(0, len(text), step), len(text)]:
        assert streaming.blocks(text[:end]) == render_blocks(text[:end]), text[:end]


_WORDS = 'a 2 ``` $$ \\[ \\] \\( $ "t [a] ]: --- ** ` www.a.com | |-|'
_SPACED = ["b ", "\n", "\n\n", "- ", "1. ", "* ", "> ", "    ", "# ", "\r", "\t", "[a]: http://x\n", "\n|-|\n"]
_SPACED += ["[^a]: ", "[^a] ", "<details>", "</details>\n", "<summary>s</summary>", "<sub>", "</sub>"]
PIECES = [*_WORDS.split(), *_SPACED]


@given(st.lists(st.sampled_from(PIECES), max_size=20))
def test_any_text_is_rendered_as_the_whole_is(pieces: list[str]) -> None:
    text, streaming = "".join(pieces), StreamingMarkdown()
    for end in range(len(text) + 1):
        assert streaming.blocks(text[:end]) == render_blocks(text[:end]), text[:end]


def test_another_text_begins_anew() -> None:
    streaming = StreamingMarkdown()
    streaming.blocks("a\n\nb\n\nc\n\n[r]: http://x\n\nd [r]\n\ne")
    for text in ("z\n\ny\n\n[r]", "", "z"):
        assert streaming.blocks(text) == render_blocks(text)


def test_only_the_end_is_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    paragraphs = "".join(f"Paragraph {number}.\n\n" for number in range(300))
    streaming = StreamingMarkdown()
    streaming.blocks(paragraphs)
    parsed: list[int] = []
    parse = markdown._MARKDOWN.parse
    monkeypatch.setattr(markdown._MARKDOWN, "parse", lambda text, env: parsed.append(len(text)) or parse(text, env))
    for end in range(1, 40):
        streaming.blocks(paragraphs + "More and more words that go on and on."[:end])
    assert len(parsed) == 39
    assert max(parsed) < 80


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```py\nx", "<pre><code>x</code></pre>"),
        ("$$\n\\frac{a}{", '<code class="math">\\frac{a}{</code>'),
        ("\\[ a + b\\", '<code class="math">a + b</code>'),
        ("\\begin{align}\na \\en", '<code class="math">\\begin{align}\na</code>'),
        ("|a|\n|-|\n|1", "<td>1</td>"),
    ],
)
def test_what_is_half_written_looks_like_what_it_becomes(text: str, expected: str) -> None:
    assert expected in render_blocks(text)[-1]
