"""The tool servers of a page: those that it was started with, and those that its one person names in the settings."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from qwen35mm.chat.replies.toolbox import Toolbox
from qwen35mm.chat.replies.turns import Person
from qwen35mm.errors import ConfigError, NotFoundError, StorageError
from qwen35mm.folders import write_private
from qwen35mm.http.requests import request
from qwen35mm.pools import REQUESTS
from qwen35mm.tools.config import ToolServer, servers_of
from qwen35mm_preprocess.say import say

_NONE = '{\n  "mcpServers": {}\n}\n'


class ToolSettings:
    """Requests about tool servers.

    Args:
        toolbox: gets the servers.
        given: the servers that the program was started with.
        path: the person's own, in the usual JSON, readable by them only since it may have keys; None if nobody may
            name any here. A server is a program that runs as the person: only a page of one's own has this.
    """

    def __init__(self, toolbox: Toolbox, given: tuple[ToolServer, ...], path: Path | None) -> None:
        self._toolbox = toolbox
        self._given = given
        self._path = path

    def load(self) -> None:
        """Reads the person's own servers. Raises ConfigError."""
        if self._path is not None:
            self._take(self._checked(self._text()))

    @request
    async def tool_servers(self, person: Person) -> Any:
        """The servers that the person may switch on; `text` has their own, and is None if they can't name any."""
        names = set(self._toolbox.names(person.owner))
        servers = self._toolbox.servers.servers if self._toolbox.servers else ()
        shown = [{"name": each.name, "runs": _runs(each)} for each in servers if each.name in names]
        # What is run, and its arguments, only the owner is told.
        if self._path is None:
            shown = [{**each, "runs": ""} for each in shown]
        text = None if self._path is None else await REQUESTS.run(self._text)
        allowed = await REQUESTS.run(self._toolbox.allowed, person.owner) if names else []
        return {"servers": shown, "allowed": allowed, "text": text}

    @request
    async def save_tool_servers(self, person: Person, text: str) -> Any:
        """Replaces the person's own servers."""
        await REQUESTS.run(self._save, text)
        return await self.tool_servers(person)

    @request
    async def forget_tool(self, person: Person, tool: str) -> Any:
        """Has a tool asked for again before it runs."""
        await REQUESTS.run(self._toolbox.forget, person.owner, tool)
        return {}

    def _save(self, text: str) -> None:
        if self._path is None:
            raise NotFoundError(say("Tool servers can't be named on this page."))
        servers = self._checked(text)
        try:
            write_private(self._path, text)
        except OSError:
            raise StorageError(
                say("The servers in {path} can't be saved. Check the folder, and its disk.", path=str(self._path))
            ) from None
        self._take(servers)

    def _text(self) -> str:
        assert self._path is not None
        try:
            return self._path.read_text("utf-8")
        except FileNotFoundError:
            return _NONE
        except (OSError, UnicodeDecodeError):
            raise StorageError(
                say("The servers in {path} can't be read. Repair the file, or remove it.", path=str(self._path))
            ) from None

    def _checked(self, text: str) -> tuple[ToolServer, ...]:
        own = servers_of(text)
        twice = {each.name for each in own} & {each.name for each in self._given}
        if twice:
            raise ConfigError(say("There is a tool server {name} already.", name=min(twice)))
        return own

    def _take(self, own: tuple[ToolServer, ...]) -> None:
        if self._toolbox.servers is not None:
            self._toolbox.servers.replace((*self._given, *own))


def _runs(server: ToolServer) -> str:
    """What a server is, without its keys."""
    return server.url or shlex.join((server.command or "", *server.args))
