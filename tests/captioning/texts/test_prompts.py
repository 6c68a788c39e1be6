from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.texts.presets import PRESETS, preset_question
from qwen35mm.captioning.texts.prompts import PromptSet, Question, read_prompt_file
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaKind

FACTS = {"width": 640, "height": 480, "duration": "12.4", "sidecar": "a dog"}


def item(name: str = "pets/cats/a.b.jpg", kind: MediaKind = "image", metadata: Mapping[str, Any] | None = None) -> Item:
    return Item(name, b"", kind, metadata=metadata or {})


def filled(text: str, facts: Mapping[str, Any] | None = FACTS, **metadata: Any) -> str:
    prompts = PromptSet([Question(text)])
    return prompts.fill(prompts.questions[0], item(metadata=metadata), facts)


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Describe it.", "Describe it."),
        ("{name}|{stem}|{folder}", "pets/cats/a.b.jpg|a.b|cats"),
        ("{width}x{height}, {duration} s", "640x480, 12.4 s"),
        ("It is called {sidecar}.", "It is called a dog."),
        ("{metadata.title}", "Mia {name}"),
        ("{metadata.shot.camera.iso}", "400"),
        ("{metadata.with.dots}", "dotted"),
        ("{metadata.mixed.with.dots}", "inner"),
        ("{metadata.tags}", "cat, 2, true"),
        ("{metadata.shot}", '{"camera": {"iso": 400}}'),
        ("{metadata.boxes}", "[[1, 2], [3, 4]]"),
        ("{metadata.zero}", "0"),
        ("{metadata.none|nothing}", "nothing"),
        ("{metadata.empty|nothing}", "nothing"),
        ("{metadata.empty}", ""),
        ("{metadata.absent|}.", "."),
        ("{metadata.absent|a | b}", "a | b"),
        ("{metadata.a key}", "spaced"),
        ("{{name}} and {{{folder}}}", "{name} and {cats}"),
        ('Answer as {{"a": [1]}}', 'Answer as {"a": [1]}'),
    ],
)
def test_placeholders_are_filled(text: str, expected: str) -> None:
    metadata = {
        "title": "Mia {name}",
        "shot": {"camera": {"iso": 400}},
        "with.dots": "dotted",
        "mixed": {"with.dots": "inner"},
        "tags": ["cat", 2, True],
        "boxes": [[1, 2], [3, 4]],
        "zero": 0,
        "none": None,
        "empty": "",
        "a key": "spaced",
    }
    assert filled(text, **metadata) == expected


@given(st.text())
def test_a_text_with_its_braces_doubled_stays_as_it_is(text: str) -> None:
    if text.strip():
        assert filled(text.replace("{", "{{").replace("}", "}}")) == text


@given(st.text())
def test_values_are_put_in_as_they_are(value: str) -> None:
    assert filled("<{metadata.v}>", v=value) == f"<{value}>"


@pytest.mark.parametrize("text", ["{metadata.title}", "{metadata.a.b.c}", "{metadata.tags.0}"])
def test_what_an_item_lacks_fails_it(text: str) -> None:
    with pytest.raises(CaptioningError, match=r"a\.b\.jpg doesn't have"):
        filled(text, a={"b": "no object"}, tags=["x"])


@pytest.mark.parametrize(("placeholder", "default"), [("duration", "no time"), ("sidecar", "no words")])
def test_a_medium_without_duration_or_sidecar(placeholder: str, default: str) -> None:
    facts = {"width": 8, "height": 8, "duration": None, "sidecar": None}
    assert filled(f"{{sidecar|{default}}}", {**facts, "sidecar": ""}) == default
    assert filled(f"{{{placeholder}|{default}}}", facts) == default
    with pytest.raises(CaptioningError, match=f"asks for {{{placeholder}}}"):
        filled(f"{{{placeholder}}}", facts)


def test_an_item_at_the_top_whose_name_is_no_utf8() -> None:
    prompts = PromptSet([Question("{name} <{folder}> <{folder|top}>")])
    assert prompts.fill(prompts.questions[0], item("caf\udce9.jpg"), None) == "caf\\xe9.jpg <> <top>"


_UNKNOWN = [
    "{nmae}",
    "{}",
    "{metadata}",
    "{metadata.}",
    "{name.x}",
    "{ name }",
    "{0}",
    "{Name}",
    "{__class__}",
    "{name!r}",
]
_SINGLE = ["{", "}", "a { b", "{{name}", "{name}}", "{a {name} b}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"Unknown placeholder .*\{name\}, .*\{metadata\.KEY\}") for text in _UNKNOWN),
        *((text, "single") for text in _SINGLE),
    ],
)
def test_braces_that_mean_nothing_are_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(CaptioningError, match=message):
        PromptSet([Question("Describe."), Question(text)])


