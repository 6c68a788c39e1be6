"""Requests for captions, built without decoding the medium, and the keys under which captions are stored."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from qwen35mm.captioning.items import Item, Part
from qwen35mm.captioning.records import Caption, medium_facts, printable
from qwen35mm.captioning.texts.cleanup import NOTHING_AROUND, Around
from qwen35mm.captioning.texts.folder_prompts import FolderPrompts
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.captioning.texts.templates import FACTS, Template, trigger_of
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
        prefix, suffix, trigger: templates; see `Template` and `wrap`. The trigger word may only name what is known
            without the medium.
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
        self.around()

    def around(self) -> tuple[Template, Template, Template]:
        """Prefix, suffix and trigger word. Raises CaptioningError for a wrong placeholder."""
        prefix, suffix = Template(self.prefix, "prefix"), Template(self.suffix, "suffix")
        return prefix, suffix, trigger_of(self.trigger)


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

    def describe(self, around: Around = NOTHING_AROUND) -> dict[str, Any]:
        """All values that differ from their defaults, as JSON values. So a new field doesn't change existing keys.

        Args:
            around: prefix, suffix and trigger word with their placeholders filled.
        """
        default = asdict(CaptionStyle())
        values = {**asdict(self.style), **around._asdict()}
        style = {name: value for name, value in values.items() if value != default[name]}
        return {"params": changed(self.params), "thinking": self.thinking, "style": style}


@dataclass(frozen=True)
class CaptionRequest:
    """An item with its question.

    Attributes:
        content: SHA-256 of its bytes.
        plan: its media plan; None if it isn't needed yet.
        question, system, around: with their placeholders filled.
        defaulted: the placeholders whose default was taken.
        key: 32 bytes that identify this work; see `asked_of`.
        others: keys under which the same model may have done it elsewhere.
        styles: the requests for the medium's captions by name, if it gets several; then this request is for all of
            them together, and its question and settings are the first one's.
        is_followed: whether another question about the medium follows, so that its prefill is worth caching.
        adapter: see `Question`; no part of the key, as a preview stores nothing.
    """

    item: Item
    content: bytes
    plan: MediaPlan | None
    question: str
    system: str
    settings: CaptionSettings
    key: bytes
    others: tuple[bytes, ...] = ()
    around: Around = NOTHING_AROUND
    defaulted: tuple[str, ...] = ()
    styles: Mapping[str, CaptionRequest] = field(default_factory=dict)
    is_followed: bool = False
    adapter: str | None = None

    def of_style(self, name: str | None) -> CaptionRequest:
        """The request for one of its captions; itself for None."""
        return self if name is None else self.styles[name]

    def as_shared(self) -> CaptionRequest:
        """The request under the keys for a near-duplicate's captions."""
        styles = {name: each.as_shared() for name, each in self.styles.items()}
        return replace(self, key=shared_key(self.key), styles=styles)


