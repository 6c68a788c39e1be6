"""Serves an application on a port. The only place that starts uvicorn."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35mm.errors import ConfigError
from qwen35mm.http.connection import Connection, Places
from qwen35mm.http.ends import Ending, end_signals, interrupt
from qwen35mm.http.settings import HttpSettings
from qwen35mm.http.streams import body_until_the_end

# Seconds that a running reply may continue after Ctrl-C.
_GRACE_S = 3


def run(
    app: ASGIApp, *, host: str, port: int, line: Callable[[str], str], settings: HttpSettings | None = None
) -> None:
    """Serves until Ctrl-C or SIGTERM; prints a line with the address.

    Args:
        port: 0 takes a free one.
        line: makes the printed line from the address.

    Raises:
        ConfigError: the address or the certificate can't be used.
    """
    settings = settings or HttpSettings()
    with contextlib.closing(listen(host, port)) as listener:
        server = _Server(app, settings)
        # uvicorn raises the signal again after its own end; the code after this block must still run.
        with end_signals(interrupt), contextlib.suppress(KeyboardInterrupt):
            print(f"{line(address_of(listener, host, settings))} (Ctrl-C ends it)", flush=True)
            tell_network(network_address(listener, settings))
            server.run(sockets=[listener])


class ServerThread:
    """Serves an application in a thread, until `close`.

    Attributes:
        url: the address, with a slash at its end.
        network_url: what other machines reach it by; see `network_address`.

    Raises:
        ConfigError: the address or the certificate can't be used.
    """

    def __init__(self, app: ASGIApp, *, host: str, port: int, settings: HttpSettings | None = None) -> None:
        settings = settings or HttpSettings()
        self._listener = listen(host, port)
        try:
            self._server = _Server(app, settings)
        except BaseException:
            self._listener.close()
            raise
        self.url = f"{address_of(self._listener, host, settings)}/"
        self.network_url = network_address(self._listener, settings)
        how = {"sockets": [self._listener]}
        self._thread = threading.Thread(target=self._server.run, kwargs=how, name="qwen35mm-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the requests in progress, each with an error, and the thread."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


class _Server(uvicorn.Server):
    """A server that tells requests in progress when it ends."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._ending = Ending()

        async def entered(scope: Scope, receive: Receive, send: Send) -> None:
            self._ending.enter(scope)
            await app(scope, body_until_the_end(scope, receive), send)

        proxies = [ipaddress.ip_network(each) for each in settings.trusted_proxies]
        # How IPv4 addresses appear on a socket for both families.
        mapped = [f"::ffff:{each.network_address}/{96 + each.prefixlen}" for each in proxies if each.version == 4]
        places = Places.of_this_process(proxies)
        config = uvicorn.Config(
            entered,
            http=Connection.within(places),
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=[*settings.trusted_proxies, *mapped],
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"TLS can't begin with {settings.tls_cert}: {error.strerror or error}.") from None
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.event.set()
        # Its messages about ended streams are no news here.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def check(host: str, port: int, settings: HttpSettings) -> None:
    """Tries the address and the certificate, before a model is loaded. Raises ConfigError."""
    listen(host, port).close()
    _Server(_nothing, settings)


async def _nothing(_scope: Scope, _receive: Receive, _send: Send) -> None: ...


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if sys.platform != "win32":
            # Otherwise a port counts as used while its last connections close. Windows doesn't need this.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {port} on {host} can't be used ({error.strerror}). Another qwen35mm may be running there: "
            f"end it, or take another port with --port {port + 1}, or `make chat PORT={port + 1}`."
        ) from None
    return listener


def address_of(listener: socket.socket, host: str, settings: HttpSettings) -> str:
    """The address for a person at this machine, without a slash at its end."""
    if _is_everywhere(listener):
        host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    return _url(host, listener, settings)


def network_address(listener: socket.socket, settings: HttpSettings) -> str | None:
    """The address for people at other machines, without a slash at its end.

    None if the server listens on one address only, answers to other names only, or is reached through a proxy, as on a
    Space, and if the machine has no network.
    """
    through_proxy = settings.trusted_proxies or settings.base_path or "SPACE_ID" in os.environ
    if through_proxy or not _is_everywhere(listener):
        return None
    host = _address_in_network(socket.AF_INET)
    if host is None and listener.family == socket.AF_INET6:
        host = _address_in_network(socket.AF_INET6)
    if host is None or (settings.allowed_hosts and host not in settings.allowed_hosts):
        return None
    return _url(host, listener, settings)


def tell_network(address: str | None) -> None:
    """Prints the address for people at other machines, if there is one."""
    if address is not None:
        print(f"On the network: {address}", flush=True)


def _is_everywhere(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_unspecified


def _address_in_network(family: socket.AddressFamily) -> str | None:
    """This machine's address on its way to the internet; nothing is sent."""
    # Addresses for documentation: nobody has them.
    far = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        return probe.getsockname()[0]
    return None


def _url(host: str, listener: socket.socket, settings: HttpSettings) -> str:
    name = f"[{host.strip('[]')}]" if ":" in host else host
    return f"{settings.scheme}://{name}:{listener.getsockname()[1]}"
