"""Gradio as a guest: an endpoint `chat` for its clients and, on a ZeroGPU Space, the stream of the page.

Only the routes in `ROUTES` reach it. In our own server Gradio is imported at the first such request, and is closed
when it is idle for a while, since its queue polls a thousand times a second. On ZeroGPU Gradio has to start the server,
since `spaces` begins with `Blocks.launch` and closes that server's sockets in its children.
"""

# No `from __future__ import annotations`: Gradio reads the endpoint's types from its annotations.

import asyncio
import inspect
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import TypeAdapter
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen35mm.errors import ConfigError, PromptError, Qwen35mmError, report_bug
from qwen35mm.http.bodies import as_body
from qwen35mm.http.errors import HttpError
from qwen35mm.http.requests import answer_to, in_words, read_json
from qwen35mm.http.streams import until_ending
from qwen35mm.pools import REQUESTS
from qwen35mm.web.serving.calls import Calls
from qwen35mm.web.serving.people import People
from qwen35mm_preprocess.say import english, said_of, say

logger = logging.getLogger(__name__)

# Most calls answered at one time; the engine serves them in order.
MAX_CALLS = 64
# Most pages that watch answers through Gradio's queue at one time.
MAX_WATCHED = 64
MAX_WAITING_EVENTS = 256
LEAVES_AFTER_S = 300.0
# The first request of clients.
_FIRST = "/config"
_PATIENCE_S = 2.0
# The requests of Gradio's clients in Python and JavaScript: the description, a call, its result, its end.
ROUTES = (
    ("GET", "/config"),
    ("GET", "/gradio_api/info"),
    ("POST", "/gradio_api/call/chat"),
    ("GET", "/gradio_api/call/chat/{event}"),
    ("POST", "/gradio_api/queue/join"),
    ("GET", "/gradio_api/queue/data"),
    ("GET", "/gradio_api/heartbeat/{session}"),
    ("POST", "/gradio_api/cancel"),
)
# The page's stream through Gradio.
WATCH_ROUTES = (("POST", "/gradio_api/call/watch"), ("GET", "/gradio_api/call/watch/{event}"))
# Gradio requests this from itself once when it starts the server; the response has no content.
_STARTUP = "/gradio_api/startup-events"
_MCP = "/gradio_api/mcp"
_BODY = TypeAdapter(dict[str, Any])

Watch = Callable[[Request, list[str]], AsyncGenerator[dict[str, Any], None]]


class _BrokenError(Exception):
    """Gradio was about to send status 500."""