@pytest.mark.parametrize(("system", "video_text"), [("{nope}", "b"), ("", "{nope}")])
def test_the_system_prompt_and_a_wording_for_videos_are_checked_too(system: str, video_text: str) -> None:
    with pytest.raises(CaptioningError, match="Unknown"):
        PromptSet([Question("a", video_text=video_text)], system=system)


def test_needs_names_what_occurs_anywhere() -> None:
    questions = [Question("{{width}} {stem}", video_text="{duration|0}"), Question("{metadata.a} {metadata.b}")]
    assert PromptSet(questions, system="{sidecar|}").needs() == {"stem", "duration", "metadata", "sidecar"}
    assert PromptSet([Question("plain")]).needs() == frozenset()


def test_the_system_prompt_is_filled() -> None:
    prompts = PromptSet([Question("a")], system="These are {folder}, {width} wide.")
    assert prompts.fill_system(item(), FACTS) == "These are cats, 640 wide."
    assert prompts.system == "These are {folder}, {width} wide."


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_question_is_asked_in_the_wording_for_its_medium(kind: MediaKind) -> None:
    prompts = PromptSet([Question("image {stem}", video_text="video {stem}")])
    assert prompts.fill(prompts.choose(digest(1)), item(kind=kind), None) == f"{kind} a.b"


def test_choosing_depends_on_seed_and_content_alone_in_every_version() -> None:
    questions = [Question("a"), Question("b", 2.0), Question("c", 0.5)]
    chosen = ["".join(PromptSet(questions, seed=seed).choose(digest(n)).text for n in range(20)) for seed in (7, 8)]
    assert chosen[0] == "baabbbcababbcbaabcbb" != chosen[1]


def test_weights_are_shares() -> None:
    prompts = PromptSet([Question("a", 1), Question("b", 2), Question("c", 5)])
    counts = Counter(prompts.choose(digest(n)).text for n in range(8000))
    # Four standard deviations of a binomial count.
    for text, share in (("a", 1 / 8), ("b", 2 / 8), ("c", 5 / 8)):
        assert abs(counts[text] - 8000 * share) < 4 * (8000 * share * (1 - share)) ** 0.5


def test_a_question_at_the_end_moves_only_what_it_takes() -> None:
    before = PromptSet([Question("a"), Question("b")])
    after = PromptSet([Question("a"), Question("b"), Question("c")])
    moved = [n for n in range(300) if before.choose(digest(n)) != after.choose(digest(n))]
    assert moved
    assert all(after.choose(digest(n)).text == "c" for n in moved)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_above_zero(weight: float) -> None:
    with pytest.raises(CaptioningError, match="above 0"):
        Question("a", weight)


def test_there_must_be_a_question_with_a_text() -> None:
    with pytest.raises(CaptioningError, match="got none"):
        PromptSet([])
    with pytest.raises(CaptioningError, match="empty"):
        Question(" \n")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Describe it.\n", [Question("Describe it.")]),
        ("\ufeffTwo\n\nparagraphs -- a\n ---\n- - -", [Question("Two\n\nparagraphs -- a\n ---\n- - -")]),
        (
            "a\n---\nweight: 2\nb\nc\n---  \r\nWeight:0.5\r\nd",
            [Question("a"), Question("b\nc", 2.0), Question("d", 0.5)],
        ),
        ("weight: 3\nonly", [Question("only", 3.0)]),
    ],
)
def test_a_prompt_file(tmp_path: Path, content: str, expected: list[Question]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content.encode())
    assert read_prompt_file(path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"Prompt 1 of prompts\.txt: .*empty"),
        (b"a\n---\n\n---\nb", r"Prompt 2 of prompts\.txt: .*empty"),
        (b"a\n---\nweight: 2", r"Prompt 2 of prompts\.txt: .*empty"),
        (b"weight: lots\na", r"Prompt 1 of prompts\.txt: .*'lots'"),
        (b"a\n---\nweight: -1\nb", r"Prompt 2 of prompts\.txt: .*-1"),
        (b"caf\xe9", "isn't UTF-8"),
    ],
)
def test_a_prompt_file_that_can_not_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(CaptioningError, match=message):
        read_prompt_file(path)


def test_a_prompt_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CaptioningError, match=r"none\.txt can't be read: No such file"):
        read_prompt_file(tmp_path / "none.txt")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_asked_and_names_its_kind_of_medium(name: str) -> None:
    preset = PRESETS[name]
    assert PromptSet([preset_question(name, 2.0)]).needs() == frozenset()
    assert re.search("image|picture", preset.wording("image"))
    assert "video" not in preset.wording("image")
    assert "video" in preset.wording("video")
    assert "  " not in preset.wording("image") + preset.wording("video")


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(CaptioningError, match=r"'tgas'.*short, detailed, tags"):
        preset_question("tgas")
