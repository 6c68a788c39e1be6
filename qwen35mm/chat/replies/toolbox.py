"""The tools of people's chats: who may use which, and what runs without asking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store.records import Node
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.tools.servers import Tool, ToolServers

# Why a person is asked: they never allowed the tool for good; it is another one now; the question's budget is spent;
# nothing keeps the call from running, but nobody had it run.
Reason = Literal["new", "changed", "budget", "waiting"]
_ALLOWED = "tool "


class Toolbox:
    """Everybody's tools.

    Args:
        servers: None if there are no tools.
        store: has what people allowed, as preferences `tool SERVER/NAME` with the tool's digest.
        may_use: whether an owner of conversations may use tools.
    """

    def __init__(
        self,
        servers: ToolServers | None = None,
        store: ConversationStore | None = None,
        may_use: Callable[[str], bool] = lambda owner: True,
    ) -> None:
        self.servers = servers
        self._store = store
        self._may_use = may_use

    def names(self, owner: str) -> tuple[str, ...]:
        """The servers that a person may switch on."""
        return self.servers.names if self.servers is not None and self._may_use(owner) else ()

    def chosen(self, owner: str, settings: Settings) -> tuple[str, ...]:
        """The servers that a chat uses; one that is gone isn't left out, since the model knew its tools."""
        return settings.tools if self.names(owner) else ()

    async def tools(self, owner: str, names: Sequence[str]) -> tuple[Tool, ...]:
        """What servers offer now. Raises ToolError."""
        return () if self.servers is None or not names else await self.servers.tools(names, owner)

    def listed(self, owner: str, settings: Settings) -> tuple[Tool, ...]:
        """What a chat's servers offered last, without asking them."""
        names = self.chosen(owner, settings)
        return () if self.servers is None or not names else self.servers.listed(names, owner)

    def definitions(self, owner: str, settings: Settings) -> list[Mapping[str, Any]]:
        """The tools in a chat's prompts, as far as known."""
        return [tool.definition for tool in self.listed(owner, settings)]

    def allow(self, owner: str, tool: Tool) -> None:
        """Lets a tool run without asking, as long as its description and its schema stay."""
        if self._store is not None:
            self._store.change_preferences(owner, {_key(tool): tool.digest})

    def forget(self, owner: str, name: str) -> None:
        """Has a tool asked for again; `name` is one of `allowed`."""
        if self._store is not None:
            self._store.change_preferences(owner, {f"{_ALLOWED}{name}": None})

    def allowed(self, owner: str) -> list[str]:
        """The tools that run without asking, as SERVER/NAME."""
        kept = {} if self._store is None else self._store.preferences(owner)
        return sorted(key.removeprefix(_ALLOWED) for key, value in kept.items() if key.startswith(_ALLOWED) and value)

    def asks(self, owner: str, settings: Settings, path: Sequence[Node]) -> dict[str, Reason]:
        """The calls at the end of a path that a person has to allow, by their ids. Reads the database."""
        calls = path[-1].calls if path else ()
        if not calls:
            return {}
        allowed = {} if self._store is None else self._store.preferences(owner)
        known = {tool.shown: tool for tool in self.listed(owner, settings)}
        after = [node.role for node in path]
        num_calls = after[len(after) - after[::-1].index("user") if "user" in after else 0 :].count("tool")
        found: dict[str, Reason] = {}
        for number, call in enumerate(calls, start=1):
            tool = known.get(call.name)
            kept = None if tool is None else allowed.get(_key(tool))
            if tool is None or kept is None:
                found[call.id] = "new"
            elif kept != tool.digest:
                found[call.id] = "changed"
            elif num_calls + number > settings.max_calls:
                found[call.id] = "budget"
        return found


def _key(tool: Tool) -> str:
    return f"{_ALLOWED}{tool.server}/{tool.name}"
