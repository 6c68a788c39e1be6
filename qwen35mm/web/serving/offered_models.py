"""Choosing among the models that the program was started with; only if one person has the page."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from qwen35mm.backends.shelf import LentBackend
from qwen35mm.chat.replies.turns import Person
from qwen35mm.errors import NotFoundError, Qwen35mmError, RequestError, report_bug
from qwen35mm.http.requests import request
from qwen35mm.web.serving.models import told
from qwen35mm_preprocess.say import said_of, say, size

logger = logging.getLogger(__name__)


class OfferedModels:
    """The page's requests about the models of a shelf. Answers in progress go on when another model is chosen.

    Args:
        backend: answers the page; a choice changes its model.
    """

    def __init__(self, backend: LentBackend) -> None:
        self._backend = backend
        self._task: asyncio.Task[None] | None = None
        self._state = told("")

    @request
    def models(self, person: Person) -> Any:
        """The models, each with its state."""
        shelf = self._backend.shelf
        listed = [
            {
                "name": offer.name,
                "source": offer.name,
                "size": size(offer.num_bytes),
                "reason": shelf.error(offer.name),
                "usable": True,
                "current": offer.name == self._backend.name,
                "is_demo": offer.is_demo,
                "is_loaded": shelf.state(offer.name) == "loaded",
            }
            for offer in shelf.offers
        ]
        return {"models": listed, "servers": [], "servers_problem": None, "downloads": []}

    def state(self) -> dict[str, Any]:
        """The state of the change: see `Models.state`."""
        return self._state

    @request
    async def change_model(self, person: Person, source: str) -> Any:
        """Begins to answer with another model, which is loaded first; returns the state of the change.

        Raises:
            RequestError: a change is in progress.
            NotFoundError: there is no model of this name.
        """
        shelf = self._backend.shelf
        if source not in {offer.name for offer in shelf.offers}:
            raise NotFoundError(say("There is no model '{name}' here.", name=source[:200]))
        if self._task is not None and not self._task.done():
            raise RequestError(say("Another model is already loading. Wait until it is ready."))
        self._state = told(say("Loading the model"), busy=True)
        self._task = asyncio.create_task(self._change(source))
        if shelf.state(source) == "loaded":
            await self._task
        return self._state

    @request
    async def change_state(self, person: Person) -> Any:
        """`state`."""
        return self._state

    async def _change(self, name: str) -> None:
        error = None
        try:
            async with self._backend.shelf.lease(name):
                self._backend.name = name
        except Qwen35mmError as problem:
            error = said_of(problem)
        except Exception as problem:
            error = report_bug(logger, "the model could not be changed", problem)
        self._state = told("", error=error)