class RequestBuilder:
    """Builds the requests for items.

    Args:
        model: identifies the model and how it reads media, as JSON values.
        others: the same for this model elsewhere, for `CaptionRequest.others`.
        with_plan: whether every request has a plan, even if no placeholder needs one.
        folders: the prompts and trigger words of folders, which replace those of the run.
    """

    def __init__(
        self,
        prompts: PromptSet,
        settings: CaptionSettings,
        model: Mapping[str, Any],
        others: Sequence[Mapping[str, Any]] = (),
        *,
        with_plan: bool = False,
        folders: FolderPrompts | None = None,
    ) -> None:
        self._prompts = prompts
        self._folders = folders
        # Text that was read from a picture isn't cleaned.
        verbatim = replace(settings, style=replace(settings.style, cleans=False, one_line=False))
        self._by_kind = {False: settings, True: verbatim}
        self._models = (model, *others)
        self._around = settings.style.around()
        self._with_plan = with_plan
        # Most items have the same questions, and the same texts around their captions.
        self._asked = functools.lru_cache(max(1, len(prompts.styles)))(self._ask)
        self._described = functools.lru_cache(64)(self._describe)

    def needs_plan(self, item: Item) -> bool:
        """Whether `build` needs the medium's plan."""
        if self._with_plan:
            return True
        try:
            return bool(_needed(*self._texts(item)) & FACTS)
        except CaptioningError:
            return False  # `build` says why

    def build(
        self, item: Item, content: bytes, plan: MediaPlan | None, original: Callable[[Item], str | None]
    ) -> CaptionRequest:
        """The request of an item whose bytes have the SHA-256 `content`.

        Args:
            plan: None if `needs_plan` is false.
            original: a person's own text beside an item, for `{sidecar}`.

        Raises:
            CaptioningError: the item lacks what its prompt, prefix, suffix or trigger word names.
        """
        prompts, templates = self._texts(item)
        needed, facts = _needed(prompts, templates), None
        if needed & FACTS:
            assert plan is not None
            height, width = plan.source_size
            duration_s = medium_facts(item, plan)["duration_s"]
            duration = None if duration_s is None else f"{duration_s:.1f}"
            text = original(item) if "sidecar" in needed else None
            sidecar = None if text is None else text.strip()
            facts = {"width": width, "height": height, "duration": duration, "sidecar": sidecar}
        work = work_of(item, content)

        def ask(chosen: Question) -> CaptionRequest:
            question = prompts.fill(chosen, item, facts)
            system = prompts.fill_system(item, facts)
            around = Around(*(template.fill(item, facts) for template in templates))
            if templates[2].text and not around.trigger.strip():
                raise CaptioningError(
                    f"The trigger word {templates[2].text!r} is empty for {printable(item.name)}. Give it a default, "
                    "as in {folder|ohwx}; {folder} is the folder below the source."
                )
            asked = self._asked(question, system, chosen.verbatim, around)
            key, *others = (_key(work, each) for each in asked)
            defaulted = prompts.defaulted(chosen, item, facts)
            defaulted += tuple(name for template in templates for name in template.defaulted(item, facts))
            settings = self._by_kind[chosen.verbatim]
            return CaptionRequest(
                item,
                content,
                plan,
                question,
                system,
                settings,
                key,
                tuple(others),
                around,
                tuple(dict.fromkeys(defaulted)),
                adapter=chosen.adapter,
            )

        if not prompts.styles:
            return ask(prompts.choose(work))
        *rest, last = prompts.questions
        styles = {each.name: replace(ask(each), is_followed=True) for each in rest} | {last.name: ask(last)}
        first, *_ = requests = list(styles.values())
        keys = zip(*((each.key, *each.others) for each in requests), strict=True)
        key, *others = (_key_of_all(list(styles), each) for each in keys)
        defaulted = tuple(dict.fromkeys(name for each in requests for name in each.defaulted))
        return replace(first, key=key, others=tuple(others), defaulted=defaulted, styles=styles, is_followed=False)

    def of_text(self, item: Item, content: bytes, question: str, facts: Caption) -> CaptionRequest:
        """A request whose question is a text alone, about an item with the size and duration of `facts`.

        Raises:
            CaptioningError: the item lacks what its prefix, suffix or trigger word names.
        """
        duration = None if facts.duration_s is None else f"{facts.duration_s:.1f}"
        values = {"width": facts.width, "height": facts.height, "duration": duration, "sidecar": None}
        around = Around(*(template.fill(item, values) for template in self._texts(item)[1]))
        key, *others = (_key(content, asked) for asked in self._asked(question, "", False, around))
        settings = self._by_kind[False]
        return CaptionRequest(item, content, None, question, "", settings, key, tuple(others), around)

    def _texts(self, item: Item) -> tuple[PromptSet, tuple[Template, Template, Template]]:
        """An item's prompts, and the templates around its caption. Raises CaptioningError for a folder's own."""
        if self._folders is None:
            return self._prompts, self._around
        prefix, suffix, trigger = self._around
        return self._folders.prompts(item), (prefix, suffix, self._folders.trigger(item) or trigger)

    def _ask(self, question: str, system: str, verbatim: bool, around: Around) -> list[bytes]:
        """SHA-256 of the question and settings, without the medium: for this model first, then for the others."""
        described = self._described(verbatim, around)
        texts = [json.dumps([question, system, each], sort_keys=True) for each in described]
        return [hashlib.sha256(text.encode()).digest() for text in texts]

    def _describe(self, verbatim: bool, around: Around) -> list[dict[str, Any]]:
        settings = self._by_kind[verbatim].describe(around)
        return [{"form": _FORM, **model, **settings} for model in self._models]


def _needed(prompts: PromptSet, templates: Sequence[Template]) -> frozenset[str]:
    return prompts.needs().union(*(template.needs() for template in templates))


def asked_of(key: bytes) -> bytes:
    """The first 8 bytes of a key, which identify the question and settings without the medium."""
    return key[:_ASKED_BYTES]


def work_of(item: Item, content: bytes) -> bytes:
    """Identifies what is seen of an item whose bytes have the SHA-256 `content`."""
    return content if item.part is None or item.part.is_clip else _part_of(content, item.part)


def shared_key(key: bytes) -> bytes:
    """The key for a near-duplicate's caption of the work `key`. The work's own caption stays open."""
    return key[:_ASKED_BYTES] + hashlib.sha256(b"shared" + key).digest()[_ASKED_BYTES:]


def _key_of_all(names: Sequence[str], keys: Sequence[bytes]) -> bytes:
    """The key of a medium's captions together."""
    asked = hashlib.sha256(json.dumps(names).encode() + b"".join(map(asked_of, keys))).digest()
    return asked[:_ASKED_BYTES] + hashlib.sha256(asked + b"".join(keys)).digest()[_ASKED_BYTES:]


def _part_of(content: bytes, part: Part) -> bytes:
    """Identifies a range of a video, as the video's own digest identifies the whole."""
    return hashlib.sha256(content + json.dumps([part.start_s, part.end_s]).encode()).digest()


def _key(content: bytes, asked: bytes) -> bytes:
    """The key of a medium's bytes with a question, a model and settings, as digests."""
    return asked[:_ASKED_BYTES] + hashlib.sha256(asked + content).digest()[_ASKED_BYTES:]
