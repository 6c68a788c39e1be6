"""Lists of pictures or videos with their captions, as trainers read them: a JSON object per line."""

from __future__ import annotations

from pathlib import Path

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import json_text
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import OutputSettings, Wants
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.records import Caption, Record, printable
from qwen35mm.captioning.sources.names import absolute
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaKind

IMAGE_PATH, VIDEO_PATH = "image_path", "video_path"


class TrainerLines(JsonLines):
    """A list of one kind of media: absolute path and caption.

    That is sd-scripts' `metadata_file` and musubi-tuner's `image_jsonl_file` and `video_jsonl_file`. Media of the other
    kind are left out, since the trainers would stop at them.

    Args:
        key: of the path, `image_path` or `video_path`.
        is_lines: whether each of several captions is a line of the text. sd-scripts draws one with `enable_wildcard`.
    """

    def __init__(
        self, manifest: Manifest, path: Path, settings: OutputSettings, key: str, *, is_lines: bool = False
    ) -> None:
        self._key = key
        self._kind: MediaKind = "image" if key == IMAGE_PATH else "video"
        self._is_lines = is_lines
        self._one_line = settings.one_line
        if path.suffix != ".jsonl":
            raise CaptioningError(
                f"Trainers read a list of media by its suffix: expected a name that ends in .jsonl, got {path.name}."
            )
        super().__init__(manifest, path, settings)

    def _wants(self, item: Item, key: bytes | None) -> Wants:
        if item.kind != self._kind:
            return Wants.DONE  # nothing is to be written
        own_file(item)
        return super()._wants(item, key)

    def _line(self, record: Record) -> bytes:
        texts = shown_texts(record.caption, one_line=self._one_line or self._is_lines)
        text = "\n".join(texts if self._is_lines else texts[:1])
        return json_text({self._key: printable(str(absolute(own_file(record.item)))), "caption": text}).encode() + b"\n"


def own_file(item: Item) -> Path:
    """The file that has this medium alone. Raises CaptioningError for a part of a file."""
    if item.path is None or (item.part is not None and not item.part.is_clip):
        raise CaptioningError(
            f"{printable(item.name)} is no file of its own, which a trainer could read. Unpack it, or name another "
            "kind of output."
        )
    return item.path


def shown_texts(caption: Caption, *, one_line: bool) -> list[str]:
    """A medium's captions, the first one first; as lines unless they are JSON."""
    texts = [caption.text, *caption.others.values()]
    return [" ".join(text.split()) for text in texts] if one_line and caption.data is None else texts
