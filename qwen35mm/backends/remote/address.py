"""A server's address, taken apart and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httpx

from qwen35mm.errors import ConfigError

_VERSION = re.compile(r"v\d")


@dataclass(frozen=True)
class Address:
    """Where a server is, and what it is shown to let us in.

    Attributes:
        base_url: up to and with the API's version, such as `http://localhost:8000/v1`; without credentials.
        host: host and port, for messages.
        auth: user and password that stood in the address.
    """

    base_url: str
    host: str
    auth: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads an address; one whose path names no version of the API gets `/v1`.

        Raises:
            ConfigError: not the address of an HTTP server.
        """
        try:
            parsed = httpx.URL(url.strip())
        except (httpx.InvalidURL, TypeError, AttributeError):
            parsed = None
        if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError("A server's address must begin with http:// or https://, as http://localhost:8000/v1.")
        if parsed.query or parsed.fragment:
            raise ConfigError(
                "A server's address ends with its path, as in http://localhost:8000/v1: leave out what follows ? or #."
            )
        path = parsed.path.rstrip("/")
        if not any(_VERSION.match(part) for part in path.split("/")):
            path += "/v1"
        auth = (parsed.username, parsed.password) if parsed.userinfo else None
        return cls(str(parsed.copy_with(path=path, userinfo=b"")), parsed.netloc.decode("ascii"), auth)


def check_api_key(api_key: str | None) -> None:
    """Raises ConfigError for a key that can't stand in a header; the message doesn't hold it."""
    if api_key is not None and (not api_key or not re.fullmatch(r"[\x21-\x7e]+", api_key)):
        raise ConfigError("The API key must be one word of ASCII characters, without spaces or line breaks.")
