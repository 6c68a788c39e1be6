"""The servers' sessions: started when somebody needs them, again after a crash, and ended with the program.

They live in one thread with a loop of its own, which serves callers of any loop and any thread. Reading a message stops
the other threads, so what a server may send is limited.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from qwen35mm.contract.parts import check_json
from qwen35mm.errors import MissingExtraError, PromptError, ToolError
from qwen35mm.tools.answers import ToolAnswer, answer_of, failed
from qwen35mm.tools.config import ToolServer
from qwen35mm_preprocess.say import say

if TYPE_CHECKING:
    from mcp import ClientSession

logger = logging.getLogger(__name__)
T = TypeVar("T")

# npx and uvx may download the program first.
START_S = 60.0
# Unused, a session ends after this.
IDLE_S = 900.0
MAX_TOOLS = 128
MAX_DEFINITION_CHARS = 20_000
_PING_S = 5.0
# For a server to end by itself, or at least by SIGTERM.
_END_S = 6.0
_MAX_NAME = 64


@dataclass(frozen=True)
class Tool:
    """A tool of a server.

    Attributes:
        name: the server's own.
        definition: in OpenAI's form, under the name for the model: no two servers' tools have the same one.
        digest: of its server, its description and its schema: a changed tool has another.
    """

    server: str
    name: str
    definition: Mapping[str, Any]
    digest: str

    @property
    def shown(self) -> str:
        """Its name in prompts and calls."""
        return self.definition["function"]["name"]


class ToolServers:
    """Servers by name. Usable from any thread and any loop.

    A session belongs to a `person`: a browser that one opens is not the other's.

    Raises:
        MissingExtraError: the SDK isn't installed.
    """

    def __init__(self, servers: Sequence[ToolServer]) -> None:
        # Imported by the first server that starts: it takes half a second.
        if importlib.util.find_spec("mcp") is None:
            raise MissingExtraError("Tool servers", "tools")
        self._servers = {server.name: server for server in servers}
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._listed: dict[tuple[str, str], tuple[Tool, ...]] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> ToolServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._servers)

    @property
    def servers(self) -> tuple[ToolServer, ...]:
        return tuple(self._servers.values())

    def replace(self, servers: Sequence[ToolServer]) -> None:
        """Takes other servers; sessions of those that changed end."""
        before, self._servers = self._servers, {server.name: server for server in servers}
        gone = {name for name, server in before.items() if self._servers.get(name) != server}
        self._listed = {key: tools for key, tools in self._listed.items() if key[1] not in gone}
        if self._loop is not None:
            self._submit(self._end(gone)).result()

    def close(self) -> None:
        """Ends all servers, for good."""
        gone, self._servers = {*self._servers}, {}
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(gone), loop).result()
        loop.call_soon_threadsafe(loop.stop)

    async def tools(self, names: Sequence[str], person: str = "") -> tuple[Tool, ...]:
        """What these servers offer now, in the order of their names: a prompt must not change from turn to turn.

        Raises:
            ToolError: a server can't be started or asked, or offers what can't be used.
        """
        return await self._wait(self._list_all(sorted(names), person))

    def listed(self, names: Sequence[str], person: str = "") -> tuple[Tool, ...]:
        """What these servers offered when they were last asked; starts nothing."""
        return _told_apart([tool for name in sorted(names) for tool in self._listed.get((person, name), ())])

    async def call(self, tool: Tool, arguments: Mapping[str, Any], person: str = "") -> ToolAnswer:
        """Calls a tool. Errors and time-outs are answers in words. Cancelling tells the server, and returns at once."""
        return await self._wait(self._call(tool, arguments, person))

    # In the sessions' loop

    async def _list_all(self, names: Sequence[str], person: str) -> tuple[Tool, ...]:
        found = await asyncio.gather(*(self._list(name, person) for name in names))
        return _told_apart([tool for tools in found for tool in tools])

    async def _list(self, name: str, person: str) -> tuple[Tool, ...]:
        if name not in self._servers:
            raise ToolError(say("There is no tool server {name} any more. Switch it off in this chat.", name=name))
        session = self._session(name, person)
        tools = tuple(sorted(await session.tools(), key=lambda tool: tool.name))
        self._listed[person, name] = tools
        return tools

    async def _call(self, tool: Tool, arguments: Mapping[str, Any], person: str) -> ToolAnswer:
        if tool.server not in self._servers:
            return failed(f"the tool server {tool.server} is no longer there.")
        return await self._session(tool.server, person).call(tool.name, arguments)

    def _session(self, name: str, person: str) -> _Session:
        key = (person, name)
        if key not in self._sessions:
            self._sessions[key] = _Session(self._servers[name])
        return self._sessions[key]

    async def _end(self, names: Set[str]) -> None:
        sessions = [self._sessions.pop(key) for key in list(self._sessions) if key[1] in names]
        await asyncio.gather(*(session.end() for session in sessions))

    async def _close(self, names: Set[str]) -> None:
        await self._end(names)
        # Callers are told before the loop stops.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=_END_S)

    # Between the callers' loops and that one

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="qwen35mm-tools", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._submit(work))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


class _Session:
    """One server's session for one person. A task of its own opens and closes it, as the SDK requires."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ClientSession] | None = None
        self._ended = asyncio.Event()
        self._used_s = time.monotonic()
        self._num_busy = 0
        self._opening = asyncio.Lock()
        self._doubts: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._meter: Any = None

    async def tools(self) -> tuple[Tool, ...]:
        from mcp import types

        name = self._server.name
        found: list[Tool] = []
        cursor: str | None = None
        try:
            while True:
                request = types.ListToolsRequest(params=types.PaginatedRequestParams(cursor=cursor))
                page = await self._ask(types.ClientRequest(request), types.ListToolsResult)
                found += [_tool(self._server, each) for each in page.tools]
                if len(found) > MAX_TOOLS:
                    most = MAX_TOOLS
                    raise ToolError(say("The tool server {name} has more than {most} tools.", name=name, most=most))
                cursor = page.nextCursor
                if not cursor or not page.tools:
                    return tuple(found)
        except (TimeoutError, _Failure) as error:
            logger.warning("the tool server %s failed: %s", name, error)
            raise ToolError(
                say(
                    "The tool server {name} doesn't answer. The program's log says why. Switch it off in this chat, "
                    "or repair it.",
                    name=name,
                )
            ) from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        from mcp import types

        params = types.CallToolRequestParams(name=name, arguments=dict(arguments))
        request = types.ClientRequest(types.CallToolRequest(params=params))
        try:
            # Not `call_tool`, which checks results by the server's own schema: a pattern in it may take for ever.
            return answer_of(await self._ask(request, types.CallToolResult))
        except TimeoutError:
            return failed(f"the tool gave no result in {self._server.timeout_s:g} seconds; the call was ended.")
        except _Failure as error:
            logger.warning("a call of the tool server %s failed: %s", self._server.name, error)
            return failed(error.words)

    async def end(self) -> None:
        """Ends the server for good."""
        self._is_over = True
        await self._stop()

    async def _stop(self) -> None:
        """Ends the server, by force if it takes long."""
        if self._task is None:
            return
        self._ended.set()
        if self._ready is not None and not self._ready.done():
            # While it starts, nothing looks at `ended`.
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_END_S)
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=_END_S)

    async def _ask(self, request: Any, kind: type[T]) -> T:
        """Raises TimeoutError, _Failure."""
        from mcp import McpError, types

        from qwen35mm.tools.transports import Asked

        self._num_busy += 1
        try:
            session = await self._open()
            asked = Asked()
            try:
                with anyio.fail_after(self._server.timeout_s):
                    return await self._answered(session.send_request(request, kind, metadata=asked))  # pyright: ignore[reportArgumentType]
            except (TimeoutError, asyncio.CancelledError):
                doubt = asyncio.ensure_future(self._give_up(session, asked.number, self._ended))
                self._doubts.add(doubt)
                doubt.add_done_callback(self._doubts.discard)
                raise
            except McpError as error:
                if error.error.code == types.CONNECTION_CLOSED:
                    raise _Failure("the tool server ended during the call.", error) from None
                raise _Failure(f"the tool server refused the call: {error.error.message[:2000]}", error) from None
            except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                raise _Failure("the tool server ended during the call.", error) from None
            except ValueError as error:
                raise _Failure("the tool server's answer isn't one of the protocol.", error) from None
        finally:
            self._num_busy -= 1
            self._used_s = time.monotonic()

    async def _answered(self, asking: Coroutine[Any, Any, T]) -> T:
        """The answer; raises _Failure if the session ends first, as when a connection breaks."""
        assert self._task is not None
        asked = asyncio.ensure_future(asking)
        try:
            await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise _Failure("the tool server ended during the call.", ConnectionError("the session ended"))
        finally:
            asked.cancel()
        return await asked

    async def _give_up(self, session: ClientSession, number: str | int | None, ended: asyncio.Event) -> None:
        """Tells the server that nobody waits for a request; ends it if it doesn't react at all."""
        from mcp import types

        cancelled = types.CancelledNotification(params=types.CancelledNotificationParams(requestId=number))
        try:
            with anyio.fail_after(_PING_S):
                # Unless the request was never sent.
                if number is not None:
                    await session.send_notification(types.ClientNotification(cancelled))
                await session.send_ping()
        except Exception:
            logger.warning("the tool server %s hangs, and is ended", self._server.name)
            ended.set()

    async def _open(self) -> ClientSession:
        async with self._opening:
            if self._doubts:
                # Until it is known whether the server hangs.
                await asyncio.wait(self._doubts)
            if self._task is None or self._task.done() or self._ended.is_set():
                await self._stop()
                if self._is_over:
                    raise _Failure("the tool server is no longer there.")
                self._ended = asyncio.Event()
                self._ready = asyncio.get_running_loop().create_future()
                self._task = asyncio.ensure_future(self._live(self._ready, self._ended))
            assert self._ready is not None
        # Another caller waits for it, too.
        session = await asyncio.shield(self._ready)
        self._meter.restart()
        return session

    async def _live(self, ready: asyncio.Future[ClientSession], ended: asyncio.Event) -> None:
        from mcp import ClientSession

        from qwen35mm.tools.transports import Meter, connected

        self._meter = meter = Meter()
        has_failed, why = False, "it ended"
        try:
            async with connected(self._server, meter, ended) as streams, ClientSession(*streams) as session:
                with anyio.fail_after(START_S):
                    await session.initialize()
                ready.set_result(session)
                while not ended.is_set():
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(ended.wait(), IDLE_S)
                    if not self._num_busy and time.monotonic() - self._used_s >= IDLE_S:
                        break
                has_failed = ended.is_set() and not self._is_over
                # The next caller doesn't take this one any more.
                ended.set()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_Failure("the tool server doesn't start.", error))
                # Nobody may wait any more.
                ready.exception()
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                raise
            has_failed, why = not self._is_over, _shown(error)
        finally:
            ended.set()
            name, said = self._server.name, meter.said.decode("utf-8", "replace")
            if has_failed:
                logger.warning("the tool server %s failed: %s. Its last words: %s", name, why, said or "none")
            elif said:
                logger.info("the tool server %s said: %s", name, said)


