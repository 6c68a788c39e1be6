"""Starts and stops the page's server."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen35mm.chat.accounts import AccountFile, GivenAccounts
from qwen35mm.chat.documents.documents import can_read_web_pages
from qwen35mm.chat.quotas import ALONE, STRANGERS
from qwen35mm.chat.replies.replies import GRACE_S, Replies
from qwen35mm.chat.replies.toolbox import Toolbox
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.temporary import TemporaryStore, temporary_folder
from qwen35mm.contract import Backend
from qwen35mm.errors import ConfigError, MissingExtraError, StorageError
from qwen35mm.http.ends import end_signals, interrupt, wait_for_the_end
from qwen35mm.http.run import ServerThread, tell_network
from qwen35mm.http.run import check as check_address
from qwen35mm.http.sessions import PageToken
from qwen35mm.http.settings import HttpSettings
from qwen35mm.strangers import is_shared
from qwen35mm.tools.config import ToolServer
from qwen35mm.tools.servers import ToolServers
from qwen35mm.web.serving.app import Page, build_app
from qwen35mm.web.serving.guest import MAX_WAITING_EVENTS
from qwen35mm.web.serving.logins import Logins
from qwen35mm.web.serving.people import owner_named
from qwen35mm.web.serving.programs import ProgramAccess
from qwen35mm.web.serving.servers import Server as RemoteServer
from qwen35mm.web.serving.servers import Servers
from qwen35mm.web.serving.tidying import keep_tidy
from qwen35mm.web.serving.tool_servers import ToolSettings

logger = logging.getLogger(__name__)

# Without a data folder, people last seen this long ago are deleted with their uploads and conversations.
FORGET_AFTER_S = 1800.0


@dataclass(frozen=True)
class Server:
    """A page that is being served.

    Attributes:
        url: the address, without the token.
        network_url: what other machines reach it by; None if they can't.
        token: the token that opens the page; None if none is needed.
    """

    page: Page
    url: str
    network_url: str | None
    store: ConversationStore
    token: PageToken | None
    _close: Callable[[], object]
    _stack: contextlib.ExitStack

    @property
    def replies(self) -> Replies:
        return self.page.replies

    @property
    def address(self) -> str:
        """The address for a person, with the token."""
        return self.url if self.token is None else self.token.address(self.url)

    @property
    def address_for_once(self) -> str:
        """An address that works once, for the command that opens the browser."""
        return self.url if self.token is None else self.token.address_for_once(self.url)

    def close(self) -> None:
        """Stops the server and the replies in progress, and stores what was written."""
        self._close()
        self.replies.close()
        self._stack.close()


def serve(
    backend: Backend,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    http: HttpSettings | None = None,
    data_dir: Path | None = None,
    auth: Sequence[tuple[str, str]] = (),
    auth_file: Path | None = None,
    guests: bool = False,
    token: str | None = None,
    programs: ProgramAccess | None = None,
    calls: bool = True,
    mcp: bool = False,
    through_gradio: bool = False,
    read_web: bool = False,
    server: RemoteServer | None = None,
    tools: Sequence[ToolServer] = (),
    tool_accounts: Sequence[str] = (),
    max_replies: int | None = None,
    max_waiting: int = MAX_WAITING_EVENTS,
    grace_s: float = GRACE_S,
) -> Server:
    """Starts the page in its own threads and returns.

    Args:
        host, port: the address to listen on; port 0 takes a free one.
        http: how the page is reached there.
        data_dir: folder for the conversations; None deletes them at the end.
        auth: names and passwords of people who may log in; without any, everybody may use the page.
        auth_file: a file with them, instead; see `qwen35mm.chat.accounts`.
        guests: whether people who don't log in may use the page, too, each with their own conversations.
        token: opens the page for the one person at this machine; None makes one, and "" lets every user of the
            machine in.
        programs: adds the routes of `qwen35mm serve`; None leaves them out.
        calls: whether Gradio's clients find the endpoint `chat`.
        mcp: whether the endpoint is also a tool of an MCP server.
        through_gradio: whether Gradio starts the server and queues the page's stream, as ZeroGPU needs.
        read_web: whether web addresses are read into messages, unless a person says no. Without it, one's own page can
            allow it in its settings.
        server: the server of the model, if `backend` is remote.
        tools: the tool servers that chats may switch on.
        tool_accounts: who may, where people log in; nobody else does.
        max_replies: most replies in progress for one person; None is 4, or 1 if strangers share the page.
        max_waiting: most requests in Gradio's queue; more are refused.
        grace_s: a reply that no page watches is stopped after this many seconds.

    Raises:
        ConfigError: the port, the address, the token or the accounts can't be used.
        StorageError: the folder can't be used.
        MissingExtraError: the MCP SDK, or what reads web pages, isn't installed.
    """
    shared = is_shared(host)
    logins, page_token = _checked(
        shared,
        auth=auth,
        auth_file=auth_file,
        guests=guests,
        token=token,
        calls=calls,
        mcp=mcp,
        read_web=read_web,
        tools=tools,
        tool_accounts=tool_accounts,
    )
    if programs is not None and page_token is not None:
        programs = replace(programs, keys=programs.keys.with_key(page_token.value))
    # Known once the server listens.
    network_url: str | None = None
    stack = contextlib.ExitStack()
    try:
        folder = data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qwen35mm-chats-")))
        store = stack.enter_context(contextlib.closing(ConversationStore(folder)))
        temporary = TemporaryStore(stack.enter_context(temporary_folder()))
        stack.callback(temporary.close)
        toolbox, tool_settings = _toolbox(store, tuple(tools), tool_accounts, folder if page_token else None, stack)
        page = build_app(
            backend,
            store,
            toolbox=toolbox,
            tools=tool_settings,
            temporary=temporary,
            shared=shared,
            token=page_token,
            logins=logins,
            settings=http,
            programs=programs,
            max_replies=max_replies or (1 if shared else 4),
            max_waiting=max_waiting,
            grace_s=grace_s,
            calls=calls,
            mcp=mcp,
            through_gradio=through_gradio,
            read_web=read_web,
            servers=Servers(folder / "servers.json", server),
            network_url=lambda: network_url,
        )
        stack.enter_context(keep_tidy(store, page.people, forget_after_s=FORGET_AFTER_S if data_dir is None else None))
        if through_gradio:
            url, close = page.guest.launch(page.app, page.guards, host=host, port=port, mcp=mcp)
        else:
            thread = ServerThread(page.app, host=host, port=port, settings=http)
            url, close, network_url = thread.url, thread.close, thread.network_url
    except BaseException:
        stack.close()
        raise
    return Server(page, url, network_url, store, page_token, close, stack)


def launch(backend: Backend, *, open_browser: bool = False, **options: Any) -> None:
    """Serves the page until Ctrl-C, SIGTERM or the terminal closes; prints its address. Takes the options of `serve`.

    Raises:
        ConfigError: the port or the address can't be used.
        StorageError: the folder for conversations can't be used.
    """
    server = serve(backend, **options)
    try:
        # Once the address is printed, every signal ends the program as cleanly as Ctrl-C.
        with end_signals(interrupt), contextlib.suppress(KeyboardInterrupt):
            print(f"qwen35mm chats with {backend.info.name} on {server.address} (Ctrl-C ends it)", flush=True)
            tell_network(server.network_url)
            if options.get("calls", True):
                print(f'Programs: gradio_client.Client("{server.address}")', flush=True)
            if open_browser:
                import webbrowser

                webbrowser.open(server.address_for_once)
            wait_for_the_end()
    finally:
        server.close()


def check(
    *, host: str, port: int, http: HttpSettings | None = None, data_dir: Path | None = None, **options: Any
) -> None:
    """Raises what `serve` would raise with these options, before a model is loaded for it."""
    _checked(is_shared(host), **options)
    check_address(host, port, http or HttpSettings())
    if data_dir is not None and data_dir.exists():
        with contextlib.closing(ConversationStore(data_dir)) as store:
            store.find("", limit=1)


def _checked(
    shared: bool,
    *,
    auth: Sequence[tuple[str, str]],
    auth_file: Path | None,
    guests: bool,
    token: str | None,
    calls: bool,
    mcp: bool,
    read_web: bool,
    tools: Sequence[ToolServer],
    tool_accounts: Sequence[str],
) -> tuple[Logins | None, PageToken | None]:
    """Who gets in: people with a login, or those with the token. Raises the errors of `serve`'s options."""
    has_mcp = importlib.util.find_spec("mcp") is not None
    for is_asked, is_there, what, extra in (
        (read_web, can_read_web_pages(), "Reading web addresses", "web"),
        (mcp, has_mcp, "An MCP server", "mcp"),
        (tools, has_mcp, "Tool servers", "tools"),
    ):
        if is_asked and not is_there:
            raise MissingExtraError(what, extra)
    logins = _logins(auth, auth_file, guests, (STRANGERS if shared else ALONE).wrong_passwords)
    if token and (shared or logins):
        raise ConfigError("--token is for a page of one's own. Where several people use it, --auth says who may.")
    if mcp and (logins or not calls):
        raise ConfigError("--mcp needs what --no-api takes away, and a page without --auth and --auth-file.")
    page_token = None if shared or logins or token == "" else PageToken(token)
    _check_tools(tools, tool_accounts, has_token=page_token is not None, has_logins=logins is not None)
    return logins, page_token


