"""Server-sent events: the data of each, out of bytes that are cut anywhere."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator

from qwen35mm.backends.remote.faults import damaged

# Far above any chunk of an answer: what is longer is no event stream.
_MAX_EVENT_CHARS = 2**20


class EventReader:
    """Reads server-sent events (WHATWG HTML, 9.2.6).

    Not httpx-sse: it puts other characters where bytes aren't UTF-8, passes over a first event behind a byte order
    mark and a last one without its empty line, and holds a line without an end for ever.
    """

    def __init__(self) -> None:
        # Text without a byte order mark, whose lines end with "\n".
        self._text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
        self._rest = ""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The events that end within `chunk`; an empty one is the stream's end, where the last may lack its empty line.

        Raises:
            Fault: a line without an end, or text that isn't UTF-8.
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
