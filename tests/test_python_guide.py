"""Every Python example of the documents runs, on the bundled model; each section of the guide by itself."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.web import serve
from tests.chat.fake_backend import FakeBackend
from tests.server.conftest import serving
from tests.small_adapters import write_adapter
from tests.tools.fakes import fake

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Elsewhere an example goes on from the one before.
BY_SECTION = {"README.md", "python.md"}
ADDRESS = "http://127.0.0.1:8000"
PAGE = "http://127.0.0.1:7860/t/my-long-token/"
ADAPTERS = ("my-adapter", "another")
FILES = {"photo.jpg": "wide.jpg", "a.jpg": "two-shapes.jpg", "b.jpg": "wide.jpg", "clip.mp4": "moves-right.mp4"}


def sections() -> dict[str, list[tuple[int, str]]]:
    """The examples of each section, with the lines that they begin at."""
    found: dict[str, list[tuple[int, str]]] = {}
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        for example in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            before = text[: example.start(1)]
            title = re.findall(r"^#+ (.+)", before, re.MULTILINE)[-1]
            name = f"{path.name}: {title}" if path.name in BY_SECTION else path.name
            found.setdefault(name, []).append((before.count("\n"), example[1]))
    return found


@pytest.fixture(scope="module")
def model(demo: LoadedModel) -> Iterator[LocalBackend]:
    with LocalBackend(demo, min_segment=16) as backend:
        yield backend


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sample in FILES.items():
        shutil.copy(asset_path("samples") / sample, tmp_path / name)
    server = fake(tmp_path)
    servers = {"fake": {"command": server.command, "args": list(server.args)}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    for name in ADAPTERS:
        write_adapter(tmp_path / name)
    monkeypatch.chdir(tmp_path)


def test_there_is_an_example_of_each_way_in() -> None:
    assert len(sections()) >= 12


@pytest.mark.parametrize("title", sections())
async def test_examples_run(title: str, model: LocalBackend) -> None:
    names: dict[str, Any] = {"model": model, "__name__": "example", "__file__": title}
    examples = [(line, re.sub("Qwen/Qwen3.5-[24]B", str(demo_model_path()), code)) for line, code in sections()[title]]
    if any("asyncio.run(" in code for _, code in examples):
        # As a program of its own, which has no loop yet.
        failed: list[BaseException] = []
        thread = threading.Thread(target=run_alone, args=(examples, names, failed))
        thread.start()
        thread.join()
        assert not failed, failed
    else:
        with contextlib.ExitStack() as stack:
            if any(ADDRESS in code for _, code in examples):
                address = stack.enter_context(serving(create_app(model)))
                examples = [(line, code.replace(ADDRESS, address)) for line, code in examples]
            if any(PAGE in code for _, code in examples):
                page = stack.enter_context(contextlib.closing(serve(FakeBackend(), port=0)))
                examples = [(line, code.replace(PAGE, page.address)) for line, code in examples]
            await run(examples, names)


async def run(examples: list[tuple[int, str]], names: dict[str, Any]) -> None:
    """As cells of a notebook: a loop runs, and `await` may stand anywhere."""
    for line, code in examples:
        made = compile("\n" * line + code, names["__file__"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        awaited = eval(made, names)
        if inspect.isawaitable(awaited):
            await awaited


def run_alone(examples: list[tuple[int, str]], names: dict[str, Any], failed: list[BaseException]) -> None:
    try:
        for line, code in examples:
            exec(compile("\n" * line + code, names["__file__"], "exec"), names)
    except BaseException as error:
        failed.append(error)
