"""What is asked about an item, found out without decoding it, and the key under which its caption is kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.media.workers import Failed, Inspected, MediaWorkers
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.captioning.texts.prompts import FACTS, PromptSet
from qwen35mm.captioning.texts.words import Words
from qwen35mm.errors import CaptioningError, OutputError
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaPlan

# A change in how captions are made from replies is other work; then this is counted up.
_FORM = 1
_ASKED_BYTES = 8
# A file that changed again within its timestamp's resolution would look unchanged: one this young isn't remembered.
_SETTLED_S = 2.0


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
    """

    schema: JsonSchema | None = None
    words: Words = field(default_factory=Words)
    max_attempts: int = 3
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""
    keep_unfinished: bool = False
    one_line: bool = False

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
        """All of it, as JSON values."""
        style = self.style
        schema = None if style.schema is None else style.schema.text
        words = [style.words.required, style.words.forbidden]
        return {
            "params": asdict(self.params),
            "thinking": self.thinking,
            "style": {**vars(style), "schema": schema, "words": words},
        }


@dataclass(frozen=True)
class CaptionRequest:
    """An item with what is asked about it.

    Attributes:
        content: SHA-256 of its bytes.
        plan: what it costs; None where nobody asked for that yet.
        question, system: with their placeholders filled.
        key: 32 bytes, the name of this work; see `asked_of`.
    """

    item: Item
    content: bytes
    plan: MediaPlan | None
    question: str
    system: str
    settings: CaptionSettings
    key: bytes


class RequestBuilder:
    """Makes requests of items.

    Args:
        model: what tells the model, and how it reads media, from every other; JSON values.
        original: a person's own text beside an item, for `{sidecar}`.
        with_plan: whether every request has a plan, also where no placeholder needs one.
    """

    def __init__(
        self,
        prompts: PromptSet,
        settings: CaptionSettings,
        model: Mapping[str, Any],
        workers: MediaWorkers,
        manifest: Manifest,
        *,
        original: Callable[[Item], str | None],
        with_plan: bool = False,
    ) -> None:
        self._prompts = prompts
        self._settings = settings
        self._described = {"form": _FORM, **model, **settings.describe()}
        self._workers = workers
        self._manifest = manifest
        self._original = original
        self._needs_facts = bool(prompts.needs() & FACTS)
        self._with_plan = with_plan or self._needs_facts

    async def build(self, item: Item) -> CaptionRequest | Failed:
        """The item's request; `Failed` where it can't be read, or lacks what its prompt names.

        Raises:
            OutputError: the manifest can't be read or written.
        """
        content = await asyncio.to_thread(self._known_digest, item)
        plan = None
        if content is None or self._with_plan:
            seen = await self._workers.inspect(item, with_digest=content is None, with_plan=self._with_plan)
            if isinstance(seen, Failed):
                return seen
            content, plan = seen.digest or content, seen.plan
            await asyncio.to_thread(self._remember, item, seen)
        assert content is not None
        try:
            question, system = await asyncio.to_thread(self._fill, item, content, plan)
        except OutputError:
            raise
        except CaptioningError as error:
            return Failed("prompt", str(error))
        key = _key(content, question, system, self._described)
        return CaptionRequest(item, content, plan, question, system, self._settings, key)

    def _known_digest(self, item: Item) -> bytes | None:
        if not isinstance(item.source, Path):
            return None
        try:
            return self._manifest.digest(item.source, item.source.stat())
        except OSError:
            return None  # reading it will say why

    def _remember(self, item: Item, seen: Inspected) -> None:
        if not isinstance(item.source, Path) or seen.digest is None or seen.status is None:
            return
        if time.time() - seen.status.st_mtime > _SETTLED_S:
            self._manifest.remember_digest(item.source, seen.status, seen.digest)

    def _fill(self, item: Item, content: bytes, plan: MediaPlan | None) -> tuple[str, str]:
        facts = None
        if self._needs_facts:
            assert plan is not None
            height, width = plan.source_size
            duration = None if plan.duration_s is None else f"{plan.duration_s:.1f}"
            original = self._original(item) if "sidecar" in self._prompts.needs() else None
            sidecar = None if original is None else original.strip()
            facts = {"width": width, "height": height, "duration": duration, "sidecar": sidecar}
        question = self._prompts.choose(content)
        return self._prompts.fill(question, item, facts), self._prompts.fill_system(item, facts)


def asked_of(key: bytes) -> bytes:
    """The part of a key that says what was asked, whatever the medium: its first 8 bytes."""
    return key[:_ASKED_BYTES]


def _key(content: bytes, question: str, system: str, described: Mapping[str, Any]) -> bytes:
    """The same medium, asked the same of the same model under the same settings, has the same key."""
    asked = hashlib.sha256(json.dumps([question, system, described], sort_keys=True).encode()).digest()
    return asked[:_ASKED_BYTES] + hashlib.sha256(asked + content).digest()[_ASKED_BYTES:]
