"""The child process in which media are read.

A decoder that crashes, or never ends, on a damaged file ends this process only. Standard input and output carry
pickles, each behind its length. When the input ends, so does the process, whatever it is at: it doesn't outlive a
parent that was killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from qwen35mm.captioning.items import Item, failure_kind
from qwen35mm.captioning.media.similar import media_similarity
from qwen35mm_preprocess import MediaError, MediaPlan, MediaProcessor, PreparedMedia

if TYPE_CHECKING:
    from qwen35mm.prompt import EncodedMedium

_HEADER_BYTES = 8

MediumForm = Literal["pixels", "frames", "video_url"]
"""What a medium is prepared as: the engine's own input, or a part of a server's request with videos as `VideoMode`."""


@dataclass(frozen=True)
class Inspected:
    """What an item is; `digest` and `plan` where they were asked for.

    Attributes:
        status: of the file before its bytes were read, None for what isn't a file.
    """

    digest: bytes | None
    plan: MediaPlan | None
    status: os.stat_result | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A medium as a backend takes it, and what it looks like; see `similar`."""

    medium: PreparedMedia | EncodedMedium
    similarity: int | None = None


@dataclass(frozen=True)
class Failed:
    """What went wrong with an item, `kind` as in `failures.jsonl`."""

    kind: str
    message: str


# What was read must be the bytes that the caption is kept under.
CHANGED = Failed("changed", "The file changed while it was read. Run again when nothing writes to it.")


def inspect(item: Item, processor: MediaProcessor, *, with_digest: bool, with_plan: bool) -> Inspected:
    """What an item is, without decoding it.

    Args:
        with_digest: whether its bytes are hashed; not where the digest is known.
        with_plan: whether it is planned: its size, its length and what it costs.
    """
    source = item.read()
    status = source.stat() if isinstance(source, Path) else None
    digest = item.digest() if with_digest else None
    return Inspected(digest, processor.plan(source, item.kind) if with_plan else None, status)


def prepare(
    item: Item, processor: MediaProcessor, *, digest: bytes, form: MediumForm, with_similarity: bool
) -> Prepared | Failed:
    """An item as a backend takes it.

    Args:
        digest: of the bytes that its caption is for.
        with_similarity: whether it is compared with other media.
    """
    source = item.read()
    medium = processor.prepare(source, kind=item.kind) if form == "pixels" or with_similarity else None
    similarity = None
    if with_similarity:
        assert medium is not None
        processing = processor.image_processing if item.kind == "image" else processor.video_processing
        similarity = media_similarity(medium, processing)
    if form != "pixels":
        # A second of a process's start, for those that need it.
        from qwen35mm.backends.remote.media import encode_medium
        from qwen35mm.prompt import Image, Video

        medium = encode_medium(Image(source) if item.kind == "image" else Video(source), processor, form)
    assert medium is not None
    return Prepared(medium, similarity) if item.digest() == digest else CHANGED


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    # Nothing that a library prints may come between the answers.
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(os.dup(0), "rb"), messages), daemon=True).start()
    while True:
        write_message(answers, work(*messages.get()))


def _receive(stream: BinaryIO, messages: queue.SimpleQueue[Any]) -> None:
    """Hands messages on; at the end of their stream nobody waits for an answer, also in the middle of a decoding."""
    try:
        while (message := read_message(stream)) is not None:
            messages.put(message)
    finally:
        os._exit(0)


def work(
    function: Callable[..., Inspected | Prepared | Failed], item: Item, processor: MediaProcessor, options: Any
) -> Inspected | Prepared | Failed:
    """Calls `inspect` or `prepare`; what the item is to blame for becomes `Failed`."""
    try:
        return function(item, processor, **options)
    except MediaError as error:
        return Failed(failure_kind(error), str(error))
    except OSError as error:
        return Failed("unreadable", f"The file can't be read: {error.strerror or type(error).__name__}.")
    except MemoryError:
        return Failed("too large", "Memory ran out while it was decoded. Make it smaller, or lower the limits.")


def read_message(stream: BinaryIO) -> Any:
    """The next pickle of a stream; None at its end."""
    header = stream.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    return pickle.loads(stream.read(int.from_bytes(header, "little")))


def write_message(stream: BinaryIO, value: object) -> None:
    """Writes a pickle behind its length."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(_HEADER_BYTES, "little"))
    stream.write(data)
    stream.flush()
