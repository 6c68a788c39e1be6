"""Tools of MCP servers in a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen35mm.backends.scripting import loop
from qwen35mm.backends.scripting.functions import FunctionTool
from qwen35mm.contract import Image, ToolCall
from qwen35mm.errors import ConfigError
from qwen35mm.tools.answers import MAX_RESULT_CHARS, AnsweredFile, ToolAnswer, shortened
from qwen35mm.tools.config import read_servers, servers_of
from qwen35mm.tools.servers import Tool, ToolServers

if TYPE_CHECKING:
    from typing_extensions import Self

_REFUSED = "The person didn't allow this call."


class McpTools:
    """The tools of MCP servers, for `model.chat(tools=servers.tools())`. Close it, or use it in a `with` block.

    Args:
        config: the usual JSON with `mcpServers`: a file's path, or its content as a dict.
        approve: asked before each call, with the tool's name and all arguments; False tells the model that the call
            wasn't allowed. What a tool says can make a model call others, so `lambda call: True` is for tools that can
            do no harm.

    Raises:
        ConfigError: the configuration can't be used.
        MissingExtraError: the extra `tools` isn't installed.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], *, approve: Callable[[ToolCall], bool]) -> None:
        if not callable(approve):
            raise ConfigError(f"approve must be a function of a ToolCall; got {type(approve).__name__}.")
        is_content = isinstance(config, Mapping)
        self._servers = ToolServers(servers_of(json.dumps(config)) if is_content else read_servers(Path(config)))
        self._approve = approve

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers."""
        self._servers.close()

    def tools(self, *names: str) -> list[FunctionTool]:
        """The tools of these servers, or of all.

        Raises:
            ToolError: a server can't be started.
        """
        return [self._function(tool) for tool in loop.run(self._servers.tools(names or self._servers.names))]

    async def atools(self, *names: str) -> list[FunctionTool]:
        """`tools` for programs with an event loop."""
        return [self._function(tool) for tool in await self._servers.tools(names or self._servers.names)]

    def _function(self, tool: Tool) -> FunctionTool:
        async def call(given: Mapping[str, Any]) -> str | list[str | Image]:
            return _content(await self._servers.call(tool, given))

        def run(given: Mapping[str, Any]) -> Any:
            return call(given) if self._approve(ToolCall(tool.shown, given)) else _REFUSED

        function = FunctionTool(tool.definition)
        function.run = run
        return function


def _content(answer: ToolAnswer) -> str | list[str | Image]:
    """A result as `content_of` takes it, with its first MAX_RESULT_CHARS."""
    parts: list[str | Image] = []
    texts: list[str] = []
    num_left = MAX_RESULT_CHARS
    for part in (*([answer.text] if answer.text or not answer.files else []), *map(_part, answer.files)):
        if isinstance(part, str):
            texts.append(shortened(part, num_left))
            num_left = max(0, num_left - len(part))
            parts.append(texts[-1])
        else:
            parts.append(part)
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _part(file: AnsweredFile) -> str | Image:
    if file.data.startswith(b"%PDF-"):
        return f"[{file.name} is left out: PDFs of tools are read on the chat page only]"
    try:
        return f"\n{file.name}:\n{file.data.decode('utf-8')}\n"
    except UnicodeDecodeError:
        return Image(file.data, stand_in=f"[{file.name} isn't a picture that can be read]")
