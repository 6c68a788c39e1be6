"""API keys: who may call, and how callers are separated."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from qwen35mm.errors import ConfigError
from qwen35mm.server.errors import ApiError

_KEY = re.compile(r"[\x21-\x7e]{16,200}")


@dataclass(frozen=True)
class Caller:
    """The owner of a key.

    Attributes:
        name: unique to the key; reveals nothing of the key.
    """

    name: str


ANYBODY = Caller("")


class Keys:
    """The API keys of a server; without any, it is open to everybody who reaches it. Stores only their digests."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Reads keys from a file, one on each line. Empty lines and lines that begin with # are ignored.

        Raises:
            ConfigError: the file can't be read, has no key, or has an invalid one. The message repeats no key.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The API keys of {path} can't be read ({error}).") from None
        keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        for number, key in enumerate(keys, start=1):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"Key {number} of {path} must be 16 to 200 visible ASCII characters without spaces.")
        if not keys:
            raise ConfigError(f"{path} holds no API key. Write one on each line: 16 characters or more.")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def with_key(self, key: str) -> Keys:
        """These keys and one more."""
        more = Keys([key])
        more._digests += self._digests
        return more

    def caller(self, authorization: str | None, x_api_key: str | None = None) -> Caller:
        """The caller who sent these headers: `Authorization: Bearer KEY`, or `x-api-key: KEY`.

        Raises:
            ApiError: 401, the key is missing or wrong.
        """
        if not self._digests:
            return ANYBODY
        scheme, _, bearer = (authorization or "").partition(" ")
        # Clients may send both, one of them another server's.
        sent = [_digest(bearer.strip() if scheme.lower() == "bearer" else ""), _digest(x_api_key or "")]
        # Compares with every key in constant time, so that timing reveals nothing.
        found = [digest for each in sent for digest in self._digests if hmac.compare_digest(digest, each)]
        if not found:
            message = "This server needs an API key: Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return Caller(found[0].hex())

    def caller_of(self, request: Request) -> Caller:
        """The caller who sent a request; see `caller`."""
        return self.caller(request.headers.get("authorization"), request.headers.get("x-api-key"))


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"qwen35mm api key\0" + key.encode()).digest()
