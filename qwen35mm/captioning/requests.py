"""What is asked about an item, found out without decoding it, and the key under which its caption is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.captioning.texts.prompts import FACTS, PromptSet
from qwen35mm.captioning.texts.trainers import Length
from qwen35mm.captioning.texts.words import Words
from qwen35mm.contract import SamplingParams
from qwen35mm.contract.sampling import changed
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaPlan

# A change in how captions are made from replies is other work; then this is counted up.
_FORM = 1
_ASKED_BYTES = 8


@dataclass(frozen=True)
class CaptionStyle:
    """What a caption has to be, whatever the medium.

    Attributes:
        schema: the JSON schema that every caption satisfies; None for text.
        words: required and forbidden ones.
        max_attempts: replies until the last one is taken with a flag.
        prefix, suffix, trigger: see `wrap`.
        keep_unfinished: whether a last sentence that was cut off by the limit stays.
        one_line: whether line ends become spaces.
        cleans: whether what a model writes around a caption is taken away; see `clean`.
        length: the most tokens of a caption, what is put around it included; None is without end.
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
    """What decides a caption besides model, medium and prompt.

    Attributes:
        params: how replies are sampled, the style's schema among it; its seed, 0 without one, is mixed with the
            medium's digest.
        thinking: None takes the checkpoint's default.
    """

    params: SamplingParams
    style: CaptionStyle = field(default_factory=CaptionStyle)
    thinking: bool | None = False

    def describe(self) -> dict[str, Any]:
        """All of it that isn't as it is by default, as JSON values: a new field leaves finished work as it is."""
        default = asdict(CaptionStyle())
        style = {name: value for name, value in asdict(self.style).items() if value != default[name]}
        return {"params": changed(self.params), "thinking": self.thinking, "style": style}


@dataclass(frozen=True)
class CaptionRequest:
    """An item with what is asked about it.

    Attributes:
        content: SHA-256 of its bytes.
        plan: what it costs; None where nobody asked for that yet.
        question, system: with their placeholders filled.
        key: 32 bytes, the name of this work; see `asked_of`.
        others: names that it may have been done under, by the same model elsewhere.
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
    """Makes requests of items.

    Args:
        model: what tells the model, and how it reads media, from every other; JSON values.
        others: the same as it may be elsewhere, for `CaptionRequest.others`.
        with_plan: whether every request has a plan, also where no placeholder needs one.
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
        # What is read off a picture isn't cleaned.
        verbatim = replace(settings, style=replace(settings.style, cleans=False, one_line=False))
        self._by_kind = {
            is_verbatim: (each, [{"form": _FORM, **described, **each.describe()} for described in (model, *others)])
            for is_verbatim, each in ((False, settings), (True, verbatim))
        }
        self._needs_facts = bool(prompts.needs() & FACTS)
        self.with_plan = with_plan or self._needs_facts
        # Most items are asked the same.
        self._last: tuple[str, str, bool, list[bytes]] | None = None

    def build(
        self, item: Item, content: bytes, plan: MediaPlan | None, original: Callable[[Item], str | None]
    ) -> CaptionRequest:
        """The request of an item whose bytes have the SHA-256 `content`.

        Args:
            plan: None where `with_plan` is false.
            original: a person's own text beside an item, for `{sidecar}`.

        Raises:
            CaptioningError: it lacks what its prompt names.
        """
        facts = None
        if self._needs_facts:
            assert plan is not None
            height, width = plan.source_size
            duration = None if plan.duration_s is None else f"{plan.duration_s:.1f}"
            text = original(item) if "sidecar" in self._prompts.needs() else None
            sidecar = None if text is None else text.strip()
            facts = {"width": width, "height": height, "duration": duration, "sidecar": sidecar}
        chosen = self._prompts.choose(content)
        question = self._prompts.fill(chosen, item, facts)
        system = self._prompts.fill_system(item, facts)
        settings = self._by_kind[chosen.verbatim][0]
        key, *others = (_key(content, asked) for asked in self._asked(question, system, chosen.verbatim))
        return CaptionRequest(item, content, plan, question, system, settings, key, tuple(others))

    def _asked(self, question: str, system: str, verbatim: bool) -> list[bytes]:
        """SHA-256 of all that is asked, whatever the medium; of this model first, and then of the others."""
        if self._last is None or self._last[:3] != (question, system, verbatim):
            described = self._by_kind[verbatim][1]
            texts = [json.dumps([question, system, each], sort_keys=True) for each in described]
            self._last = (question, system, verbatim, [hashlib.sha256(text.encode()).digest() for text in texts])
        return self._last[3]


def asked_of(key: bytes) -> bytes:
    """The part of a key that says what was asked, whatever the medium: its first 8 bytes."""
    return key[:_ASKED_BYTES]


def shared_key(key: bytes) -> bytes:
    """Under which the work `key` has a near-duplicate's caption, so that its own is still to do."""
    return key[:_ASKED_BYTES] + hashlib.sha256(b"shared" + key).digest()[_ASKED_BYTES:]


def _key(content: bytes, asked: bytes) -> bytes:
    """The same medium, asked the same of the same model under the same settings, has the same key."""
    return asked[:_ASKED_BYTES] + hashlib.sha256(asked + content).digest()[_ASKED_BYTES:]