class _Failure(Exception):
    """A request without a result; `words` are for the model, the cause for the log."""

    def __init__(self, words: str, cause: BaseException | None = None) -> None:
        super().__init__(words if cause is None else f"{words} ({_shown(cause)})")
        self.words = words


def _shown(error: BaseException) -> str:
    # pydantic's errors can be far longer than what came.
    return type(error).__name__ if isinstance(error, ValueError) else repr(error)[:2000]


def _tool(server: ToolServer, found: Any) -> Tool:
    """Raises ToolError."""
    parameters = {"type": "object", "properties": {}, **found.inputSchema}
    shown = re.sub("[^A-Za-z0-9_-]", "_", f"{server.name}__{found.name}")
    definition = {"name": shown, "description": found.description or "", "parameters": parameters}
    text = json.dumps(definition, sort_keys=True)
    try:
        check_json(parameters, "a tool's schema")
        is_object = parameters["type"] == "object" and isinstance(parameters["properties"], dict)
        is_usable = is_object and len(text) <= MAX_DEFINITION_CHARS
    except PromptError:
        is_usable = False
    if not is_usable:
        raise ToolError(
            say(
                "The tool {tool} of the server {name} has a schema that isn't an object's, or a description and "
                "schema over {most} characters.",
                tool=found.name[:100],
                name=server.name,
                most=MAX_DEFINITION_CHARS,
            )
        )
    digest = hashlib.sha256(f"{server.digest} {found.name!r} {text}".encode()).hexdigest()
    return Tool(server.name, found.name, {"type": "function", "function": definition}, digest)


def _told_apart(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools under names that no other one has and that a call may have."""
    taken: set[str] = set()
    named: list[Tool] = []
    for tool in tools:
        name = tool.shown
        if len(name) > _MAX_NAME or name in taken:
            name = f"{name[: _MAX_NAME - 9]}_{tool.digest[:8]}"
        if name in taken:
            raise ToolError(say("The tool server {name} has a tool twice.", name=tool.server))
        taken.add(name)
        function = {**tool.definition["function"], "name": name}
        named.append(Tool(tool.server, tool.name, {**tool.definition, "function": function}, tool.digest))
    return tuple(named)
