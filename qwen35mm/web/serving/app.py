"""The page at `/`, the stream of answers, and the routes beside it.

Gradio serves it all, and runs the stream in its queue, which is what a Space counts GPU time by.
Nothing of its own page is used: the page is `assets/web/index.html`, under a policy of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.events import api
from gradio.queueing import Queue
from gradio.routes import App
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35mm.assets import asset_path
from qwen35mm.chat.backend import ChatBackend
from qwen35mm.chat.drafts import answer_reserve
from qwen35mm.chat.encodings import ENCODINGS
from qwen35mm.chat.quotas import ALONE, STRANGERS, STRANGERS_TEMPORARY, Usage
from qwen35mm.chat.replies import GRACE_S, Replies
from qwen35mm.chat.settings import describe_settings
from qwen35mm.chat.store import ConversationStore
from qwen35mm.chat.temporary import TemporaryChats, TemporaryStore
from qwen35mm.chat.titles import Titles
from qwen35mm.chat.turns import Person, Turns
from qwen35mm.errors import NotFoundError, QuotaError
from qwen35mm.model_library import BackendSwitch
from qwen35mm.web.rendering.view import ReplyDrawing
from qwen35mm.web.rendering.wording import describe_server
from qwen35mm.web.serving.api import Api
from qwen35mm.web.serving.calls import Calls
from qwen35mm.web.serving.examples import choose_examples, load_samples
from qwen35mm.web.serving.files import Files
from qwen35mm.web.serving.logins import Logins
from qwen35mm.web.serving.models import Models
from qwen35mm.web.serving.people import People, name_of
from qwen35mm.web.serving.previews import Previews, show_preview
from qwen35mm.web.serving.requests import Handler, TemporaryApi, answer_requests, in_words
from qwen35mm.web.serving.servers import Servers
from qwen35mm.web.serving.texts import Texts
from qwen35mm_preprocess.say import said_of

TITLE = "qwen35mm"
PREFIX = "/qwen35mm"
# Pages that watch an answer at one time; the engine serves the answers in order.
MAX_WATCHED = 64
MAX_WAITING_EVENTS = 256
# How often Gradio's queue looks for requests, and for progress that it would tell of, which we have none of. Its own
# thousand times a second take 8 % of a core for as long as the page is served, and a hundred 2 %.
LOOK_FOR_EVENTS_S = 0.01
LOOK_WHEN_IDLE_S = 0.05
IDLE_AFTER_S = 3.0
LOOK_FOR_PROGRESS_S = 1.0


@dataclass(frozen=True)
class Page:
    """What the page consists of; see `build_app`."""

    app: gr.Blocks
    routes: list[BaseRoute]
    replies: Replies
    people: People
    middleware: Middleware


class QueuePace:
    """ASGI middleware that has Gradio's queue look often for requests while the page is used, and seldom else.

    The queue can't be woken. But who sends a message has typed it, and has asked meanwhile what it will cost.
    """

    def __init__(self, app: ASGIApp, queue: Queue, idle_after_s: float = IDLE_AFTER_S) -> None:
        self._app = app
        self._queue = queue
        self._idle_after_s = idle_after_s
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._queue.sleep_when_free = LOOK_FOR_EVENTS_S
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._idle_after_s, self._rest)
        await self._app(scope, receive, send)

    def _rest(self) -> None:
        self._queue.sleep_when_free = LOOK_WHEN_IDLE_S


def build_app(
    backend: ChatBackend,
    store: ConversationStore,
    *,
    temporary: TemporaryStore,
    shared: bool = False,
    logins: Logins | None = None,
    max_replies: int = 4,
    max_waiting: int = MAX_WAITING_EVENTS,
    grace_s: float = GRACE_S,
    calls: bool = True,
    servers: Servers | None = None,
) -> Page:
    """The chat page over a backend; `serve` launches it.

    Args:
        backend: answers.
        store: keeps the conversations.
        temporary: has those that aren't kept.
        shared: whether strangers use the page too: each has own conversations, and a cache apart.
        logins: who is logged in, where there is a login.
        max_replies: a person's answers in progress at one time.
        max_waiting: requests in line before more are refused.
        grace_s: seconds after which an answer that no page watches any more is ended.
        calls: whether Gradio's own clients find an endpoint.
        servers: those whose models can be chosen, where the model can be changed.
    """
    replies = Replies(store, backend, grace_s=grace_s)
    switch = backend if isinstance(backend, BackendSwitch) and not shared else None
    titles = Titles(store, backend, replies)
    turns = Turns(backend, store, replies, switch.larger_context if switch else None)
    people = People(
        shared=shared,
        username=logins.username if logins else None,
        guests=logins is not None and logins.guests,
        max_replies=max_replies,
    )
    examples = choose_examples(load_samples())
    models = None if switch is None or servers is None else Models(switch, titles.rest, servers)

    def describe() -> dict[str, Any]:
        return {
            "model": backend.info.name,
            "is_demo": backend.is_demo,
            "context_length": backend.context_length,
            "encodings": ENCODINGS,
            "answer_reserve": answer_reserve(backend.context_length),
            "settings": describe_settings(backend),
            "models": models is not None,
            "server": describe_server(backend.info),
            "titles": titles.enabled,
            "examples": [
                {
                    "text": each.question,
                    "kind": each.kind,
                    "url": f".{PREFIX}/samples/{each.path.name}",
                    "poster": f".{PREFIX}/poster/{number}",
                }
                for number, each in enumerate(examples)
            ],
        }

    usage = Usage(store, STRANGERS if shared else ALONE)

    def account_of(person: Person) -> dict[str, Any] | None:
        return None if logins is None else logins.describe(name_of(person))

    api_of_chats = Api(backend, store, replies, turns, describe, usage, examples, titles, account_of)
    services = [api_of_chats, Previews(), Texts(store), *([models] if models else [])]
    files = Files(store, people, backend, usage, examples)
    turns_in_memory = Turns(backend, temporary, replies.beside(temporary), switch.larger_context if switch else None)
    chats_in_memory = TemporaryChats(temporary, lambda owner, each: turns_in_memory.stop(Person(owner), each))
    usage_in_memory = Usage(temporary, STRANGERS_TEMPORARY if shared else ALONE)
    api_in_memory = Api(
        backend, temporary, replies.beside(temporary), turns_in_memory, describe, usage_in_memory, examples
    )
    temporary_api = TemporaryApi(chats_in_memory, (api_in_memory, Texts(temporary)))
    services.append(temporary_api)
    files_in_memory = Files(temporary, people, backend, usage_in_memory, examples, chats=chats_in_memory)

    called = Calls(backend, store, replies, people, usage)

    async def watch(answers: list[str], request: gr.Request) -> AsyncGenerator[dict[str, Any], None]:
        person = None if request.request is None else people.asking(request.request)
        if person is None:
            return
        drawings = {answer: ReplyDrawing() for answer in answers}
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(usage.watching(person))
            except QuotaError as error:
                yield {"refused": said_of(error)}
                return
            news = await stack.enter_async_context(aclosing(replies.watch(person.owner, answers)))
            async for watched in news:
                yield {"answers": {answer: drawings[answer].view(reply) for answer, reply in watched.items()}}

    async def show(request: Request) -> Response:
        return FileResponse(asset_path("web") / "index.html", headers={"cache-control": "no-cache"})

    with _no_routes_yet():
        with gr.Blocks(title=TITLE, analytics_enabled=False) as app:
            api(watch, concurrency_limit=MAX_WATCHED, api_visibility="private")
            if calls:
                called.offer()
        app.queue(max_size=max_waiting)
    app._queue.sleep_when_free = LOOK_WHEN_IDLE_S
    app._queue.progress_update_sleep_when_free = LOOK_FOR_PROGRESS_S
    routes = [
        Route("/", show),
        *_login_routes(logins),
        *([Route("/gradio_api/upload", in_words(called.upload), methods=["POST"])] if calls else []),
        *_routes(answer_requests(people, *services, temporary=temporary_api), files, files_in_memory),
    ]
    return Page(app, routes, replies, people, Middleware(QueuePace, queue=app._queue))


@contextmanager
def _no_routes_yet() -> Iterator[None]:
    """Has Gradio (6.31) make its 80 routes at the launch, not three times before, for a tenth of a second each."""
    made = App.create_app
    App.create_app = staticmethod(lambda *args, **kwargs: None)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        App.create_app = staticmethod(made)


def _login_routes(logins: Logins | None) -> list[BaseRoute]:
    if logins is None:
        return []
    handlers = {
        "/login": logins.log_in,
        "/login/": logins.log_in,
        f"{PREFIX}/logout": logins.log_out,
        f"{PREFIX}/password": logins.change_password,
    }
    return [Route(path, in_words(handle), methods=["POST"]) for path, handle in handlers.items()]


def _routes(requests: Handler, files: Files, temporary: Files | None = None) -> list[BaseRoute]:
    """The routes beside the page's own; `temporary` has the files of temporary conversations."""

    def upload(request: Request) -> Awaitable[Response]:
        if temporary is not None and "temporary" in request.query_params:
            return temporary.upload(request)
        return files.upload(request)

    def of_either(name: str) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                return await getattr(files, name)(request)
            except NotFoundError:
                if temporary is None:
                    raise
            response = await getattr(temporary, name)(request)
            # Nor does the browser store it.
            response.headers["cache-control"] = "no-store"
            return response

        return in_words(answer)

    routes: list[BaseRoute] = [
        Route("/api/{name}", in_words(requests), methods=["POST"]),
        Route("/upload", in_words(upload), methods=["POST"]),
        Route("/pages", of_either("pdf_pages"), methods=["POST"]),
        Route("/recode", of_either("recode"), methods=["POST"]),
        Route("/import", in_words(files.take_in), methods=["POST"]),
        Route("/export", in_words(files.export)),
        Route("/media/{digest}", of_either("media")),
        Route("/picture/{digest}", of_either("picture")),
        Route("/frame/{digest}", of_either("frame")),
        Route("/thumbnail/{digest}", of_either("thumbnail")),
        Route("/poster/{number:int}", in_words(files.poster)),
        Route("/preview", show_preview),
        Mount("/web", StaticFiles(directory=asset_path("web"))),
        Mount("/samples", StaticFiles(directory=asset_path("samples"))),
    ]
    return [Mount(PREFIX, routes=routes)]
