from __future__ import annotations

import pytest

from qwen35mm.web.rendering.texts import form_of, preview_text


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.csv", "table"),
        ("A.TSV", "table"),
        ("a.py", "code"),
        ("a.h", "code"),
        ("Dockerfile", "code"),
        ("a.txt", None),
        ("notes", None),
        ("", None),
    ],
)
def test_a_name_says_what_a_text_is(name: str, form: str | None) -> None:
    assert form_of(name) == form


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_is_its_first_rows(delimiter: str) -> None:
    text = "\n".join(delimiter.join((str(number), f'"a{delimiter}""b"', "<i>")) for number in range(30))
    found = preview_text(text, "a.csv", is_whole=True)
    assert (len(found["rows"]), found["rows"][0], found["more"]) == (20, ["0", f'a{delimiter}"b', "<i>"], True)
    short = preview_text("a,b\n1,2\n", "a.csv", is_whole=True)
    assert (short["rows"], short["more"]) == ([["a", "b"], ["1", "2"]], False)
    cut = preview_text("a,b\n1,2\n3", "a.csv", is_whole=False)
    assert (cut["rows"], cut["more"]) == ([["a", "b"], ["1", "2"]], True)
    wide = preview_text(",".join("x" * 500 for _ in range(50)), "a.csv", is_whole=True)
    assert (len(wide["rows"][0]), len(wide["rows"][0][0]), wide["more"]) == (20, 120, True)


def test_code_is_its_first_lines_in_colours_and_safe() -> None:
    found = preview_text('print("<b>")\n' * 100, "a.py", is_whole=True)
    assert found["rows"] is None
    assert 'class="hl-' in found["html"]
    assert "<b>" not in found["html"]
    assert (found["html"].count("print"), found["more"]) == (60, True)
    plain = preview_text("<script>", "a.csv", is_whole=False)
    assert plain["rows"] is None
    assert "&lt;script&gt;" in plain["html"]
