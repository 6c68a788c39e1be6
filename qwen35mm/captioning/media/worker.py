"""The child process in which media are decoded.

A decoder that crashes, or never ends, on a damaged file ends this process only. Standard input and output carry
pickles, each behind its length. When the input ends, so does the process, whatever it is at: it doesn't outlive a
parent that was killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Union

from qwen35mm.captioning.items import Item, failure_kind
from qwen35mm.captioning.media.similar import media_similarity
from qwen35mm_preprocess import MediaError, MediaPlan, MediaProcessor, PreparedMedia

if TYPE_CHECKING:
    from qwen35mm.backends.remote import VideoMode
    from qwen35mm.prompt import EncodedMedium

_HEADER_BYTES = 8


@dataclass(frozen=True)
class Look:
    """Asks what an item is, without decoding it.

    Attributes:
        with_digest: whether its bytes are to be hashed; not where the digest is known.
        with_plan: whether it is to be planned: its size, its length and what it costs.
    """

    item: Item
    with_digest: bool
    with_plan: bool


@dataclass(frozen=True)
class Seen:
    """What a look found; `status` is of the file before its bytes were read, None for what isn't a file."""

    digest: bytes | None
    plan: MediaPlan | None
    status: os.stat_result | None


@dataclass(frozen=True)
class Decode:
    """Asks for an item ready for the model.

    Attributes:
        digest: of the bytes that its caption is for.
        with_similarity: whether it is to be compared with other media.
    """

    item: Item
    digest: bytes
    with_similarity: bool


@dataclass(frozen=True, eq=False)
class Decoded:
    """A medium ready for the model, and what it looks like; see `similar`."""

    media: PreparedMedia
    similarity: int | None


@dataclass(frozen=True)
class Encode:
    """Asks for an item in the form in which a server takes it; the answer is an `EncodedMedium`.

    Attributes:
        digest: of the bytes that its caption is for.
        video: how videos are sent.
    """

    item: Item
    digest: bytes
    video: VideoMode


@dataclass(frozen=True)
class Failed:
    """What went wrong with an item, `kind` as in `failures.jsonl`."""

    kind: str
    message: str


# What was read must be the bytes that the caption is kept under.
CHANGED = Failed("changed", "The file changed while it was read. Run again when nothing writes to it.")

Task = Look | Decode | Encode
Answer = Union[Seen, Decoded, "EncodedMedium", Failed]


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    # Nothing that a library prints may come between the answers.
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(os.dup(0), "rb"), messages), daemon=True).start()
    processor = messages.get()
    while True:
        write_message(answers, work(messages.get(), processor))


def _receive(stream: BinaryIO, messages: queue.SimpleQueue[Any]) -> None:
    """Hands messages on; at the end of their stream nobody waits for an answer, also in the middle of a decoding."""
    try:
        while (message := read_message(stream)) is not None:
            messages.put(message)
    finally:
        os._exit(0)


def work(task: Task, processor: MediaProcessor) -> Answer:
    """Carries a task out; what the item is to blame for becomes `Failed`."""
    try:
        if isinstance(task, Look):
            return _look(task, processor)
        return _decode(task, processor) if isinstance(task, Decode) else _encode(task, processor)
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


def _look(task: Look, processor: MediaProcessor) -> Seen:
    source = task.item.read()
    status = source.stat() if isinstance(source, Path) else None
    digest = task.item.digest() if task.with_digest else None
    plan = processor.plan(source, task.item.kind) if task.with_plan else None
    return Seen(digest, plan, status)


def _decode(task: Decode, processor: MediaProcessor) -> Decoded | Failed:
    source = task.item.read()
    media = processor.prepare(source, kind=task.item.kind)
    if task.item.digest() != task.digest:
        return CHANGED
    processing = processor.image_processing if task.item.kind == "image" else processor.video_processing
    return Decoded(media, media_similarity(media, processing) if task.with_similarity else None)


def _encode(task: Encode, processor: MediaProcessor) -> EncodedMedium | Failed:
    # A second of a process's start, for those that need it.
    from qwen35mm.backends.remote.media import encode_medium
    from qwen35mm.prompt import Image, Video

    source = task.item.read()
    part = Image(source) if task.item.kind == "image" else Video(source)
    medium = encode_medium(part, processor, task.video)
    return medium if task.item.digest() == task.digest else CHANGED
