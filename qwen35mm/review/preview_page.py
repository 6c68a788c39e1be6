"""The page of a preview: its requests."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from qwen35mm.errors import NotFoundError, StorageError
from qwen35mm.http.requests import request
from qwen35mm.http.sessions import PageToken
from qwen35mm.pools import REQUESTS
from qwen35mm.review.page import MediaPage, Number, create_page_app
from qwen35mm.review.preview import Shown
from qwen35mm_preprocess import MediaKind
from qwen35mm_preprocess.say import say


def create_preview_app(shown: Shown, *, token: PageToken) -> Starlette:
    """The application of a page that shows a preview while it is made."""
    return create_page_app(_PreviewPage(shown), token=token, max_bytes=4096)


class _PreviewPage(MediaPage):
    def __init__(self, shown: Shown) -> None:
        super().__init__(shown.preview.job.scan.limits)
        self._shown = shown
        # The numbers of another preview on this port are of other media.
        self._version = secrets.token_hex(4)

    def version(self, number: int) -> str:
        return self._version

    def medium(self, number: int) -> tuple[MediaKind, Path]:
        rows = self._shown.preview.rows
        if number >= len(rows):
            raise NotFoundError(say("There is no such picture or clip. Load the page again."))
        try:
            return rows[number].item.kind, self._shown.preview.file(number)
        except OSError:
            raise StorageError(say("{name} is not there any more.", name=rows[number].item.name)) from None

    @request
    async def look(self, since: Number = 0) -> Any:
        """The preview as it is now, with the rows that changed since its clock was `since`."""
        # Read first: what changes meanwhile comes with the next call.
        clock = self._shown.preview.clock
        summary = await REQUESTS.run(self._shown.summary)
        rows = await REQUESTS.run(self._shown.rows, since)
        return {"preview": {**summary, "clock": clock, "version": self._version, "rows": rows}}
