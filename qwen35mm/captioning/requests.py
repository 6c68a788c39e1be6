"""Requests for captions, built without decoding the medium, and the keys under which captions are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from qwen35mm.captioning.items import Item, Part
from qwen35mm.captioning.records import medium_facts
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.captioning.texts.prompts import PromptSet
from qwen35mm.captioning.texts.templates import FACTS
from qwen35mm.captioning.texts.trainers import Length
from qwen35mm.captioning.texts.words import Words
from qwen35mm.contract import SamplingParams
from qwen35mm.contract.sampling import changed
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaPlan

# Raise it when captions are made from replies in another way, or a default changes: then all keys change.
_FORM = 1
_ASKED_BYTES = 8


@dataclass(frozen=True)
class CaptionStyle:
    """The form of a caption, whatever the medium.

    Attributes:
        schema: the JSON schema that every caption satisfies; None for text.
        words: required and forbidden words.
        max_attempts: the most replies; after that, the best one is taken with a flag.
        prefix, suffix, trigger: see `wrap`.
        keep_unfinished: whether to keep a last sentence that the token limit cut off.
        one_line: whether line ends become spaces.
        cleans: whether to remove what a model writes around a caption; see `clean`.
        length: the most tokens of a caption, including prefix, suffix and trigger; None for no limit.
    """

    schema: JsonSchema | None = None
    words: Words = field(default_factory=Words)
    max_attempts: int = 3
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""
    keep_unfinished: bool = False
    one_line: bool = False
    cleans: bool = True
    length: Length | None = None

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise CaptioningError(f"A caption needs at least one attempt; got {self.max_attempts}.")
        if self.schema is not None and (self.prefix or self.suffix or self.trigger):
            raise CaptioningError("A JSON caption takes no prefix, suffix or trigger word: they would break it.")


@dataclass(frozen=True)
class CaptionSettings:
    """The settings that decide a caption, besides model, medium and prompt.

    Attributes:
        params: how replies are sampled, including the style's schema. Its seed (default 0) is mixed with the medium's
            digest.
        thinking: None for the checkpoint's default.
    """

    params: SamplingParams
    style: CaptionStyle = field(default_factory=CaptionStyle)
    thinking: bool | None = False

    def describe(self) -> dict[str, Any]:
        """All values that differ from their defaults, as JSON values. So a new field doesn't change existing keys."""
        default = asdict(CaptionStyle())
        style = {name: value for name, value in asdict(self.style).items() if value != default[name]}
        return {"params": changed(self.params), "thinking": self.thinking, "style": style}


@dataclass(frozen=True)
class CaptionRequest:
    """An item with its question.

    Attributes:
        content: SHA-256 of its bytes.
        plan: its media plan; None if it isn't needed yet.
        question, system: with their placeholders filled.
        key: 32 bytes that identify this work; see `asked_of`.
        others: keys under which the same model may have done it elsewhere.
    """

    item: Item
    content: bytes
    plan: MediaPlan | None
    question: str
    system: str
    settings: CaptionSettings
    key: bytes
    others: tuple[bytes, ...] = ()


class RequestBuilder:
    """Builds the requests for items.

    Args:
        model: identifies the model and how it reads media, as JSON values.
        others: the same for this model elsewhere, for `CaptionRequest.others`.
        with_plan: whether every request has a plan, even if no placeholder needs one.
    """

    def __init__(
        self,
        prompts: PromptSet,
        settings: CaptionSettings,
        model: Mapping[str, Any],
        others: Sequence[Mapping[str, Any]] = (),
        *,
        with_plan: bool = False,
    ) -> None:
        self._prompts = prompts
        # Text that was read from a picture isn't cleaned.
        verbatim = replace(settings, style=replace(settings.style, cleans=False, one_line=False))
        self._by_kind = {
            is_verbatim: (each, [{"form": _FORM, **described, **each.describe()} for described in (model, *others)])
            for is_verbatim, each in ((False, settings), (True, verbatim))
        }
        self._needs_facts = bool(prompts.needs() & FACTS)
        self.with_plan = with_plan or self._needs_facts
        # Most items have the same question.
        self._last: tuple[str, str, bool, list[bytes]] | None = None

    def build(
        self, item: Item, content: bytes, plan: MediaPlan | None, original: Callable[[Item], str | None]
    ) -> CaptionRequest:
        """The request of an item whose bytes have the SHA-256 `content`.

        Args:
            plan: None if `with_plan` is false.
            original: a person's own text beside an item, for `{sidecar}`.

        Raises:
            CaptioningError: the item lacks what its prompt names.
        """
        facts = None
        if self._needs_facts:
            assert plan is not None
            height, width = plan.source_size
            duration_s = medium_facts(item, plan)["duration_s"]
            duration = None if duration_s is None else f"{duration_s:.1f}"
            text = original(item) if "sidecar" in self._prompts.needs() else None
            sidecar = None if text is None else text.strip()
            facts = {"width": width, "height": height, "duration": duration, "sidecar": sidecar}
        work = content if item.part is None or item.part.is_clip else _part_of(content, item.part)
        chosen = self._prompts.choose(work)
        question = self._prompts.fill(chosen, item, facts)
        system = self._prompts.fill_system(item, facts)
        settings = self._by_kind[chosen.verbatim][0]
        key, *others = (_key(work, asked) for asked in self._asked(question, system, chosen.verbatim))
        return CaptionRequest(item, content, plan, question, system, settings, key, tuple(others))

    def _asked(self, question: str, system: str, verbatim: bool) -> list[bytes]:
        """SHA-256 of the question and settings, without the medium: for this model first, then for the others."""
        if self._last is None or self._last[:3] != (question, system, verbatim):
            described = self._by_kind[verbatim][1]
            texts = [json.dumps([question, system, each], sort_keys=True) for each in described]
            self._last = (question, system, verbatim, [hashlib.sha256(text.encode()).digest() for text in texts])
        return self._last[3]


def asked_of(key: bytes) -> bytes:
    """The first 8 bytes of a key, which identify the question and settings without the medium."""
    return key[:_ASKED_BYTES]


def shared_key(key: bytes) -> bytes:
    """The key for a near-duplicate's caption of the work `key`. The work's own caption stays open."""
    return key[:_ASKED_BYTES] + hashlib.sha256(b"shared" + key).digest()[_ASKED_BYTES:]


def _part_of(content: bytes, part: Part) -> bytes:
    """Identifies a range of a video, as the video's own digest identifies the whole."""
    return hashlib.sha256(content + json.dumps([part.start_s, part.end_s]).encode()).digest()


def _key(content: bytes, asked: bytes) -> bytes:
    """The key of a medium's bytes with a question, a model and settings, as digests."""
    return asked[:_ASKED_BYTES] + hashlib.sha256(asked + content).digest()[_ASKED_BYTES:]