class Guest:
    """Gradio's application behind the allow-list, created at first use.

    Args:
        calls: answers the endpoint `chat`; None offers no endpoint.
        watch: the stream of a page's answers, if it goes through Gradio.
        max_waiting: most requests in Gradio's queue; more are refused.
    """

    def __init__(
        self, people: People, calls: Calls | None, watch: Watch | None = None, max_waiting: int = MAX_WAITING_EVENTS
    ) -> None:
        self._people = people
        self._calls = calls
        self._watch = watch
        self._max_waiting = max_waiting
        # Shown to Gradio's clients; our own route takes their uploads.
        self._max_file_bytes = calls.max_file_bytes if calls else 1
        self._app: ASGIApp | None = None
        self._opening = asyncio.Lock()
        self._leave: asyncio.Event | None = None
        self._living: asyncio.Task[None] | None = None
        self._num_asking = 0
        self._timer: asyncio.TimerHandle | None = None

    def routes(self) -> list[BaseRoute]:
        """The routes of Gradio's clients; only the upload if Gradio starts the server."""
        found: list[BaseRoute] = []
        if self._watch is None and self._calls is not None:
            found += [Route(path, self, methods=[method]) for method, path in ROUTES]
        if self._calls is not None:
            found.append(Route("/gradio_api/upload", in_words(self._calls.upload), methods=["POST"]))
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.pass_on(scope, receive, send, self._opened)

    async def pass_on(
        self, scope: Scope, receive: Receive, send: Send, opened: Callable[[], Awaitable[ASGIApp]]
    ) -> None:
        """Checks that the client may call, then lets Gradio answer."""
        request = Request(scope, receive)
        try:
            self._people.calling(request)
            if scope["method"] == "POST":
                called = _without_files(await read_json(request, _BODY))
                receive = as_body(json.dumps(called).encode())
            opening = asyncio.ensure_future(opened())
            if scope["path"] == _FIRST:
                plain = [each for each in scope["headers"] if each[0] != b"accept-encoding"]
                scope, send = {**scope, "headers": plain}, await _kept_waiting(send, opening)
            app = await opening
        except Exception as error:
            await answer_to(error)(scope, receive, send)
            return
        self._num_asking += 1
        begun = False

        async def send_unless_broken(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and message["status"] == 500:
                raise _BrokenError
            begun = True
            await send(message)

        try:
            await until_ending(scope, app(scope, receive, send_unless_broken))
        except HttpError as error:
            if not begun:
                await answer_to(error)(scope, receive, send)
        except Exception as error:
            # Gradio fails at unknown functions, unknown sessions and numbers that JSON doesn't allow.
            logger.warning("Gradio could not take a request for %s (%s)", scope["path"], type(error).__name__)
            if begun:
                await send({"type": "http.response.body", "body": b""})
            else:
                await answer_to(PromptError(say("The request is damaged: it isn't JSON as expected.")))(
                    scope, receive, send
                )
        finally:
            self._num_asking -= 1
            self._rest()

    async def _opened(self) -> ASGIApp:
        async with self._opening:
            if self._app is None:
                made = await REQUESTS.run(self._make)
                ready, self._leave = asyncio.get_running_loop().create_future(), asyncio.Event()
                self._living = asyncio.ensure_future(_live(*made, ready, self._leave))
                await asyncio.wait({ready, self._living}, return_when=asyncio.FIRST_COMPLETED)
                if self._living.done():
                    self._living.result()
                self._app = made[0]
        return self._app

    def _rest(self) -> None:
        """Closes Gradio after a while without requests."""
        if self._timer is not None:
            self._timer.cancel()
        if self._num_asking == 0 and self._leave is not None:
            self._timer = asyncio.get_running_loop().call_later(LEAVES_AFTER_S, self._go)

    def _go(self) -> None:
        if self._num_asking == 0 and self._leave is not None:
            self._leave.set()
            self._app = self._leave = None

    async def close(self) -> None:
        """Closes Gradio if it runs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._leave is not None:
            self._leave.set()
        if self._living is not None:
            await self._living

    def _make(self) -> tuple[ASGIApp, Any]:
        gr = _gradio()
        with gr.Blocks(analytics_enabled=False) as blocks:
            self._offer(gr.api, "api_name")
        blocks.queue(max_size=self._max_waiting)
        import fastapi

        app = fastapi.FastAPI(openapi_url=None)
        # With this, Gradio adds no rules of its own for other origins; the page's guards have checked them already.
        app.add_middleware(CORSMiddleware, allow_origins=[])
        gr.mount_gradio_app(
            app,
            blocks,
            "/",
            run_history=False,
            footer_links=[],
            show_error=False,
            max_file_size=self._max_file_bytes,
            ssr_mode=False,
            enable_monitoring=False,
            pwa=False,
            mcp_server=False,
        )
        return app, blocks

    def launch(
        self, app: ASGIApp, guards: Sequence[Middleware], *, host: str, port: int, mcp: bool
    ) -> tuple[str, Callable[[], None]]:
        """Lets Gradio start the server with the page's application in it; returns its address, and a function that
        stops it.

        Args:
            guards: middleware in front of Gradio's routes, outermost first.

        Raises:
            ConfigError: the port can't be used.
        """
        gr = _gradio()
        server = gr.Server(openapi_url=None, docs_url=None, redoc_url=None)
        allowed = (*(ROUTES if self._calls else ()), *WATCH_ROUTES)
        routes = [Route(path, self, methods=[method]) for method, path in allowed]
        server.add_middleware(_Dispatch, page=app, guest=self, routes=routes, mcp=mcp)
        for each in reversed(guards):
            server.add_middleware(each.cls, *each.args, **each.kwargs)  # pyright: ignore[reportArgumentType]
        self._offer(server.api, "name")
        try:
            launched, url, _ = server.launch(
                server_name=host,
                server_port=port or None,
                prevent_thread_lock=True,
                quiet=True,
                share=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=mcp,
                enable_monitoring=False,
                run_history=False,
                max_file_size=self._max_file_bytes,
                footer_links=[],
            )
        except OSError as error:
            raise ConfigError(f"Port {port} on {host} can't be used: {error}") from None
        return url, lambda: launched.get_blocks().close(verbose=False)

    def _offer(self, api: Callable[..., Any], name: str) -> None:
        """Adds the endpoints to a Gradio application.

        Args:
            api: Gradio's function that adds an endpoint.
            name: the parameter of `api` for an endpoint's name.
        """
        import gradio as gr

        calls, people, watch_answers = self._calls, self._people, self._watch

        async def chat(
            message: str,
            request: gr.Request,
            files: list[gr.FileData] | None = None,
            system_prompt: str = "",
            history: list[dict[str, str]] | None = None,
            settings: dict[str, Any] | None = None,
        ) -> AsyncGenerator[str, None]:
            """Answers a question, also about pictures and videos. Streams the answer; each event has the text so far.

            Args:
                message: The question.
                files: Pictures and videos for the question.
                system_prompt: How the model should behave.
                history: Earlier messages: objects with a role (user or assistant) and a content.
                settings: For example temperature, top_p, max_tokens, seed, thinking (true or false), max_frames, fps.

            Returns:
                The answer.
            """
            assert calls is not None
            assert request.request is not None, "it came over HTTP"
            try:
                person = people.calling(request.request)
                answer = calls.answer(person, message, files, system_prompt, history, settings)
                async with aclosing(answer) as texts:
                    async for text in texts:
                        yield text
            except Qwen35mmError as error:
                raise gr.Error(english(said_of(error)), print_exception=False) from None
            except Exception as error:
                told = english(report_bug(logger, "a call of the endpoint failed", error))
                raise gr.Error(told, print_exception=False) from None

        async def watch(answers: list[str], request: gr.Request) -> AsyncGenerator[dict[str, Any], None]:
            assert watch_answers is not None
            assert request.request is not None, "it came over HTTP"
            async with aclosing(watch_answers(request.request, answers)) as news:
                async for each in news:
                    yield each

        if calls is not None:
            # Gradio reads the type of the answer from the signature.
            answering: Any = chat
            answering.__signature__ = inspect.signature(chat).replace(return_annotation=str)
            api(answering, **{name: "chat"}, concurrency_limit=MAX_CALLS)
        if watch_answers is not None:
            api(watch, **{name: "watch"}, concurrency_limit=MAX_WATCHED, api_visibility="private")


class _Dispatch:
    """ASGI middleware in Gradio's server: sends all but the allowed routes to the page."""

    def __init__(self, app: ASGIApp, page: ASGIApp, guest: Guest, routes: list[Route], mcp: bool) -> None:
        self._app = app
        self._page = page
        self._guest = guest
        self._routes = routes
        self._own = (_STARTUP, *((_MCP,) if mcp else ()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") in self._own:
            await self._app(scope, receive, send)
        elif any(each.matches(scope)[0] is Match.FULL for each in self._routes):
            await self._guest.pass_on(scope, receive, send, self._opened)
        else:
            await self._page(scope, receive, send)

    async def _opened(self) -> ASGIApp:
        return self._app


async def _live(app: Any, blocks: Any, ready: asyncio.Future[None], leave: asyncio.Event) -> None:
    """Runs a mounted application's lifespan, from start to end in one task."""
    async with app.router.lifespan_context(app):
        ready.set_result(None)
        await leave.wait()
    blocks.close(verbose=False)


def _gradio() -> Any:
    # Gradio's statistics, which nobody sees here, run pandas after every event.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000000")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio

    return gradio


async def _kept_waiting(send: Send, opening: asyncio.Future[ASGIApp]) -> Send:
    """Sends spaces, which JSON ignores, until Gradio is imported: clients give up after five seconds of silence."""
    has_begun = False
    while not (await asyncio.wait({opening}, timeout=_PATIENCE_S))[0]:
        if not has_begun:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        has_begun = True
        await send({"type": "http.response.body", "body": b" ", "more_body": True})

    async def rest(message: Message) -> None:
        if not has_begun or message["type"] != "http.response.start":
            await send(message)

    return rest


def _without_files(body: dict[str, Any]) -> dict[str, Any]:
    """Removes the marks by which Gradio recognises files, since it would look for them to copy them. `Calls` has the
    files."""
    data = body.get("data")
    if isinstance(data, list):
        body["data"] = [
            [{key: value for key, value in file.items() if key != "meta"} for file in each]
            if isinstance(each, list) and all(isinstance(file, dict) for file in each)
            else each
            for each in data
        ]
    return body
