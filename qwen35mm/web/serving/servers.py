"""Servers whose models a person added, stored in a file that only its owner can read, since it has their keys."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.backends.remote.connection import RemoteTimeouts
from qwen35mm.decoding import Decoders
from qwen35mm.errors import ConfigError, NotFoundError, StorageError
from qwen35mm.folders import write_private
from qwen35mm_preprocess import MediaBudget, MediaLimits
from qwen35mm_preprocess.say import say

MAX_SERVERS = 100
# The id of the server that the program was started with.
GIVEN = "given"
# A person is waiting, so an unreachable server is reported after two tries, not five.
_ATTEMPTS = 2
_CONNECT_S = 5.0
# An answer may be long.
_ANSWER_S = 3600.0


@dataclass(frozen=True)
class Server:
    """A model behind an OpenAI-compatible server.

    Attributes:
        address: with or without `/v1`.
        model: its name there; None is the server's only model.
        id: its id on the page.
    """

    address: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    id: str = GIVEN

    @property
    def host(self) -> str:
        """The address's host and port, without credentials."""
        parts = urlsplit(self.address if "//" in self.address else f"//{self.address}")
        return parts.netloc.rpartition("@")[2]

    def backend(
        self,
        limits: MediaLimits | None = None,
        budget: MediaBudget | None = None,
        slots: int = 4,
        decoders: Decoders | None = None,
    ) -> RemoteBackend:
        """A backend for this server, not connected yet.

        Raises:
            ConfigError: the address or the key is invalid.
        """
        return RemoteBackend(
            self.address,
            model=self.model,
            api_key=self.key,
            max_concurrent=slots,
            timeout_s=_ANSWER_S,
            max_attempts=_ATTEMPTS,
            limits=limits,
            budget=budget,
            timeouts=RemoteTimeouts(connect_s=_CONNECT_S),
            decoders=decoders,
        )


class _Kept(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str
    address: str
    model: str | None = None
    key: str | None = None


_FILE = TypeAdapter(list[_Kept])


class Servers:
    """The servers of one person. Usable from any thread.

    Args:
        path: the file; `add` creates it.
        given: the server that the program was started with, which isn't stored.
    """

    def __init__(self, path: Path, given: Server | None = None) -> None:
        self._path = path
        self._given = given
        self._lock = threading.Lock()

    def all(self) -> list[Server]:
        """All servers, the given one first. Raises StorageError if the file can't be read."""
        return [*([self._given] if self._given else []), *self._read()]

    def find(self, server_id: str) -> Server:
        """A server by its id. Raises NotFoundError, StorageError."""
        for each in self.all():
            if each.id == server_id:
                return each
        raise NotFoundError(say("This server no longer exists."))

    def add(self, address: str, model: str | None, key: str | None) -> Server:
        """Stores a server; replaces one with the same address and model.

        Raises:
            ConfigError: there are too many.
            StorageError: the file can't be written.
        """
        server = Server(address, model, key, secrets.token_hex(8))
        self._write(lambda kept: [*(each for each in kept if (each.address, each.model) != (address, model)), server])
        return server

    def remove(self, server_id: str) -> None:
        """Removes a server and its key. Raises StorageError."""
        self._write(lambda kept: [each for each in kept if each.id != server_id])

    def _read(self) -> list[Server]:
        try:
            data = self._path.read_bytes()
            return [Server(each.address, each.model, each.key, each.id) for each in _FILE.validate_json(data)]
        except FileNotFoundError:
            return []
        except (OSError, ValidationError):
            # Doesn't repeat the error, which could contain a key.
            raise StorageError(
                say("The servers in {path} can't be read. Repair the file, or remove it.", path=str(self._path))
            ) from None

    def _write(self, change: Callable[[list[Server]], list[Server]]) -> None:
        with self._lock:
            servers = change(self._read())
            if len(servers) > MAX_SERVERS:
                raise ConfigError(
                    say("There are {n} servers already, the most there can be. Remove one.", n=MAX_SERVERS)
                )
            try:
                write_private(self._path, json.dumps([asdict(each) for each in servers], indent=1))
            except OSError:
                raise StorageError(
                    say("The servers in {path} can't be saved. Check the folder, and its disk.", path=str(self._path))
                ) from None
