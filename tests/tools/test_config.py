"""The usual JSON of MCP clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.errors import ConfigError
from qwen35mm.tools.config import ToolServer, read_servers, servers_of


def test_servers_as_other_clients_write_them(tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text(
        json.dumps(
            {
                "mcpServers": {
                    "files": {
                        "command": "npx",
                        "args": ["-y", "/data"],
                        "env": {"KEY": "k"},
                        "autoApprove": ["*"],
                    },
                    "web": {"type": "http", "url": "https://example.org/mcp", "headers": {"a": "b"}, "timeout": 5},
                    "off": {"command": "x", "disabled": True},
                }
            }
        )
    )
    files, web = read_servers(tmp_path / "mcp.json")
    assert files == ToolServer("files", "npx", ("-y", "/data"), {"KEY": "k"})
    assert web == ToolServer("web", url="https://example.org/mcp", headers={"a": "b"}, timeout_s=5.0)
    # Neither may be shown.
    assert "'k'" not in repr(files)
    assert "'b'" not in repr(web)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("{", "isn't JSON"),
        ("[]", "no object mcpServers"),
        ({"a b": {"command": "x"}}, "letters, digits"),
        ({"a": {}}, "either a command or a url"),
        ({"a": {"command": "x", "url": "http://a"}}, "either a command or a url"),
        ({"a": {"command": ["x"]}}, "has a command"),
        ({"a": {"command": "x", "args": "y"}}, "has a args"),
        ({"a": {"command": "x", "env": {"A": 1}}}, "has a env"),
        ({"a": {"command": "x", "timeout": -1}}, "has a timeout"),
        ({"a": {"url": "file:///etc/passwd"}}, "has a url"),
        ({"a": {"type": "sse", "url": "http://a"}}, "has a type"),
        ({str(number): {"command": "x"} for number in range(33)}, "at most 32"),
    ],
)
def test_what_is_wrong_is_said(values: Any, words: str) -> None:
    text = values if isinstance(values, str) else json.dumps({"mcpServers": values})
    with pytest.raises(ConfigError, match=words):
        servers_of(text)


def test_a_file_that_isnt_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_servers(tmp_path / "none.json")