def _check_tools(tools: Sequence[ToolServer], accounts: Sequence[str], *, has_token: bool, has_logins: bool) -> None:
    """Raises ConfigError if somebody could use the tools who isn't meant."""
    if accounts and not (tools and has_logins):
        raise ConfigError("--mcp-accounts says which accounts may use --mcp-config: give that, and --auth-file.")
    if tools and has_logins and not accounts:
        raise ConfigError(
            "--mcp-config on a page with a login needs --mcp-accounts: the names of those who may use it."
        )
    if tools and not has_logins and not has_token:
        raise ConfigError(
            "--mcp-config is for your own page with its token, or for named accounts: tools act in your name, and here "
            "strangers could use them. Leave out --token none, or use --auth-file and --mcp-accounts."
        )


def _toolbox(
    store: ConversationStore,
    given: tuple[ToolServer, ...],
    accounts: Sequence[str],
    folder: Path | None,
    stack: contextlib.ExitStack,
) -> tuple[Toolbox, ToolSettings]:
    """The page's tools; without the SDK there are none, unless some were asked for."""
    if not given and (folder is None or importlib.util.find_spec("mcp") is None):
        return Toolbox(), ToolSettings(Toolbox(), (), None)
    servers = stack.enter_context(ToolServers(given))
    owners = None if folder is not None else {owner_named(name) for name in accounts}
    toolbox = Toolbox(servers, store, lambda owner: owners is None or owner in owners)
    settings = ToolSettings(toolbox, given, None if folder is None else folder / "tools.json")
    try:
        settings.load()
    except (ConfigError, StorageError) as error:
        # The page is where it can be repaired.
        logger.warning("%s", error)
    return toolbox, settings


def _logins(
    auth: Sequence[tuple[str, str]], auth_file: Path | None, guests: bool, wrong_passwords: int
) -> Logins | None:
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
    elif auth:
        accounts = GivenAccounts(dict(auth))
    else:
        return None
    return Logins(accounts, guests=guests, wrong_passwords=wrong_passwords)
