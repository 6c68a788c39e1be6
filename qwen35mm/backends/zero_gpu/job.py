"""What goes to the child and what comes back: values that pickle, since a pipe is all that the two share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qwen35mm.backends.requests import History, RequestMaker
from qwen35mm.engine import Event, Request, TextDelta
from qwen35mm.errors import Qwen35mmError
from qwen35mm.prompt import Image, Message, Text, Video, iter_media
from qwen35mm_preprocess import MediaError, PreparedMedia

# Stands for media whose plan says all that a history needs: their bytes needn't go through the pipe again.
_NO_SOURCE = Path("medium")


@dataclass(frozen=True, eq=False)
class Job:
    """One GPU call.

    Attributes:
        request: its media are in `media`.
        media: pixels that were read for this request, or the part to read should nothing be kept of it.
        history: None where nothing is to be computed behind the reply.
        duration_s: how long the GPU is asked for; what is left to do then isn't done.
    """

    request: Request
    media: tuple[PreparedMedia | Image | Video, ...]
    history: History | None
    duration_s: int

    @classmethod
    def make(cls, request: Request, messages: Sequence[Message], history: History | None, duration_s: int) -> Job:
        """Takes out of a request what can't be pickled; the messages have the request's media, with their plans."""
        media = tuple(
            medium if isinstance(medium, PreparedMedia) else part
            for medium, part in zip(request.media, iter_media(messages), strict=True)
        )
        if history is not None:
            history = replace(history, messages=tuple(_without_sources(message) for message in history.messages))
        return cls(replace(request, media=()), media, history, duration_s)

    def open_request(self, requests: RequestMaker, *, deadline_s: float) -> Request:
        """The request again, to end at `deadline_s` of `time.monotonic` if not before.

        Raises:
            MediaError: a medium can't be read any more.
        """
        media = tuple(
            item if isinstance(item, PreparedMedia) else requests.find(item) or requests.media_of(item)
            for item in self.media
        )
        own = self.request.deadline_s
        return replace(self.request, media=media, deadline_s=deadline_s if own is None else min(own, deadline_s))


@dataclass(frozen=True)
class Failure:
    """An error of ours on its way to the parent: its class and its words."""

    kind: type[Qwen35mmError] | type[MediaError]
    message: str

    @classmethod
    def of(cls, error: Qwen35mmError | MediaError) -> Failure:
        return cls(type(error), str(error))

    def error(self) -> Qwen35mmError | MediaError:
        # Past `__init__`, which may want other arguments than the words.
        return self.kind.__new__(self.kind, self.message)


Item = Event | Failure


def add_event(batch: list[Item], event: Event) -> None:
    """Appends an event; text goes on where the last piece of its channel ended."""
    last = batch[-1] if batch else None
    if isinstance(event, TextDelta) and isinstance(last, TextDelta) and last.channel == event.channel:
        batch[-1] = TextDelta(last.text + event.text, event.channel)
    else:
        batch.append(event)


def _without_sources(message: Message) -> Message:
    content = tuple(part if isinstance(part, Text) else replace(part, source=_NO_SOURCE) for part in message.content)
    return replace(message, content=content)
