"""The page's requests about text files."""

from __future__ import annotations

from typing import Any

from qwen35mm.chat.replies.turns import Person
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import NotFoundError
from qwen35mm.http.requests import request
from qwen35mm.web.rendering.texts import PREVIEW_BYTES, preview_text
from qwen35mm_preprocess.say import say


class Texts:
    """Previews of text files, which are stored in UTF-8."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store

    @request
    def preview(self, person: Person, digest: str, name: str) -> Any:
        """The beginning of a text; see `preview_text`.

        Args:
            name: the file's name, which decides how it is shown.
        """
        media = self._store.media
        if not media.is_of(person.owner, digest):
            raise NotFoundError(say("You have no such file."))
        with media.open(digest) as file:
            data = file.read(PREVIEW_BYTES + 1)
        text = data[:PREVIEW_BYTES].decode("utf-8", "ignore")
        return preview_text(text, name, is_whole=len(data) <= PREVIEW_BYTES)
