"""Settings of a server's address: names, origins, proxies, base path and TLS."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from qwen35mm.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True)
class HttpSettings:
    """Settings of a server, checked when made.

    Attributes:
        allowed_hosts: names that it answers to besides this machine's own.
        cors_origins: websites whose scripts may call it; "*" is all.
        embed_origins: websites that may show its page in a frame.
        trusted_proxies: addresses and networks whose X-Forwarded-For and X-Forwarded-Proto are believed.
        base_path: the path under which a proxy serves it, such as `/chat`.
        tls_cert: a certificate chain in PEM; None serves plain HTTP.
        tls_key: the private key; None if the certificate's file contains it.

    Raises:
        ConfigError: a value can't be used.
    """

    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    embed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    base_path: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        for name in self.allowed_hosts:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"--allowed-host takes a name without a port, such as chat.example.org; got {name!r}."
                )
        for option, origins in (("--cors-origin", self.cors_origins), ("--embed-origin", self.embed_origins)):
            for origin in origins:
                if not _ORIGIN.fullmatch(origin) and not (origin == "*" and option == "--cors-origin"):
                    raise ConfigError(f"{option} takes an origin such as https://example.org; got {origin!r}.")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                message = (
                    f"--trust-proxy takes an address or a network, such as 127.0.0.1 or 10.0.0.0/8; got {proxy!r}."
                )
                raise ConfigError(message) from None
        if not _PATH.fullmatch(self.base_path):
            raise ConfigError(f"--base-path takes a path such as /chat; got {self.base_path!r}.")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("--tls-key needs the certificate: name it by --tls-cert.")
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not path.is_file():
                raise ConfigError(f"There is no file {path} for TLS.")

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"
