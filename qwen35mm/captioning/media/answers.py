"""What a child process reports of an item to the captioner; see `qwen35mm.decoding.answers`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qwen35mm.captioning.items import Failed, Item
from qwen35mm.decoding.answers import Answer, Data, plan_values, read_plan, require
from qwen35mm.decoding.processor import prepared_answer, read_prepared
from qwen35mm_preprocess import MediaPlan, MediaProcessor, PreparedMedia

if TYPE_CHECKING:
    from qwen35mm.contract import EncodedMedium

MediumForm = Literal["pixels", "frames", "video_url"]
"""What a medium is prepared as: the engine's own input, or a part of a server's request with videos as `VideoMode`."""

# The bytes that were read must be those of the caption's key.
CHANGED = Failed("changed", "The file changed while it was read. Run again when nothing writes to it.")
_CHANGED = "changed"


@dataclass(frozen=True)
class Inspected:
    """An item's `digest` and `plan`, if requested.

    Attributes:
        status: the file's, before its bytes were read; None if it isn't a file. The parent process sets it.
    """

    digest: bytes | None
    plan: MediaPlan | None
    status: os.stat_result | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A medium as a backend takes it, and how it looks.

    Attributes:
        similarity: its perceptual hash; see `similar`.
        measures: its sharpness and letterbox; see `measures`. None if it wasn't decoded.
    """

    medium: PreparedMedia | EncodedMedium
    similarity: int | None = None
    measures: tuple[float, float] | None = None

    @property
    def measured(self) -> dict[str, float]:
        """The fields of a caption that say how its medium looks."""
        return {} if self.measures is None else dict(zip(("sharpness", "letterbox"), self.measures, strict=True))


def inspected_answer(inspected: Inspected) -> Answer:
    """The input of `read_inspected`."""
    digest = None if inspected.digest is None else inspected.digest.hex()
    return Answer({"digest": digest, "plan": None if inspected.plan is None else plan_values(inspected.plan)})


def read_inspected(values: Any, data: Data, item: Item, processor: MediaProcessor) -> Inspected:
    """Reads the result of `inspected_answer`. Raises NonsenseError, and other errors for wrong types."""
    plan, digest = values["plan"], values["digest"]
    require(digest is None or (isinstance(digest, str) and len(digest) == 64), "no digest")
    return Inspected(
        None if digest is None else bytes.fromhex(digest),
        None if plan is None else read_plan(plan, processor, item.kind),
    )


def item_answer(prepared: Prepared | Failed) -> Answer:
    """The input of `read_item`."""
    if isinstance(prepared, Failed):
        return Answer(_CHANGED)
    similarity = None if prepared.similarity is None else f"{prepared.similarity:x}"
    measures = None if prepared.measures is None else list(prepared.measures)
    if isinstance(prepared.medium, PreparedMedia):
        return prepared_answer(prepared.medium, similarity=similarity, measures=measures)
    from qwen35mm.backends.remote.apart import encoded_answer

    return encoded_answer(prepared.medium, similarity=similarity, measures=measures)


def read_item(values: Any, data: Data, item: Item, processor: MediaProcessor, form: MediumForm) -> Prepared | Failed:
    """Reads the result of `item_answer`. Raises NonsenseError, and other errors for wrong types."""
    if values == _CHANGED:
        return CHANGED
    similarity = values["similarity"]
    require(similarity is None or (isinstance(similarity, str) and len(similarity) < 1024), "no similarity")
    measures = values["measures"]
    if measures is not None:
        require(len(measures) == 2 and all(type(each) is float and each >= 0 for each in measures), "no measures")
        measures = (measures[0], measures[1])
    if form == "pixels":
        medium = read_prepared(values, data, processor, item.kind)
    else:
        from qwen35mm.backends.remote.apart import read_encoded

        medium = read_encoded(values, data, processor, item.kind)
    return Prepared(medium, None if similarity is None else int(similarity, 16), measures)
