"""The usual JSON of MCP clients: servers by name, each with a command or an address."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen35mm.errors import ConfigError
from qwen35mm.outside_json import load_json
from qwen35mm_preprocess.say import Said, say

MAX_SERVERS = 32
TIMEOUT_S = 60.0
_MAX_TIMEOUT_S = 3600.0
_MAX_BYTES = 1 << 20
_NAME = re.compile("[A-Za-z0-9_-]{1,32}")
_TEXTS = ("command", "cwd", "url", "type")
# The kinds of connection, as clients call them, and what each needs. "sse" is gone from the protocol.
_TYPES = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url"}


@dataclass(frozen=True)
class ToolServer:
    """A server of tools.

    Attributes:
        command, args, env, cwd: of a child process. It inherits PATH, HOME and a few more variables, and gets `env`.
        url, headers: of a server on the network, instead.
        timeout_s: for one call.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = TIMEOUT_S

    @property
    def digest(self) -> str:
        """Identifies what is run or asked; keys may change without being another server."""
        return hashlib.sha256(json.dumps([self.command, self.args, self.cwd, self.url]).encode()).hexdigest()


def read_servers(path: Path) -> tuple[ToolServer, ...]:
    """The servers in a file. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or "unreadable"
        words = say("The tool servers in {path} can't be read: {reason}.", path=str(path), reason=reason)
        raise ConfigError(words) from None
    return servers_of(data)


def servers_of(data: bytes | str) -> tuple[ToolServer, ...]:
    """The servers of a JSON text. Raises ConfigError."""
    try:
        values = load_json(data, max_bytes=_MAX_BYTES)
    except ValueError:
        raise _wrong(say("It isn't JSON.")) from None
    found = values.get("mcpServers", values.get("servers")) if isinstance(values, dict) else None
    if not isinstance(found, dict):
        raise _wrong(say("It has no object mcpServers."))
    if len(found) > MAX_SERVERS:
        raise _wrong(say("It names {n} servers; at most {most} are accepted.", n=len(found), most=MAX_SERVERS))
    return tuple(_server(name, each) for name, each in found.items() if not _is_off(each))


def _is_off(values: Any) -> bool:
    return isinstance(values, dict) and values.get("disabled") is True


def _server(name: str, values: Any) -> ToolServer:
    if not _NAME.fullmatch(name):
        raise _wrong(say("A server's name has up to 32 letters, digits, - and _; got {name}.", name=repr(name[:50])))

    def wrong(key: str) -> ConfigError:
        return _wrong(say("The server {name} has a {key} that can't be used.", name=name, key=key))

    if not isinstance(values, dict):
        raise wrong(name)
    texts = {key: values[key] for key in _TEXTS if values.get(key) is not None}
    args, timeout_s = values.get("args", []), values.get("timeout", TIMEOUT_S)
    pairs = {key: values.get(key) or {} for key in ("env", "headers")}
    for key, value in texts.items():
        if not value or not _are_texts([value]):
            raise wrong(key)
    if not isinstance(args, list) or not _are_texts(args):
        raise wrong("args")
    for key, given in pairs.items():
        if not isinstance(given, dict) or not _are_texts([*given, *given.values()]):
            raise wrong(key)
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise wrong("timeout")
    kind = texts.pop("type", None)
    if kind is not None and (kind not in _TYPES or _TYPES[kind] not in texts):
        raise wrong("type")
    if ("command" in texts) == ("url" in texts):
        raise _wrong(say("The server {name} needs either a command or a url.", name=name))
    if "url" in texts and not texts["url"].startswith(("http://", "https://")):
        raise wrong("url")
    return ToolServer(name, args=tuple(args), timeout_s=float(timeout_s), **pairs, **texts)


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) and "\0" not in value for value in values)


def _wrong(words: Said) -> ConfigError:
    return ConfigError(say("The tool servers can't be read. {why}", why=words))
