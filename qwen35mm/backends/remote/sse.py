"""Reads server-sent events from bytes that are split anywhere."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator

from qwen35mm.backends.remote.faults import damaged

# Far above any chunk of an answer: more isn't an event stream.
_MAX_EVENT_CHARS = 2**20


class EventReader:
    """Reads server-sent events (WHATWG HTML, 9.2.6).

    Not httpx-sse: it replaces bytes that aren't UTF-8, skips a first event after a byte order mark and a last one
    without its empty line, and buffers a line without an end forever.
    """

    def __init__(self) -> None:
        # Decodes to text without a byte order mark, with "\n" as line end.
        self._text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
        self._rest = ""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The events that end in `chunk`. An empty chunk ends the stream; its last event may lack an empty line.

        Raises:
            Fault: an event is too long, or the text isn't UTF-8.
        """
        try:
            self._rest += self._text.decode(chunk, final=not chunk)
        except UnicodeDecodeError:
            raise damaged("text that isn't UTF-8") from None
        *events, self._rest = (self._rest if chunk else f"{self._rest}\n\n").split("\n\n")
        if len(self._rest) > _MAX_EVENT_CHARS:
            raise damaged(f"an event of more than {_MAX_EVENT_CHARS:,} characters")
        for event in events:
            fields = (line.partition(":") for line in event.split("\n"))
            data = [value.removeprefix(" ") for name, _, value in fields if name == "data"]
            if data:
                yield "\n".join(data)
