"""Leaves media out of a run: those for which `--where` is false, and all but one of each group that looks alike.

What was measured is in the manifest under the medium's bytes, so a later run decodes nothing for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from qwen35mm.captioning.items import Failed, Item
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.media.similar import SimilarIndex
from qwen35mm.captioning.media.workers import MediaWorkers, Prepared
from qwen35mm.captioning.records import medium_facts, printable
from qwen35mm.captioning.requests import CaptionRequest, work_of
from qwen35mm.captioning.where import Where, item_facts, size_facts

_SIMILARITY = "similarity"


class Filter:
    """Says why a medium is left out. Every method may raise OutputError.

    Args:
        where: what a medium must satisfy; None for no condition.
        max_distance: the most bits by which near-duplicates differ, of which one is kept; None keeps all.
    """

    def __init__(self, where: Where | None, max_distance: int | None, ledger: Ledger, workers: MediaWorkers) -> None:
        self._where = where
        self._skips_similar = max_distance is not None
        self._do, self._manifest = ledger.do, ledger.manifest
        self._workers = workers
        self._kept = SimilarIndex[str](max_distance or 0)
        self._kept_names: set[str] = set()

    @property
    def needs_pixels(self) -> bool:
        """Whether media must be decoded."""
        return self._skips_similar or (self._where is not None and self._where.needs_pixels)

    @property
    def needs_similarity(self) -> bool:
        """Whether media need their perceptual hash."""
        return self._skips_similar

    async def open(self) -> None:
        """Reads which media earlier runs kept. One that was deleted is no longer in the way of those like it."""
        for name, path, similarity in await self._do(lambda: list(self._manifest.kept())):
            if path is None or path.exists():
                self._kept.add(similarity, name)
                self._kept_names.add(name)

    async def measured(self, request: CaptionRequest, prepared: Prepared) -> None:
        """Stores what is known of a decoded medium."""
        facts = medium_facts(request.item, prepared.medium.plan)
        values = {name: facts[name] for name in ("width", "height", "duration_s")}
        values |= prepared.measured
        if prepared.similarity is not None:
            values[_SIMILARITY] = f"{prepared.similarity:x}"
        await self._remember(request, values)

    async def reason(self, request: CaptionRequest, *, decodes: bool = False) -> str | None:
        """Why an item is left out; None if it is wanted, or if only its pixels can tell.

        Args:
            decodes: decodes a medium if only its pixels can tell.
        """
        try:
            facts = item_facts(request.item)
        except OSError:
            return None  # reading it says why
        where = self._where
        if where is not None and where.holds(facts) is False:
            return self._unmet(facts)
        if not self._skips_similar and (where is None or where.holds(facts)):
            return None
        stored = await self._stored(request, decodes=decodes)
        facts |= _values(stored)
        if where is not None and not where.holds(facts):
            return self._unmet(facts) if where.holds(facts) is False else None
        if self._skips_similar and _SIMILARITY in stored and self._named(request.item) not in self._kept_names:
            return await self._like(request, int(stored[_SIMILARITY], 16))
        return None

    async def _like(self, request: CaptionRequest, similarity: int) -> str | None:
        """Which kept item this one looks like; None if it is kept itself."""
        item, name = request.item, self._named(request.item)
        found = self._kept.find(similarity)
        if found is not None:
            return f"looks like {printable(found)}"
        # Before any await, so that no other item is kept for the same look.
        self._kept.add(similarity, name)
        self._kept_names.add(name)
        await self._do(self._manifest.keep, name, item.path, similarity)
        return None

    def _named(self, item: Item) -> str:
        """An item's name in the manifest, which differs also between the sources of several jobs."""
        if item.path is None:
            return item.name
        place = os.fsdecode(self._manifest.place(item.path))
        return place if item.part is None else f"{place}/{item.part.number:04}"

    async def _stored(self, request: CaptionRequest, *, decodes: bool) -> Mapping[str, Any]:
        """What the manifest knows of a medium; its size is read if that is missing and could decide."""
        stored = await self._do(self._manifest.facts, work_of(request.item, request.content))
        if decodes and self.needs_pixels and not self._has_pixels(stored):
            prepared = await self._workers.prepare(
                request.item, request.content, "pixels", with_similarity=self._skips_similar
            )
            if not isinstance(prepared, Failed):
                await self.measured(request, prepared)
                stored = await self._do(self._manifest.facts, work_of(request.item, request.content))
        elif "width" not in stored and self._where is not None and self._where.needs_size:
            plan = request.plan
            if plan is None:
                seen = await self._workers.inspect(request.item, with_digest=False, with_plan=True)
                plan = None if isinstance(seen, Failed) else seen.plan
            if plan is not None:
                facts = medium_facts(request.item, plan)
                stored = {**stored, **{name: facts[name] for name in ("width", "height", "duration_s")}}
                await self._remember(request, stored)
        return stored

    def _has_pixels(self, stored: Mapping[str, Any]) -> bool:
        return "sharpness" in stored and (not self._skips_similar or _SIMILARITY in stored)

    async def _remember(self, request: CaptionRequest, values: Mapping[str, Any]) -> None:
        await self._do(self._manifest.remember_facts, work_of(request.item, request.content), values)

    def _unmet(self, facts: Mapping[str, Any]) -> str:
        assert self._where is not None
        names = sorted(self._where.names - {"metadata"})
        values = ", ".join(
            f"{name} is {printable(facts[name]) if isinstance(facts[name], str) else facts[name]}"
            for name in names
            if facts.get(name) is not None
        )
        return f"not {self._where.text}" + (f": {values}" if values else "")


def _values(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The values of names in `--where` from what the manifest stores."""
    found = {name: stored[name] for name in ("sharpness", "letterbox") if name in stored}
    if "width" in stored:
        found |= size_facts(stored["width"], stored["height"], stored["duration_s"])
    return found
