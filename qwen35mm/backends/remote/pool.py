"""RemotePool: several servers with the same model, used like one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from qwen35mm.backends.engine_pool import PASSING, PATIENCE_S, EnginePool, Member
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.contract import Event, GenerationRequest, ModelInfo
from qwen35mm.decoding import DecodingProcessor
from qwen35mm.errors import ConfigError, Qwen35mmError
from qwen35mm_preprocess import MediaProcessor

# A request is moved to another server before it is repeated often.
MAX_ATTEMPTS = 2
# The most seconds to find out whether a server answers.
_CONNECT_S = 60.0


class RemotePool:
    """Servers that answer requests together; see `EnginePool`.

    Args:
        servers: at least two, with the same settings but for their addresses; `whole`, so that a request can be moved.
        slots: the most requests at one server.
        patience_s: see `EnginePool`.

    Raises:
        ConfigError: two have the same address.
    """

    is_demo = False

    def __init__(self, servers: Sequence[RemoteBackend], slots: int, patience_s: float = PATIENCE_S) -> None:
        addresses = [server.base_url for server in servers]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ConfigError(f"{address} is given twice. --slots is the number of requests that one server gets.")
        self._servers = servers
        members = [Member(server.host, server, slots) for server in servers]
        self._pool = EnginePool(members, self._probe, patience_s=patience_s)
        self._first = servers[0]
        self._is_listed = False

    @property
    def members(self) -> Sequence[Member[RemoteBackend]]:
        """The servers, and what each did."""
        return self._pool.members

    @property
    def name(self) -> str:
        """The model's name. Raises ConfigError before `connect`, unless it was given."""
        return self._first.name

    @property
    def info(self) -> ModelInfo:
        """The model, as the first server that was there describes it. Raises ConfigError before `connect`."""
        return self._first.info

    @property
    def media(self) -> MediaProcessor | DecodingProcessor:
        return self._first.media

    @property
    def most_at_once(self) -> int:
        return sum(member.slots for member in self.members)

    async def connect(self) -> None:
        """Connects to all servers. Those that can't be reached are tried again while the others work.

        Raises:
            ConfigError: a server lacks the model, or has another one than the first.
            RequestError: a server refused.
            EngineError, QueueFullError, RequestTimeoutError: none can be reached.
        """
        connecting = (server.connect(_CONNECT_S) for server in self._servers)
        found = await asyncio.gather(*connecting, return_exceptions=True)
        for error in found:
            if error is not None and not isinstance(error, PASSING):
                raise error
        here = [server for server, error in zip(self._servers, found, strict=True) if error is None]
        if not here:
            raise next(error for error in found if error is not None)
        self._first = here[0]
        lists = await asyncio.gather(*map(_listed, here))
        self._is_listed = any(self.name in names for names in lists)
        for server, names in zip(here, lists, strict=True):
            self._check_model(server, names)
        for member, error in zip(self.members, found, strict=True):
            if isinstance(error, PASSING):
                self._pool.lose(member, error)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, in words, for what one of the servers is known to lack."""
        for member in self.members:
            if member.state == "here":
                member.engine.check(request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Answers the last message, as `RemoteBackend.stream`, when a server has answered it whole.

        A conversation goes to the server that answered it last, while that one has a free slot.
        """

        async def ask(server: RemoteBackend) -> list[Event]:
            async with contextlib.aclosing(server.stream(request)) as events:
                return [event async for event in events]

        for event in await self._pool.use(ask, request.conversation):
            yield event

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._pool.aclose()
        for server in self._servers:
            await server.aclose()

    async def _probe(self, server: RemoteBackend) -> None:
        await server.connect(_CONNECT_S)
        # It may have been started with another model.
        self._check_model(server, await _listed(server))

    def _check_model(self, server: RemoteBackend, names: Sequence[str]) -> None:
        if server.name == self.name and (not self._is_listed or not names or self.name in names):
            return
        has = ", ".join(f"'{name}'" for name in names) or f"'{server.name}'"
        raise ConfigError(
            f"The server at {server.host} has {has}; the one at {self._first.host} answers as '{self.name}'. "
            "One run has one model: give both servers the same name and pass it as --model, or caption in two runs."
        )


async def _listed(server: RemoteBackend) -> Sequence[str]:
    """The names of its models; none if it lists none."""
    try:
        return await server.list_models(_CONNECT_S)
    except Qwen35mmError:
        return ()
