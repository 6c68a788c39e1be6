"""Archives that are small, and would be gigabytes as Python's values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen35mm.chat.store.store import ConversationStore
from tests.chat.store.test_archive_hostile import FILE, PICTURE, conversation, packed, refused


@pytest.mark.parametrize(
    "bomb",
    [
        "[" + "0," * 1_000_000 + "0]",
        "[" + "[]," * 500_000 + "0]",
        "[" + '{"":0},' * 500_000 + "0]",
        "[" * 150 + "]" * 150,
    ],
    ids=["numbers", "lists", "objects", "depth"],
)
def test_more_values_than_bytes_should_hold(store: ConversationStore, tmp_path: Path, bomb: str) -> None:
    text = json.dumps(conversation(settings={"a": "BOMB"})).replace('"BOMB"', bomb)
    refused(store, tmp_path, packed({FILE: text, PICTURE: b"picture"}), "has too many values")
