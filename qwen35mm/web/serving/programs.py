"""The routes of `qwen35mm serve` on the page's port, for programs with a key, on the page's engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35mm.backends.shelf import LentBackend
from qwen35mm.contract import Backend
from qwen35mm.errors import Qwen35mmError
from qwen35mm.pools import REQUESTS
from qwen35mm.server.errors import ApiError
from qwen35mm.server.keys import Keys

_NAMES = (
    *("tokenize", "detokenize", "apply-template", "version", "health", "ready", "metrics"),
    *("openapi.json", "docs", "docs/{path:path}"),
)
_PATHS = ("/v1/{path:path}", *(f"/{name}" for name in _NAMES))


@dataclass(frozen=True)
class ProgramAccess:
    """Which programs may use the page's model.

    Attributes:
        keys: API keys; the page's token is one, too. Without any key, everybody who reaches the page is answered.
        slots: replies that the model writes at one time.
        max_waiting: most requests in the queue.
        responses_dir: folder for stored responses; None keeps them in memory.
    """

    keys: Keys = field(default_factory=lambda: Keys([]))
    slots: int = 4
    max_waiting: int = 64
    responses_dir: Path | None = None


def program_routes(backend: Backend, access: ProgramAccess) -> list[BaseRoute]:
    """The routes of `qwen35mm serve`. A page's session doesn't open them."""
    answers = _ForPrograms(backend, access)
    return [Route(path, answers) for path in _PATHS]


class _ForPrograms:
    """ASGI application of these routes, created at the first request, since most pages never get one."""

    def __init__(self, backend: Backend, access: ProgramAccess) -> None:
        self._backend = backend
        self._access = access
        self._api: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._api is None:
            try:
                made = await REQUESTS.run(self._make)
            except Qwen35mmError as error:
                answer = ApiError(503, str(error), code="unavailable")
                await JSONResponse(answer.body, answer.status)(scope, receive, send)
                return
            # Two requests may come at once: they must share one queue.
            self._api = self._api or made
        await self._api(scope, receive, send)

    def _make(self) -> ASGIApp:
        try:
            from qwen35mm.server.app import create_app
            from qwen35mm.server.openai.responses.kept import KeptResponses
            from qwen35mm.server.several import create_app_of_models
        except ModuleNotFoundError as error:
            missing = ApiError(501, f"Programs can't be answered: install qwen35mm[serve]; {error.name} is missing.")
            return JSONResponse(missing.body, missing.status)
        how: dict[str, Any] = {
            "keys": self._access.keys,
            "kept": None if self._access.responses_dir is None else KeptResponses.on_disk(self._access.responses_dir),
            "max_waiting": self._access.max_waiting,
            "settings": None,
        }
        backend: Any = self._backend
        if not isinstance(backend, LentBackend):
            return create_app(backend, num_places=_places(self._access.slots), **how)
        shelf = backend.shelf

        def places(name: str) -> int:
            offer = shelf.offer(name)
            return _places(self._access.slots if offer is None else offer.num_slots)

        return create_app_of_models(shelf, num_places=places, default=lambda: _used_by(backend), **how)


def _places(slots: int) -> int:
    """Leaves one slot to the people on the page, if there are several."""
    return max(slots - 1, 1)


def _used_by(backend: LentBackend) -> str:
    """The name of the model that the page uses. Raises ApiError: 501, it is a server's."""
    host = backend.info.host
    if host is not None:
        raise ApiError(501, f"The page's model isn't here: {host} answers. Ask that server.", code="not_here")
    return backend.name
