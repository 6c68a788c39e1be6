"""The web application: the page at `/`, the stream of its answers, and all other routes on its port."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from qwen35mm.assets import asset_path
from qwen35mm.backends.shelf import LentBackend
from qwen35mm.chat.documents.documents import can_read_web_pages
from qwen35mm.chat.documents.encodings import ENCODINGS
from qwen35mm.chat.quotas import ALONE, STRANGERS, STRANGERS_TEMPORARY, Usage
from qwen35mm.chat.replies.drafts import answer_reserve
from qwen35mm.chat.replies.replies import GRACE_S, Replies
from qwen35mm.chat.replies.titles import Titles
from qwen35mm.chat.replies.toolbox import Toolbox
from qwen35mm.chat.replies.turns import Person, Turns
from qwen35mm.chat.settings import describe_settings
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.temporary import TemporaryChats, TemporaryStore
from qwen35mm.contract import Backend
from qwen35mm.errors import NotFoundError, QuotaError, report_bug
from qwen35mm.http.errors import HttpError
from qwen35mm.http.guards import guards
from qwen35mm.http.requests import Handler, in_words, read_json
from qwen35mm.http.sessions import PageToken, TokenAddress
from qwen35mm.http.settings import HttpSettings
from qwen35mm.http.streams import event_stream, frame, streaming
from qwen35mm.model_library import BackendSwitch
from qwen35mm.web.rendering.addresses import draw_address
from qwen35mm.web.rendering.view import ReplyDrawing
from qwen35mm.web.rendering.wording import describe_server
from qwen35mm.web.serving.api import Api
from qwen35mm.web.serving.bundles import Bundles
from qwen35mm.web.serving.calls import Calls
from qwen35mm.web.serving.examples import choose_examples, load_samples
from qwen35mm.web.serving.files import Files
from qwen35mm.web.serving.guest import MAX_WAITING_EVENTS, Guest
from qwen35mm.web.serving.logins import Logins
from qwen35mm.web.serving.mcp_tool import McpTool
from qwen35mm.web.serving.models import Models
from qwen35mm.web.serving.people import People, name_of
from qwen35mm.web.serving.previews import Previews, show_preview
from qwen35mm.web.serving.programs import ProgramAccess, program_routes
from qwen35mm.web.serving.servers import Servers
from qwen35mm.web.serving.temporary import TemporaryRequests
from qwen35mm.web.serving.texts import Texts
from qwen35mm.web.serving.tool_servers import ToolSettings
from qwen35mm_preprocess.say import said_of

logger = logging.getLogger(__name__)

TITLE = "qwen35mm"
PREFIX = "/qwen35mm"
_WATCHED_BYTES = 65_536


class Watched(BaseModel):
    """The ids of the answers that a page watches."""

    model_config = ConfigDict(strict=True)

    answers: list[str]


_WATCHED = TypeAdapter(Watched)


@dataclass(frozen=True)
class Page:
    """The parts of the page; see `build_app`."""

    app: Starlette
    guards: list[Middleware]
    replies: Replies
    people: People
    guest: Guest


def build_app(
    backend: Backend,
    store: ConversationStore,
    *,
    temporary: TemporaryStore,
    shared: bool = False,
    token: PageToken | None = None,
    logins: Logins | None = None,
    settings: HttpSettings | None = None,
    programs: ProgramAccess | None = None,
    max_replies: int = 4,
    max_waiting: int = MAX_WAITING_EVENTS,
    grace_s: float = GRACE_S,
    calls: bool = True,
    mcp: bool = False,
    through_gradio: bool = False,
    read_web: bool = False,
    servers: Servers | None = None,
    toolbox: Toolbox | None = None,
    tools: ToolSettings | None = None,
    network_url: Callable[[], str | None] = lambda: None,
) -> Page:
    """Builds the chat page for a backend; `serve` launches it.

    Args:
        store: the stored conversations.
        temporary: the temporary conversations.
        shared: whether strangers use the page, each with their own conversations and a separate cache.
        token: the secret of the page's one person.
        logins: sessions of people, if there is a login.
        settings: how the page is reached.
        programs: adds the routes of `qwen35mm serve`; None leaves them out.
        max_replies: most answers in progress for one person.
        max_waiting: most requests in Gradio's queue; more are refused.
        grace_s: an answer that no page watches is stopped after this many seconds.
        calls: whether Gradio's clients find an endpoint.
        mcp: whether the endpoint is also a tool of an MCP server.
        through_gradio: whether the page's stream goes through Gradio's queue; Gradio starts the server then.
        read_web: whether web addresses are read, unless a person says no; else one's own page can allow it.
        servers: other servers whose models can be chosen; None if the model can't be changed.
        toolbox: the tools that chats may switch on.
        tools: answers requests about tool servers.
        network_url: the address for people at other machines, once the server listens.
    """
    replies = Replies(store, backend, grace_s=grace_s)
    switch = backend if isinstance(backend, BackendSwitch) and not shared else None
    titles = Titles(store, backend, replies)
    turns = Turns(backend, store, replies, switch.larger_context if switch else None, toolbox)
    people = People(shared=shared, token=token, logins=logins, max_replies=max_replies)
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
            "has_several": models is not None and switch is not None and switch.has_several,
            "suggestion": None if models is None else models.suggestion(),
            "change": None if models is None else models.state(),
            "taken": None if models is None else models.taken(),
            "server": describe_server(backend.info),
            "titles": titles.enabled,
            "web": read_web if may_read_web else None,
            "through_gradio": through_gradio,
            "network": draw_address(network_url()),
            # Only people who were let in see this.
            "client": None if not calls else f"t/{token.value}/" if token else "",
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
    # One's own page leaves it to the person, a shared one to its owner.
    may_read_web = can_read_web_pages() and (read_web or not (shared or logins))

    def reads_web(person: Person) -> bool:
        return may_read_web and store.preferences(person.owner).get("read_web", read_web) is True

    files = Files(store, people, backend, usage, examples, reads_web=reads_web)
    services = [api_of_chats, files, Previews(), Texts(store), *filter(None, (models, tools))]
    larger = switch.larger_context if switch else None
    turns_in_memory = Turns(backend, temporary, replies.beside(temporary), larger, toolbox)
    chats_in_memory = TemporaryChats(temporary, lambda owner, each: turns_in_memory.stop(Person(owner), each))
    usage_in_memory = Usage(temporary, STRANGERS_TEMPORARY if shared else ALONE)
    api_in_memory = Api(
        backend, temporary, replies.beside(temporary), turns_in_memory, describe, usage_in_memory, examples
    )
    requests = TemporaryRequests(people.asking, chats_in_memory, services, (api_in_memory, Texts(temporary)))
    files_in_memory = Files(
        temporary, people, backend, usage_in_memory, examples, chats=chats_in_memory, reads_web=reads_web
    )

    async def watch(request: Request, answers: list[str]) -> AsyncGenerator[dict[str, Any], None]:
        person = people.asking(request)
        drawings = {answer: ReplyDrawing() for answer in answers}
        try:
            with usage.watching(person):
                async with aclosing(replies.watch(person.owner, answers)) as news:
                    async for watched in news:
                        yield {"answers": {answer: drawings[answer].view(reply) for answer, reply in watched.items()}}
        except QuotaError as error:
            yield {"refused": said_of(error)}

    async def stream(request: Request) -> Response:
        people.asking(request)
        asked = await read_json(request, _WATCHED, _WATCHED_BYTES)
        news = watch(request, asked.answers)

        async def frames() -> AsyncIterator[bytes]:
            async with aclosing(news):
                async for each in news:
                    yield frame(each)
            yield frame({}, "complete")

        def failed(error: Exception) -> bytes:
            return frame({} if isinstance(error, HttpError) else report_bug(logger, "a stream failed", error), "end")

        return streaming(event_stream(request.scope, frames(), failed))

    called = Calls(backend, store, replies, people, usage)
    guest = Guest(people, called if calls else None, watch if through_gradio else None, max_waiting)
    tool = McpTool(people, called) if mcp and not through_gradio else None

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        if isinstance(backend, LentBackend):
            backend.shelf.watch()
        async with tool.lives() if tool else contextlib.nullcontext():
            yield
        await guest.close()

    bundles = Bundles(asset_path("web"), f"{PREFIX[1:]}/web/")
    routes: list[BaseRoute] = [
        *bundles.routes(),
        *(Route(path, _icon) for path in ("/icon.svg", "/favicon.ico")),
        *([Route(path, in_words(logins.log_in), methods=["POST"]) for path in ("/login", "/login/")] if logins else ()),
        *guest.routes(),
        *(tool.routes() if tool else ()),
        *(program_routes(backend, programs) if programs else ()),
        Mount(
            PREFIX,
            routes=[
                Route("/session", in_words(people.begin), methods=["POST"]),
                Route("/watch", in_words(stream), methods=["POST"]),
                *(_login_routes(logins) if logins else ()),
                *_routes(requests, files, files_in_memory),
            ],
        ),
    ]
    in_front = guards(settings or HttpSettings(), only_this_machine=not shared)
    by_address = [] if token is None else [Middleware(TokenAddress, token)]
    app = Starlette(routes=routes, middleware=[*in_front, *by_address], lifespan=lifespan)
    app.router.redirect_slashes = False
    return Page(app, in_front, replies, people, guest)


async def _icon(_request: Request) -> Response:
    return FileResponse(asset_path("icon.svg"))


def _login_routes(logins: Logins) -> list[BaseRoute]:
    handlers = {"/logout": logins.log_out, "/password": logins.change_password}
    return [Route(path, in_words(handle), methods=["POST"]) for path, handle in handlers.items()]


def _routes(requests: Handler, files: Files, temporary: Files | None = None) -> list[BaseRoute]:
    """The routes for requests and files; `temporary` has the files of temporary conversations."""

    def uploading(name: str) -> Handler:
        def upload(request: Request) -> Awaitable[Response]:
            is_temporary = temporary is not None and "temporary" in request.query_params
            return getattr(temporary if is_temporary else files, name)(request)

        return in_words(upload)

    def of_either(name: str) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                return await getattr(files, name)(request)
            except NotFoundError:
                if temporary is None:
                    raise
            response = await getattr(temporary, name)(request)
            # The browser must not store it either.
            response.headers["cache-control"] = "no-store"
            return response

        return in_words(answer)

    return [
        Route("/api/{name}", in_words(requests), methods=["POST"]),
        Route("/upload", uploading("upload"), methods=["POST"]),
        Route("/pages", of_either("pdf_pages"), methods=["POST"]),
        Route("/recode", of_either("recode"), methods=["POST"]),
        Route("/web_page", uploading("web_page"), methods=["POST"]),
        Route("/import", in_words(files.take_in), methods=["POST"]),
        Route("/export", in_words(files.export)),
        Route("/media/{digest}", of_either("media")),
        Route("/picture/{digest}", of_either("picture")),
        Route("/frame/{digest}", of_either("frame")),
        Route("/thumbnail/{digest}", of_either("thumbnail")),
        Route("/poster/{number}", in_words(files.poster)),
        Route("/preview", show_preview),
        Mount("/web", GZipMiddleware(StaticFiles(directory=asset_path("web")))),
        Mount("/samples", StaticFiles(directory=asset_path("samples"))),
    ]
