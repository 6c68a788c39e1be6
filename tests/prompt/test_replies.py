"""A reply's calls are found in its answer, or at the end of a thinking that it never closed."""

from __future__ import annotations

import pytest

from qwen35mm.contract import ToolCall
from qwen35mm.prompt.replies import ReadReply, read_reply
from tests.prompt.damaged_calls import TOOLS, xml

READ = xml("read", path="a.py")
CALL = (ToolCall("read", {"path": "a.py"}),)


@pytest.mark.parametrize(
    ("text", "reasoning", "read"),
    [
        (f"So.\n{READ}", "Hm.", ReadReply("So.", "Hm.", CALL)),
        ("", f"Hm.\n{READ}\n", ReadReply("", "Hm.", CALL)),
        ("", READ, ReadReply("", "", CALL)),
        ("", f"Hm.\n{READ}\n{READ}", ReadReply("", "Hm.", CALL * 2)),
        ("", f"```\n{READ}", ReadReply("", "```", CALL)),
        ("", f"I could {READ}, or not.", ReadReply("", f"I could {READ}, or not.")),
        ("So.", f"Hm.\n{READ}", ReadReply("So.", f"Hm.\n{READ}")),
        ("", xml("delete"), ReadReply("", xml("delete"))),
        ("", None, ReadReply("", None)),
    ],
)
def test_a_call_counts_where_the_reply_ends(text: str, reasoning: str | None, read: ReadReply) -> None:
    assert read_reply(text, reasoning, TOOLS) == read
    assert read_reply(text, reasoning, ()) == ReadReply(text, reasoning)


def test_a_thinking_that_was_cut_off_calls_nothing() -> None:
    assert read_reply("", READ, TOOLS, is_cut=True) == ReadReply("", READ)
