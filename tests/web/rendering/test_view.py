from __future__ import annotations

import json
from typing import Any

import pytest
from PIL import Image

from qwen35mm.chat.replies.stats import stats_of
from qwen35mm.chat.store.records import Attachment, Conversation, Node
from qwen35mm.chat.store.tree import Tree
from qwen35mm.web.rendering.view import _as_code, chat_view
from tests.chat.fake_backend import FakeBackend, make_result


def node(number: int, parent: int | None, **fields: Any) -> Node:
    role = fields.pop("role", "user")
    return Node(f"{number:032x}", None if parent is None else f"{parent:032x}", role, float(number), **fields)


def view_of(nodes: list[Node], head: Node, running: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    conversation = Conversation("c" * 32, "Shapes", 1.0, 2.0, head=head.id, **fields)
    view = chat_view(conversation, Tree(nodes), running, 4096)
    json.dumps(view, allow_nan=False)
    return view


def test_the_shown_branch_and_the_ways_off_it() -> None:
    question = node(1, None, text="which?")
    answers = [node(number, 1, role="assistant", text=f"answer {number}") for number in (2, 3, 4)]
    view = view_of([question, *answers], answers[1])
    assert [message["id"] for message in view["messages"]] == [question.id, answers[1].id]
    assert view["messages"][1]["branch"] == {"at": 2, "of": 3, "previous": answers[0].id, "next": answers[2].id}
    assert view["messages"][0]["branch"] == {"at": 1, "of": 1, "previous": None, "next": None}
    assert "answer 3" in view["messages"][1]["blocks"][0]


def test_a_reply_of_a_process_that_is_gone_was_interrupted() -> None:
    nodes = [node(1, None, text="q"), node(2, 1, role="assistant", text="half", status="running")]
    assert view_of(nodes, nodes[1])["messages"][1]["status"] == "interrupted"
    view = view_of(nodes, nodes[1], (nodes[1].id,))
    assert (view["messages"][1]["status"], view["running"]) == ("running", [nodes[1].id])


def test_the_context_that_is_used() -> None:
    stats = stats_of(make_result("so", num_prompt_tokens=40))
    nodes = [node(1, None, text="q"), node(2, 1, role="assistant", text="a", stats=stats), node(3, 2, text="q")]
    assert view_of(nodes, nodes[2])["context"] == {"used": 42, "length": 4096}
    assert view_of(nodes, nodes[0])["context"]["used"] == 0


def test_what_an_archive_brought_is_no_error() -> None:
    """Its numbers and settings are any objects."""
    stats = {"num_prompt_tokens": [1], "line": "<b>"}
    nodes = [node(1, None, text="q"), node(2, 1, role="assistant", text="a", stats=stats)]
    view = view_of(nodes, nodes[1], settings={"temperature": "hot", "x": 1, "seed": 3})
    assert view["messages"][1]["stats"] is None
    assert view["context"]["used"] == 0
    assert view["settings"] == {"seed": 3}


def test_files_are_shown_by_name_and_size() -> None:
    plan = FakeBackend().media.plan(Image.new("RGB", (60, 40)), "image")
    file = Attachment("ab" * 32, "image", "a.png", 9, plan)
    (message,) = view_of([question := node(1, None, attachments=(file,))], question)["messages"]
    assert message["attachments"] == [
        {
            "digest": file.digest,
            "kind": "image",
            "name": "a.png",
            "num_bytes": 9,
            "form": None,
            "size": [40, 60],
            "num_frames": None,
            "duration_s": None,
            "clip": None,
            "crop_of": None,
        }
    ]


@pytest.mark.parametrize(
    "hidden", ["\u202e", "\u200b", "\u3164", "\u115f", "\u2800", "\ufe0f", "\U000e0100", "\u00ad", "\u00a0", "\ud800"]
)
def test_nothing_hides_in_the_arguments_of_a_call(hidden: str) -> None:
    assert _as_code({"path": f"a{hidden}b"}) == json.dumps({"path": f"a{hidden}b"}, indent=2)


def test_arguments_of_a_call_are_shown_whole_in_any_script() -> None:
    text = "e\u0301\u0323 हिन्दी ภาษาไทย العَرَبِيَّة 日本語 👍" + "é" * 50_000
    assert json.loads(_as_code({"text": text})) == {"text": text}
    assert text in _as_code({"text": text})
    # An accent without a letter sits on the quotation mark.
    assert '"\\u0301a"' in _as_code({"text": "\u0301a"})
