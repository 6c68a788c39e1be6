"""The model behind a server's address: its name, and what is known about it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from qwen35mm.backends.remote.connection import Connection
from qwen35mm.backends.remote.counting import TokenCounter
from qwen35mm.backends.remote.faults import Fault
from qwen35mm.backends.remote.programs import ASSUMED_CONTEXT, TRANSFORMERS, UNKNOWN, Program, Told, is_transformers
from qwen35mm.contract import ModelInfo
from qwen35mm.errors import ConfigError
from qwen35mm_preprocess.say import say

# Fields that make a server report more about a reply.
_TELLING = frozenset({"stream_options", "timings_per_token", "return_progress"})

Models = dict[str, Any]
Attempt = Callable[[Callable[[], Awaitable[Models]]], Awaitable[Models]]


class ServedModel:
    """Asks a server about its model, and remembers the answers.

    Args:
        name: its name there; None takes the server's only one.

    Attributes:
        program: the server's program; UNKNOWN before `connect`.
    """

    def __init__(self, connection: Connection, name: str | None) -> None:
        self._connection = connection
        self._name = name
        self.program: Program = UNKNOWN
        self._info: ModelInfo | None = None
        self._context_length: int | None = None
        self._counter: TokenCounter | None = None
        # Names of refused fields.
        self._refused: set[str] = set()

    @property
    def is_named(self) -> bool:
        return self._name is not None

    @property
    def is_known(self) -> bool:
        return self._info is not None

    @property
    def name(self) -> str:
        """Raises ConfigError before `connect`, unless the name was given."""
        if self._name is None:
            raise ConfigError("The server's model isn't known yet: connect first, or name it.")
        return self._name

    @property
    def info(self) -> ModelInfo:
        """Raises ConfigError before `connect`."""
        if self._info is None:
            raise ConfigError("The server's model isn't known yet: connect first.")
        return self._info

    @property
    def context_length(self) -> int:
        """Most tokens of a conversation; ASSUMED_CONTEXT if not reported. Raises as `info`."""
        return self._context_length or (ASSUMED_CONTEXT if self.info else 0)

    @property
    def counter(self) -> TokenCounter:
        """Raises as `info`."""
        if self._counter is None:
            raise ConfigError("The server's model isn't known yet: connect first.")
        return self._counter

    async def connect(self, attempt: Attempt) -> None:
        """Finds out the model's name, if not given, and its abilities.

        Args:
            attempt: makes a request, repeating it while that can help.

        Raises:
            ConfigError: the server has no model, or several and none was named.
            Fault: it refused, or can't be reached.
        """
        models = await attempt(self._list_models)
        if self._name is None:
            if len(models) != 1:
                names, host = ", ".join(f"'{name}'" for name in [*models][:20]), self._connection.host
                if not models:
                    raise ConfigError(say("Name the model to use of the server at {host}: it has none.", host=host))
                raise ConfigError(
                    say(
                        "Name the model to use of the server at {host}: it has {names}.",
                        host=host,
                        names=self._connection.safe(names),
                    )
                )
            (self._name,) = models
        # The given name may be an alias that isn't listed.
        entry = models.get(self._name) or (next(iter(models.values())) if len(models) == 1 else None)
        told = await self._look(Told.read(entry))
        self.program = told.program
        self._info = told.info(self._name, self._connection.host)
        self._context_length = told.context_length
        self.close()
        self._counter = TokenCounter(self._connection.blocking_client(), self._name, told.program.counting)

    def spare(self, sent: dict[str, Any]) -> dict[str, Any]:
        """The fields of a request without dispensable ones that the server refused before."""
        return {name: value for name, value in sent.items() if not (name in self._refused and _is_spare(name, value))}

    def learn(self, fault: Fault, sent: dict[str, Any]) -> bool:
        """Remembers what the server or its model turned out to lack.

        Returns:
            Whether the fields that it doesn't know can be left out of the request.
        """
        if fault.lacks is not None:
            self._lacks(fault.lacks)
        if not fault.unknown or not all(_is_spare(name, sent.get(name)) for name in fault.unknown):
            return False
        self._refused |= {*fault.unknown}
        if "chat_template_kwargs" in fault.unknown:
            self._lacks("thinking")
        return True

    def close(self) -> None:
        """Ends counting."""
        if self._counter is not None:
            self._counter.close()

    def _lacks(self, ability: str) -> None:
        if self._info is not None:
            self._info = replace(self._info, **{ability: False})

    async def _list_models(self) -> Models:
        try:
            return await self._connection.list_models()
        except Fault as fault:
            # Some servers list no models; transformers' lists only those in its cache, if it has one.
            if self._name is None or fault.status in (None, 401, 403):
                raise
            return {self._name: None}

    async def _page(self, path: str) -> Any:
        """The JSON at a path of the server's root. Raises Fault."""
        url = f"{self._connection.root}{path}"
        try:
            return await self._connection.get_json(url)
        except Fault as fault:
            # Some servers disconnect after an error in their list of models.
            if fault.status is not None:
                raise
            return await self._connection.get_json(url)

    async def _look(self, told: Told) -> Told:
        """Adds what the server reports outside its list of models."""
        with contextlib.suppress(Fault):
            if told.program.key == "llamacpp":
                return told.with_props(await self._page("/props"))
            if not told.program.key and is_transformers(await self._page("/openapi.json")):
                return replace(told, program=TRANSFORMERS)
        self._connection.check_open()
        return told


def _is_spare(name: str, value: Any) -> bool:
    """Whether a field can be left out: it only asks for numbers, or turns off thinking, a mere preference."""
    return name in _TELLING or (name == "chat_template_kwargs" and value == {"enable_thinking": False})
