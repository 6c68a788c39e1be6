"""What an item is asked, and the name of that work: found out without decoding it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.media import worker as media_worker
from qwen35mm.captioning.media.worker import Failed, Seen
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.texts.prompts import FACTS, MediumFacts, PromptSet
from qwen35mm.captioning.work import work_key
from qwen35mm.errors import CaptioningError, OutputError
from qwen35mm_preprocess import MediaPlan

# A file that changed again within its timestamp's resolution would look unchanged: one this young isn't remembered.
_SETTLED_S = 2.0


@dataclass(frozen=True)
class Look:
    """An item with what it is asked.

    Attributes:
        content: SHA-256 of its bytes.
        plan: what it costs; None where nobody asked for that yet.
        key: the name of the work; see `work_key`.
    """

    item: Item
    content: bytes
    plan: MediaPlan | None
    question: str
    system: str
    key: bytes


class Looks:
    """Looks at items.

    Args:
        settings: what decides a caption besides medium and prompt; see `work_key`.
        original: a person's own text beside an item, for `{sidecar}`.
        with_plan: whether every look brings a plan, also where no placeholder needs one.
    """

    def __init__(
        self,
        prompts: PromptSet,
        workers: MediaWorkers,
        manifest: Manifest,
        settings: Mapping[str, Any],
        *,
        original: Callable[[Item], str | None],
        with_plan: bool = False,
    ) -> None:
        self._prompts = prompts
        self._workers = workers
        self._manifest = manifest
        self._settings = settings
        self._original = original
        self._needs_facts = bool(prompts.needs() & FACTS)
        self._needs_sidecar = "sidecar" in prompts.needs()
        self._with_plan = with_plan or self._needs_facts

    async def look(self, item: Item) -> Look | Failed:
        """What the item is asked; `Failed` where it can't be read, or lacks what its prompt names.

        Raises:
            OutputError: the manifest can't be read or written.
        """
        content = await asyncio.to_thread(self._known_digest, item)
        plan = None
        if content is None or self._with_plan:
            seen = await self._workers.do(media_worker.Look(item, content is None, self._with_plan))
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
        return Look(item, content, plan, question, system, work_key(content, question, system, self._settings))

    async def forget(self, item: Item) -> None:
        """The item's bytes aren't those that were looked at. Raises OutputError."""
        if isinstance(item.source, Path):
            await asyncio.to_thread(self._manifest.forget_digest, item.source)

    def _known_digest(self, item: Item) -> bytes | None:
        if not isinstance(item.source, Path):
            return None
        try:
            return self._manifest.digest(item.source, item.source.stat())
        except OSError:
            return None  # looking at it will say why

    def _remember(self, item: Item, seen: Seen) -> None:
        if not isinstance(item.source, Path) or seen.digest is None or seen.status is None:
            return
        if time.time() - seen.status.st_mtime > _SETTLED_S:
            self._manifest.remember_digest(item.source, seen.status, seen.digest)

    def _fill(self, item: Item, content: bytes, plan: MediaPlan | None) -> tuple[str, str]:
        facts = None
        if self._needs_facts:
            assert plan is not None
            height, width = plan.source_size
            facts = MediumFacts(width, height, plan.duration_s, self._original(item) if self._needs_sidecar else None)
        question = self._prompts.choose(content)
        return self._prompts.fill(question, item, facts), self._prompts.fill_system(item, facts)
