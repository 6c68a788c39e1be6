"""A store in an empty folder, and conversations over a fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35mm.chat.store.store import ConversationStore
from tests.chat.chat_kit import ChatKit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ConversationStore]:
    store = ConversationStore(tmp_path / "data")
    yield store
    store.close()


@pytest.fixture
def kit(tmp_path: Path) -> ChatKit:
    return ChatKit(tmp_path)
