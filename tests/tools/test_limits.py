"""How much a server may offer and answer: one more is refused or left out, in words."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest

from qwen35mm.errors import ToolError
from qwen35mm.tools import servers as module
from qwen35mm.tools.answers import MAX_FILE_BYTES, MAX_FILES, answer_of
from qwen35mm.tools.config import ToolServer
from qwen35mm.tools.servers import MAX_DEFINITION_CHARS, MAX_TOOLS

SERVER = ToolServer("many", "none")


def offered(number: int, description: str = "") -> Any:
    return SimpleNamespace(name=f"t{number}", description=description, inputSchema={"type": "object"})


@pytest.mark.parametrize("num_tools", [MAX_TOOLS, MAX_TOOLS + 1])
async def test_a_server_has_so_many_tools_also_in_pages(num_tools: int, monkeypatch: pytest.MonkeyPatch) -> None:
    session = module._Session(SERVER)
    pages = [[*map(offered, range(100))], [*map(offered, range(100, num_tools))]]

    async def ask(*_: object) -> Any:
        return SimpleNamespace(tools=pages.pop(0), nextCursor="more" if pages else None)

    monkeypatch.setattr(session, "_ask", ask)
    if num_tools == MAX_TOOLS:
        assert len(await session.tools()) == MAX_TOOLS
    else:
        with pytest.raises(ToolError, match=f"more than {MAX_TOOLS} tools"):
            await session.tools()


def test_a_tools_description_and_schema_have_so_many_characters() -> None:
    empty = len(str(module._tool(SERVER, offered(1)).definition["function"]).replace("'", '"'))
    assert module._tool(SERVER, offered(1, "x" * (MAX_DEFINITION_CHARS - empty))).name == "t1"
    with pytest.raises(ToolError, match="over 20,000 characters"):
        module._tool(SERVER, offered(1, "x" * (MAX_DEFINITION_CHARS - empty + 1)))


def test_a_result_has_so_many_files_and_each_so_many_bytes() -> None:
    data = base64.b64encode(b"abc").decode()
    blocks = [SimpleNamespace(type="image", mimeType="image/png", data=data) for _ in range(MAX_FILES + 1)]
    answer = answer_of(SimpleNamespace(content=blocks, isError=False))  # pyright: ignore[reportArgumentType]
    assert len(answer.files) == MAX_FILES
    assert answer.text == "[picture-9.png is left out: a result may have 8 files]"
    blocks[0].data = base64.b64encode(bytes(MAX_FILE_BYTES + 1)).decode()
    answer = answer_of(SimpleNamespace(content=blocks[:2], isError=False))  # pyright: ignore[reportArgumentType]
    assert ([file.name for file in answer.files], answer.text) == (
        ["picture-2.png"],
        "[picture-1.png is left out: a file may have 24 MiB]",
    )
