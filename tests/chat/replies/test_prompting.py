from __future__ import annotations

from pathlib import Path

import pytest

from qwen35mm.chat.replies.prompting import prompt_messages, prompt_path, prompt_path_before
from qwen35mm.chat.store.records import Node
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import NotFoundError, PromptError
from tests.chat.chat_kit import PICTURE, ChatKit


def path_of(shape: str) -> list[Node]:
    """`q` a question, `a` an answer, `-` one without a word; ids are positions."""
    nodes: list[Node] = []
    for number, letter in enumerate(shape):
        role = "user" if letter == "q" else "assistant"
        text = "" if letter == "-" else f"{letter}{number}"
        nodes.append(Node(f"{number:032x}", nodes[-1].id if nodes else None, role, float(number), text))
    return nodes


def numbers(nodes: list[Node]) -> list[int]:
    return [int(node.id, 16) for node in nodes]


@pytest.mark.parametrize(
    ("shape", "first", "kept"),
    [
        ("", None, []),
        ("q", None, [0]),
        ("qaqa", None, [0, 1, 2, 3]),
        ("qaqa", 2, [2, 3]),
        ("qaqa", 9, [0, 1, 2, 3]),
        ("qaqa", 1, [1, 2, 3]),
        ("q-q", None, [2]),
        ("q-q-qa", None, [4, 5]),
        ("qaq-q", 0, [0, 1, 4]),
        ("q-", None, [0, 1]),
        ("qaq-", 2, [2, 3]),
    ],
)
def test_a_prompt_holds_what_was_answered(shape: str, first: int | None, kept: list[int]) -> None:
    assert numbers(prompt_path(path_of(shape), None if first is None else f"{first:032x}")) == kept


@pytest.mark.parametrize(("shape", "kept"), [("qa", [0, 1]), ("q-", []), ("qaq-", [0, 1]), ("q-qa", [2, 3])])
def test_before_a_new_message(shape: str, kept: list[int]) -> None:
    nodes = path_of(shape)
    assert numbers(prompt_path_before(Tree(nodes), nodes[-1].id, None)) == kept


def test_a_question_follows_no_question() -> None:
    nodes = path_of("qaq")
    with pytest.raises(PromptError, match="Answer it first, or edit it"):
        prompt_path_before(Tree(nodes), nodes[-1].id, None)
    with pytest.raises(NotFoundError):
        prompt_path_before(Tree(nodes), "f" * 32, None)
    assert prompt_path_before(Tree(nodes), None, None) == []


def test_messages_carry_files_before_words(kit: ChatKit, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text `` of a file", encoding="utf-8")
    files = (kit.attach(tmp_path / "a.txt", kind="text", name="notes.txt"), kit.attach(PICTURE))
    question = Node("0" * 32, None, "user", 1.0, "and?", attachments=files)
    answer = Node("1" * 32, question.id, "assistant", 2.0, "so", reasoning="hm")
    user, assistant = prompt_messages([question, answer], kit.store.media)
    assert [type(part).__name__ for part in user.content] == ["Text", "Image", "Text"]
    assert user.text == 'Document "notes.txt":\n```\ntext `` of a file\n```\n\n\nand?'
    assert (assistant.role, assistant.text, assistant.reasoning) == ("assistant", "so", "hm")


def test_a_damaged_text_file_is_read_as_far_as_it_can_be(kit: ChatKit, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a\xffb")
    damaged = Node("0" * 32, None, "user", 1.0, "x", attachments=(kit.attach(tmp_path / "a", kind="text"),))
    assert "a\ufffdb" in prompt_messages([damaged], kit.store.media)[0].text
