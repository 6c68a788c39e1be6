"""The page's model as a tool of an MCP server, with the official SDK (the extra `mcp`)."""

# No `from __future__ import annotations`: the SDK reads the tool's types from its annotations.

import contextlib
import logging
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35mm.errors import MissingExtraError, Qwen35mmError, report_bug
from qwen35mm.http.bodies import as_body, read_bytes
from qwen35mm.http.errors import HttpError
from qwen35mm.http.requests import MAX_BODY_BYTES, answer_to
from qwen35mm.http.streams import until_ending
from qwen35mm.web.serving.calls import Calls
from qwen35mm.web.serving.people import People
from qwen35mm_preprocess.say import english, said_of

logger = logging.getLogger(__name__)

PATH = "/gradio_api/mcp"


class McpTool:
    """The tool `chat`, at Gradio's address for tools.

    Raises:
        MissingExtraError: the SDK isn't installed.
    """

    def __init__(self, people: People, calls: Calls) -> None:
        self._people = people
        self._calls = calls
        try:
            from mcp.server.fastmcp import Context, FastMCP
            from mcp.server.fastmcp.exceptions import ToolError
            from mcp.server.transport_security import TransportSecuritySettings
        except ModuleNotFoundError as error:
            raise MissingExtraError("An MCP server", "mcp") from error

        # The page's guards have already checked hosts and origins.
        guarded = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        how: dict[str, Any] = {"stateless_http": True, "streamable_http_path": PATH, "log_level": "WARNING"}
        self._mcp = FastMCP("qwen35mm", transport_security=guarded, **how)

        @self._mcp.tool()
        async def chat(
            message: str,
            context: Context[Any, Any, Request],
            system_prompt: str = "",
            history: list[dict[str, str]] | None = None,
            settings: dict[str, Any] | None = None,
        ) -> str:
            """Answers a question.

            Args:
                message: The question.
                system_prompt: How the model should behave.
                history: Earlier messages: objects with a role (user or assistant) and a content.
                settings: For example temperature, top_p, max_tokens, seed, thinking (true or false).
            """
            request = context.request_context.request
            assert request is not None, "it came over HTTP"
            text = ""
            try:
                person = people.calling(request)
                async with aclosing(calls.answer(person, message, None, system_prompt, history, settings)) as texts:
                    async for longer in texts:
                        text = longer
            except Qwen35mmError as error:
                raise ToolError(english(said_of(error))) from None
            except Exception as error:
                raise ToolError(english(report_bug(logger, "a call of the tool failed", error))) from None
            return text

        self._app: ASGIApp = self._mcp.streamable_http_app()

    def routes(self) -> list[BaseRoute]:
        """The routes of the tool."""
        return [Route(path, self, methods=["GET", "POST", "DELETE"]) for path in (PATH, f"{PATH}/")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = Request(scope, receive)
            self._people.calling(request)
            if scope["method"] == "POST":
                receive = as_body(bytes(await read_bytes(request, MAX_BODY_BYTES)))
        except Exception as error:
            await answer_to(error)(scope, receive, send)
            return
        answered = self._app({**scope, "path": PATH, "raw_path": PATH.encode()}, receive, send)
        with contextlib.suppress(HttpError):
            await until_ending(scope, answered)

    def lives(self) -> Any:
        """The context manager in which the tool runs."""
        return self._mcp.session_manager.run()
