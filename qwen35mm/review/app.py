"""The review page's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.applications import Starlette

from qwen35mm.captioning.records import printable
from qwen35mm.captioning.texts.presets import PRESETS, preset_question
from qwen35mm.captioning.texts.prompts import Question
from qwen35mm.captioning.texts.trainers import TRAINERS, Length, trainer_named
from qwen35mm.errors import NotFoundError
from qwen35mm.http.requests import problem, request
from qwen35mm.http.sessions import PageToken
from qwen35mm.pools import REQUESTS, SEARCH
from qwen35mm.pools import Asker as Waiting
from qwen35mm.review.asking import Asker
from qwen35mm.review.changes import MAX_TEXT_BYTES, ChangedError, Undone
from qwen35mm.review.collection import Changed, Collection, Plan, Search
from qwen35mm.review.edits import adding_tags, deduplicating, differences, removing_tags, replacing_text, sorting
from qwen35mm.review.page import MediaPage, Number, create_page_app
from qwen35mm.review.statistics import measure, num_words
from qwen35mm.review.training import Training
from qwen35mm_preprocess import MediaKind
from qwen35mm_preprocess.say import said_of, say

# A caption as JSON, where every character may be escaped.
_MAX_BODY_BYTES = 8 * MAX_TEXT_BYTES
_MAX_ITEMS = 200
_MAX_SELECTED = 1_000_000
# Changes that a preview shows, and of each caption.
_SHOWN = 20
_SHOWN_CHARS = 4000

Numbers = Annotated[list[Number], Field(max_length=_MAX_SELECTED)]
Words = Annotated[str, Field(max_length=MAX_TEXT_BYTES)]


def create_app(reviewed: Collection[Any], asker: Asker, *, training: Training, token: PageToken) -> Starlette:
    """The application; when it shuts down, it closes the asker and stops the training."""

    async def close() -> None:
        await asyncio.gather(asker.close(), training.stop())

    page = _Page(reviewed, asker, training)
    return create_page_app(page, token=token, max_bytes=_MAX_BODY_BYTES, close=close)


class _Page(MediaPage):
    def __init__(self, reviewed: Collection[Any], asker: Asker, training: Training) -> None:
        super().__init__(reviewed.limits)
        self._reviewed = reviewed
        self._training = training
        self._asker = asker
        self._num_plans = 0
        self._plan: tuple[int, Plan | None] = (0, None)

    def version(self, number: int) -> str:
        return self._reviewed.version(number)

    def medium(self, number: int) -> tuple[MediaKind, Path]:
        entry, path = self._reviewed.medium(number)
        return entry.kind, path

    @request
    async def look(self) -> Any:
        """Lists the media, without opening a file."""
        numbers = await SEARCH.run(self._reviewed.look)
        counts = self._reviewed.counts()
        title = printable(self._reviewed.title)
        return {"title": title, "numbers": numbers, "counts": counts, "presets": list(PRESETS)}

    @request
    async def training(self) -> Any:
        """The training on these captions, as far as it is."""
        return self._training.look()

    @request
    async def train(self, accepted: bool = False, restart: bool = False) -> Any:
        """Starts or resumes the training."""
        await self._training.start(accepted=accepted, restart=restart)
        return self._training.look()

    @request
    async def stop_training(self) -> Any:
        await self._training.stop()
        return self._training.look()

    @request
    async def find(
        self,
        words: str = "",
        show: Literal["all", "open", "accepted", "empty", "similar"] = "all",
        flag: str = "",
        min_chars: int | None = None,
        max_chars: int | None = None,
    ) -> Any:
        return await SEARCH.run(self._reviewed.find, Search(words, show, flag, min_chars, max_chars))

    @request
    async def items(self, numbers: Annotated[list[Number], Field(max_length=_MAX_ITEMS)]) -> Any:
        return {"items": await REQUESTS.run(self._reviewed.describe, numbers)}

    @request
    async def save(self, number: Number, digest: str, text: Words, editing: str = "") -> Any:
        return await self._changed(number, self._reviewed.save, text, digest, editing)

    @request
    async def accept(self, number: Number, digest: str, accepted: bool) -> Any:
        return await self._changed(number, self._reviewed.accept, digest, accepted)

    @request
    async def undo(self, name: str = "") -> Any:
        undone = await REQUESTS.run(self._reviewed.undo, name) or Undone([])
        items = await REQUESTS.run(self._reviewed.describe, undone.places[:_MAX_ITEMS])
        found = {"numbers": undone.places, "kept": undone.kept, "many": undone.is_run}
        return {"items": items, **found, "counts": self._reviewed.counts()}

    @request
    async def plan(
        self,
        numbers: Numbers,
        action: Literal["replace", "add", "remove", "sort", "deduplicate"],
        find: Words = "",
        by: Words = "",
        tags: Words = "",
        regex: bool = False,
        ignore_case: bool = False,
        words: bool = False,
        last: bool = False,
    ) -> Any:
        """What an edit would change among these captions; `carry_out` makes exactly these changes."""
        edit = {
            "replace": lambda: replacing_text(find, by, regex=regex, ignore_case=ignore_case, words=words),
            "add": lambda: adding_tags([tags], last=last),
            "remove": lambda: removing_tags([tags]),
            "sort": sorting,
            "deduplicate": deduplicating,
        }[action]()
        plan = await SEARCH.run(self._reviewed.plan, numbers, edit)
        self._num_plans += 1
        self._plan = (self._num_plans, plan)
        shown = [
            {"name": printable(each.name), "parts": differences(each.before[:_SHOWN_CHARS], each.after[:_SHOWN_CHARS])}
            for each in plan.changes[:_SHOWN]
        ]
        return {"plan": self._num_plans, "num": len(plan.changes), "others": plan.num_others, "shown": shown}

    @request
    async def carry_out(self, plan: Number) -> Any:
        """Makes the changes of the last plan."""
        number, planned = self._plan
        if planned is None or number != plan:
            raise NotFoundError(say("The preview is out of date. Look at it again."))
        self._plan = (number, None)
        return self._many(await SEARCH.run(self._reviewed.carry_out, planned))

    @request
    async def statistics(self, numbers: Numbers, trainer: str = "") -> Any:
        """What these captions have in common; lengths in a trainer's tokens or, without one, in words."""
        length = Length.of(trainer_named(trainer)) if trainer else None
        count = num_words if length is None else length.count
        found = await SEARCH.run(lambda: measure(self._reviewed.texts(numbers), count))
        bars = found.bars(None if length is None else length.max_tokens)
        return {
            "captions": found.num_captions,
            "median": found.median,
            "bars": [asdict(bar) for bar in bars],
            "tags": found.is_about_tags,
            "counted": found.num_counted,
            "counts": found.counts.most_common(_MAX_ITEMS),
            "trainers": list(TRAINERS),
        }

    @request
    async def accept_many(self, numbers: Numbers, accepted: bool) -> Any:
        return self._many(await SEARCH.run(self._reviewed.accept_many, numbers, accepted))

    @request
    async def ask(self, number: Number, asker: Waiting, prompt: Words = "", preset: str = "") -> Any:
        """Another caption by the model; cancelled when the page stops waiting."""
        entry, path = await REQUESTS.run(self._reviewed.medium, number)
        text = (await REQUESTS.run(self._reviewed.describe, [number]))[0]["text"]
        question = preset_question(preset) if preset else Question(prompt)
        caption = await self._asker.ask(entry.name, path, question, text)
        return {"text": caption.text, "flags": [printable(flag) for flag in caption.flags]}

    def _many(self, changed: Changed) -> Any:
        refused = changed.refused[:_MAX_ITEMS]
        return {"num": changed.num, "name": changed.name, "refused": refused, "counts": self._reviewed.counts()}

    async def _changed(self, number: int, change: Callable[..., dict[str, Any]], *arguments: object) -> Any:
        try:
            item = await REQUESTS.run(change, number, *arguments)
        except ChangedError as error:
            (item,) = await REQUESTS.run(self._reviewed.describe, [number])
            return problem(said_of(error), "changed", 409, item=item)
        return {"item": item, "counts": self._reviewed.counts()}
