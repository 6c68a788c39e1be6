"""Serving the page: one port, no services of others, an end that cleans up."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.routes import ORJSONResponse
from starlette.middleware import Middleware

from qwen35mm.assets import asset_path
from qwen35mm.chat.accounts import AccountFile, GivenAccounts
from qwen35mm.chat.backend import ChatBackend
from qwen35mm.chat.quotas import ALONE, STRANGERS
from qwen35mm.chat.replies import GRACE_S, Replies
from qwen35mm.chat.store import ConversationStore
from qwen35mm.chat.temporary import TemporaryStore, temporary_folder
from qwen35mm.errors import ConfigError, MissingExtraError
from qwen35mm.server.ends import end_signals, interrupt, wait_for_the_end
from qwen35mm.server.guards import OnlyThisMachine, SameOrigin, SecurityHeaders
from qwen35mm.server.page_token import OnlyWithToken, PageToken
from qwen35mm.strangers import is_shared
from qwen35mm.web.serving.app import MAX_WAITING_EVENTS, build_app
from qwen35mm.web.serving.logins import Logins, OnlyLoggedIn
from qwen35mm.web.serving.people import PrivateCookie, WrongPasswords
from qwen35mm.web.serving.programs import ForPrograms, ProgramAccess
from qwen35mm.web.serving.security import GuardedApp
from qwen35mm.web.serving.servers import Server as RemoteServer
from qwen35mm.web.serving.servers import Servers
from qwen35mm.web.serving.tidying import keep_tidy

# Where nothing is kept, a person who was last seen this long ago is forgotten, with uploads and conversations.
FORGET_AFTER_S = 1800.0


@dataclass(frozen=True)
class Server:
    """A page that is being served.

    Attributes:
        url: where, without the token that opens it.
        token: that token; None where none is needed.
    """

    app: gr.Blocks
    url: str
    store: ConversationStore
    replies: Replies
    token: PageToken | None
    _stack: contextlib.ExitStack

    @property
    def address(self) -> str:
        """What a person opens: the address with the token."""
        return self.url if self.token is None else self.token.address(self.url)

    @property
    def address_for_once(self) -> str:
        """An address for one browser, which is handed to it by a command."""
        return self.url if self.token is None else self.token.address_for_once(self.url)

    def close(self) -> None:
        """Ends the server and the replies in progress; what was written of them is stored."""
        # A page in the middle of a reply would hold the server open longer than Gradio waits before it gives up. What
        # uvicorn says about ending such a page is no news here.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.app.server.config.timeout_graceful_shutdown = 1
        self.app.close(verbose=False)
        self.replies.close()
        self._stack.close()


def serve(
    backend: ChatBackend,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    data_dir: Path | None = None,
    auth: Sequence[tuple[str, str]] = (),
    auth_file: Path | None = None,
    guests: bool = False,
    token: str | None = None,
    programs: ProgramAccess | None = None,
    calls: bool = True,
    mcp: bool = False,
    server: RemoteServer | None = None,
    max_replies: int | None = None,
    max_waiting: int = MAX_WAITING_EVENTS,
    grace_s: float = GRACE_S,
) -> Server:
    """Starts the page in threads of its own and returns.

    Args:
        backend: answers.
        host, port: where; port 0 takes a free one.
        data_dir: keeps the conversations; None keeps them until the end only.
        auth: names and passwords of those who may log in; everybody may use the page where there are none.
        auth_file: a file with them, instead; see `qwen35mm.chat.accounts`.
        guests: whether those who don't log in may use the page, too, each with conversations of their own.
        token: what opens the page of the one person at this machine, who doesn't log in; None makes one, and "" lets
            every user of the machine in.
        programs: has the routes of `qwen35mm serve` beside the page; None has none.
        calls: whether Gradio's own clients find the endpoint `chat`.
        mcp: whether that is a tool of an MCP server, too.
        server: whose model `backend` is, where it is a server's.
        max_replies: a person's replies in progress at one time; None is 4, and 1 where strangers share the page.
        max_waiting: requests of the page in line before more are refused.
        grace_s: seconds after which a reply that no page watches is ended.

    Raises:
        ConfigError: the port, the address, the token or the accounts can't be used.
        StorageError: the folder can't be used.
    """
    shared = is_shared(host)
    logins = _logins(auth, auth_file, guests)
    if token and (shared or logins):
        raise ConfigError("--token is for a page of one's own. Where several people use it, --auth says who may.")
    _check_mcp(mcp, calls, logins)
    page_token = None if shared or logins or token == "" else PageToken(token)
    port = _claim_port(host, port)
    # Its statistics, which nobody can see here, go through pandas at the end of every event.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000000")
    stack = contextlib.ExitStack()
    try:
        folder = data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qwen35mm-chats-")))
        store = stack.enter_context(contextlib.closing(ConversationStore(folder)))
        temporary = TemporaryStore(stack.enter_context(temporary_folder()))
        stack.callback(temporary.close)
        page = build_app(
            backend,
            store,
            temporary=temporary,
            shared=shared,
            logins=logins,
            max_replies=max_replies or (1 if shared else 4),
            max_waiting=max_waiting,
            grace_s=grace_s,
            calls=calls,
            servers=Servers(folder / "servers.json", server),
        )
        stack.enter_context(keep_tidy(store, page.people, forget_after_s=FORGET_AFTER_S if data_dir is None else None))
        middleware = [Middleware(SecurityHeaders), Middleware(SameOrigin), Middleware(PrivateCookie)]
        if logins:
            most = (STRANGERS if shared else ALONE).wrong_passwords
            middleware.append(Middleware(WrongPasswords, most=most))
            if not logins.guests:
                middleware.append(Middleware(OnlyLoggedIn, logins=logins))
        if not shared:
            middleware.insert(1, Middleware(OnlyThisMachine))
        if programs is not None:
            keys = programs.keys if page_token is None else programs.keys.with_key(page_token.value)
            access = replace(programs, keys=keys)
            middleware.insert(2 if shared else 3, Middleware(ForPrograms, backend=backend, access=access))
        if page_token is not None:
            middleware.append(Middleware(OnlyWithToken, token=page_token))
        middleware.append(page.middleware)
        # Every service that Gradio offers besides is switched off by name: its environment variables could switch it
        # on.
        _, url, _ = page.app.launch(
            server_name=host,
            server_port=port,
            prevent_thread_lock=True,
            quiet=True,
            inbrowser=False,
            share=False,
            show_error=False,
            ssr_mode=False,
            pwa=True,
            favicon_path=asset_path("icon.svg"),
            mcp_server=mcp,
            enable_monitoring=False,
            run_history=False,
            # Gradio's clients look at it; what takes files is ours.
            max_file_size=backend.media.limits.max_bytes(None) if calls else 1,
            footer_links=[],
            _app=GuardedApp(default_response_class=ORJSONResponse, middleware=middleware, routes=page.routes),
            # Else Gradio asks for its page within 3 s, and on a very busy machine takes localhost for unreachable.
            _frontend=False,
        )
        if mcp and page_token is not None:
            # Its own would come without the token, which its callers bring.
            own = {"x-gradio-user": "mcp", "authorization": f"Bearer {page_token.value}"}
            from gradio_client import Client

            client = Client(url, headers=own, download_files=False, verbose=False, analytics_enabled=False)
            page.app.mcp_server_obj._client_instance = client  # pyright: ignore[reportOptionalMemberAccess]
    except BaseException:
        stack.close()
        raise
    return Server(page.app, url, store, page.replies, page_token, stack)


def launch(backend: ChatBackend, *, open_browser: bool = False, **options: Any) -> None:
    """Serves the page until Ctrl-C, SIGTERM or the terminal's end; prints its address. Options are `serve`'s.

    Raises:
        ConfigError: the port or the address can't be used.
        StorageError: the folder for conversations can't be used.
    """
    server = serve(backend, **options)
    try:
        # From the moment that the address is known, every end is as clean as Ctrl-C: what is to be kept, is kept.
        with end_signals(interrupt), contextlib.suppress(KeyboardInterrupt):
            print(f"qwen35mm chats with {backend.info.name} on {server.address} (Ctrl-C ends it)", flush=True)
            if open_browser:
                import webbrowser

                webbrowser.open(server.address_for_once)
            wait_for_the_end()
    finally:
        server.close()


def _check_mcp(mcp: bool, calls: bool, logins: Logins | None) -> None:
    """Raises ConfigError, MissingExtraError: there can't be an MCP server."""
    if mcp and importlib.util.find_spec("mcp") is None:
        raise MissingExtraError("An MCP server", "mcp")
    if mcp and (logins or not calls):
        raise ConfigError("--mcp needs what --no-api takes away, and a page without --auth and --auth-file.")


def _logins(auth: Sequence[tuple[str, str]], auth_file: Path | None, guests: bool) -> Logins | None:
    if auth and auth_file:
        raise ConfigError("--auth and --auth-file both say who may log in. Name one of them.")
    if guests and not auth and not auth_file:
        raise ConfigError("--guests is for a page with a login: name who may log in with --auth-file or --auth.")
    if auth_file is not None:
        accounts = AccountFile(auth_file)
        if not accounts.names():
            raise ConfigError(
                f"Nobody may log in by {auth_file}: it is empty. Add somebody with "
                f"`qwen35mm account add NAME --auth-file {auth_file}`."
            )
        return Logins(accounts, guests=guests)
    return Logins(GivenAccounts(dict(auth)), guests=guests) if auth else None


def _claim_port(host: str, port: int) -> int:
    """The port to serve on, checked: Gradio would only say that it found none in a range."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        if sys.platform != "win32":
            # As the server does; there, a port whose last connections still fade counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} on {host} can't be used ({error.strerror}). Another qwen35mm may be running there: "
                f"end it, or take another port with --port {port + 1}, or `make chat PORT={port + 1}`."
            ) from None
        return probe.getsockname()[1]
