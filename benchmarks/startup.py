"""Time from the start of each command to the first token of an answer.

    python -m benchmarks.startup [--model DIR] [--surfaces ask,caption,serve,chat] [--repeats 3]

Each measurement starts the command in a new process with empty caches. `ask` ends with its first word, `caption` with
the file of a one-token caption, `serve` with the first word over HTTP. `chat` opens in a headless Chromium that is
already running, and ends with the first word of the answer to a typed question. The first round isn't counted: it
compiles Python's files and reads the weights into the system's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

from benchmarks.frame import Spread, parse, parser, report
from qwen35mm.assets import asset_path, demo_model_path
from tests.web.browser import FLAGS, find_chromium

_QUESTION = "Which shapes are there?"
_PATIENCE_S = 300.0
_POLL_S = 0.005

Times = dict[str, float]


def ask(model: str, folder: Path) -> Times:
    """Seconds to the answer's first word."""
    with started(folder, "ask", _QUESTION, "--no-think", "--max-tokens", "4", "--model", model) as (process, began):
        assert process.stdout is not None
        assert process.stdout.read(1), "no answer was printed"
        return {"first token": time.perf_counter() - began}


def caption(model: str, folder: Path) -> Times:
    """Seconds to a picture's one-token caption."""
    shutil.copy(asset_path("samples") / "one-shape.png", folder / "picture.png")
    limits = ("--max-tokens", "1", "--keep-unfinished", "--attempts", "1", "--preset", "plain", "--model", model)
    with started(folder, "caption", "picture.png", *limits) as (process, began):
        while not (folder / "picture.txt").exists():
            assert process.poll() is None, "no caption was written"
            assert time.perf_counter() - began < _PATIENCE_S, "no caption was written"
            time.sleep(_POLL_S)
        return {"first token": time.perf_counter() - began}


def serve(model: str, folder: Path) -> Times:
    """Seconds to the answer of `/ready`, and to the first word of a reply."""
    with started(folder, "serve", "--port", "0", "--model", model) as (process, began):
        address = address_of(process)
        httpx.get(f"{address}/ready").raise_for_status()
        times = {"the server answers": time.perf_counter() - began}
        asked = {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 4, "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=asked, timeout=_PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    return times | {"first token": time.perf_counter() - began}
        raise AssertionError("no answer came")


def chat(model: str, folder: Path, browser: Browser) -> Times:
    """Seconds to the address, to the page's text field, and to the first word of an answer."""
    with started(folder, "chat", "--port", "0", "--model", model) as (process, began):
        address = address_of(process)
        times = {"the server answers": time.perf_counter() - began}
        page = browser.new_page()
        page.set_default_timeout(1000 * _PATIENCE_S)
        page.goto(address)
        box = page.locator(".composer textarea")
        box.wait_for()
        times["the page can be used"] = time.perf_counter() - began
        box.fill(_QUESTION)
        box.press("Enter")
        page.locator(".answer .block").first.wait_for()
        times["first token"] = time.perf_counter() - began
        page.close()
        return times


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Starts a command that keeps all its files in `folder`; yields it and the time of its start."""
    kept = {"XDG_CACHE_HOME": "cache", "XDG_DATA_HOME": "data", "GRADIO_TEMP_DIR": "up"}
    environment = {**os.environ, **{name: str(folder / place) for name, place in kept.items()}}
    command = [sys.executable, "-m", "qwen35mm", *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=environment, cwd=folder
    )
    try:
        yield process, began
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def address_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    found = re.search(rb"(http://\S+?)(/v1)?\s", process.stdout.readline())
    assert found, "no address was printed"
    return found[1].decode()


SURFACES: dict[str, Callable[..., Times]] = {"ask": ask, "caption": caption, "serve": serve, "chat": chat}


def main() -> None:
    options = parser(__doc__, model=False)
    options.add_argument("--model", type=Path, default=demo_model_path(), help="a checkpoint's folder; the bundled one")
    options.add_argument("--surfaces", default=",".join(SURFACES), help=f"some of {', '.join(SURFACES)}")
    arguments = parse(options)
    names = arguments.surfaces.split(",")
    if unknown := set(names) - SURFACES.keys():
        options.error(f"--surfaces takes {', '.join(SURFACES)}; got {', '.join(sorted(unknown))}")
    rounds: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        more: dict[str, tuple[Browser, ...]] = {}
        if "chat" in names:
            playwright = stack.enter_context(sync_playwright())
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
            stack.callback(browser.close)
            more["chat"] = (browser,)
        for number in range(arguments.repeats + 1):
            for name in names:
                with tempfile.TemporaryDirectory() as folder:
                    times = SURFACES[name](str(arguments.model.resolve()), Path(folder), *more.get(name, ()))
                for until, seconds in times.items():
                    rounds.setdefault((name, until), []).extend([seconds] if number else [])
    rows = [{"command": name, "until": until, "s": Spread.of(seconds)} for (name, until), seconds in rounds.items()]
    report("startup", arguments, {"From the command": rows})


if __name__ == "__main__":
    main()
