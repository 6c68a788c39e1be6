"""Sends the page's requests to the services of stored or of temporary conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from qwen35mm.chat.replies.turns import Person
from qwen35mm.chat.store.temporary import TemporaryChats
from qwen35mm.http.requests import Requests, call, request, requests_of


class TemporaryRequests(Requests):
    """`POST .../api/NAME`: lets the services of a request's conversation answer it.

    Args:
        who: returns the person who sends a request.
        chats: the temporary conversations.
        services: answer all requests that aren't about temporary conversations.
        temporary: services that answer requests about temporary conversations.
    """

    def __init__(
        self,
        who: Callable[[Request], Person],
        chats: TemporaryChats,
        services: Sequence[object],
        temporary: Sequence[object],
    ) -> None:
        super().__init__(who, *services, EndsTemporary(chats))
        self._chats = chats
        self._in_memory = requests_of(*temporary)

    async def answer(self, request: Request, person: Person, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self._in_memory or not self._chats.is_meant(person.owner, name, arguments):
            return await super().answer(request, person, name, arguments)
        result = await call(self._in_memory[name], request, person, arguments)
        self._chats.mark(person.owner, result)
        return result


class EndsTemporary:
    """Ends temporary conversations."""

    def __init__(self, chats: TemporaryChats) -> None:
        self._chats = chats

    @request
    async def end_temporary(self, person: Person, conversation: str | None = None) -> Any:
        """Ends a temporary conversation. The files of one that hasn't begun go a few minutes later: another tab may
        have one, too."""
        if conversation is not None:
            await self._chats.end(person.owner, conversation)
        return {}
