"""How long each surface takes from its command to an answer's first token, and where the time goes.

    python -m benchmarks.startup [--model DIR] [--surfaces ask,caption,serve,chat] [--repeats 3]

Starts the command in a process of its own each time. `ask` is asked for text, and its first word counts; `caption` gets
one small picture and one token, and the caption's file counts; `serve` is asked over HTTP, and its first word counts;
`chat` is opened in a headless Chromium that runs already, and the first word of its answer to a typed question counts.
A first round, not counted, compiles Python's files and has the system read the weights from the disk.
"""

from __future__ import annotations

import argparse
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

from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from qwen35mm.assets import asset_path, demo_model_path
from tests.web.browser import FLAGS, find_chromium

_QUESTION = "Which shapes are there?"
# A start that has said nothing by then has gone wrong.
_PATIENCE_S = 300.0
_POLL_S = 0.005
_IMPORTS = (
    "torch",
    "gradio",
    "av",
    "numpy",
    "PIL",
    "typer",
    "qwen35mm.backends.local",
    "qwen35mm.prompt",
    "qwen35mm.web",
)

Times = dict[str, float]


def ask(model: str, folder: Path) -> Times:
    """Seconds from the command to the answer's first word, and to its end after four tokens."""
    with _started(folder, "ask", _QUESTION, "--no-think", "--max-tokens", "4", "--model", model) as (process, began):
        assert process.stdout is not None
        assert process.stdout.read(1), "no answer was printed"
        times = {"first token": time.perf_counter() - began}
        process.wait()
        return times | {"the command's end": time.perf_counter() - began}


def caption(model: str, folder: Path) -> Times:
    """Seconds from the command to the caption, of one token, of a picture."""
    shutil.copy(asset_path("samples") / "one-shape.png", folder / "picture.png")
    limits = ("--max-tokens", "1", "--keep-unfinished", "--attempts", "1", "--preset", "plain", "--model", model)
    with _started(folder, "caption", "picture.png", *limits) as (process, began):
        while not (folder / "picture.txt").exists():
            assert process.poll() is None, "no caption was written"
            assert time.perf_counter() - began < _PATIENCE_S, "no caption was written"
            time.sleep(_POLL_S)
        times = {"first token": time.perf_counter() - began}
        process.wait()
        return times | {"the command's end": time.perf_counter() - began}


def serve(model: str, folder: Path) -> Times:
    """Seconds from the command to its address, to an answer to `/ready`, and to the first word of a reply."""
    with _started(folder, "serve", "--port", "0", "--model", model) as (process, began):
        address = _address(process)
        httpx.get(f"{address}/ready").raise_for_status()
        times = {"the server answers": time.perf_counter() - began}
        asked = {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 4, "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=asked, timeout=_PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    return times | {"first token": time.perf_counter() - began}
        raise AssertionError("no answer came")


def chat(browser: Browser, model: str, folder: Path) -> Times:
    """Seconds from the command to its address, to the page's box, and to the first word of an answer."""
    with _started(folder, "chat", "--port", "0", "--model", model) as (process, began):
        address = _address(process)
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
def _started(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A command that keeps everything in `folder`, and when it began."""
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


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    found = re.search(rb"(http://\S+?)(/v1)?\s", process.stdout.readline())
    assert found, "no address was printed"
    return found[1].decode()


def import_times() -> list[tuple[float, str]]:
    """Seconds that the heaviest imports of the page take, with what they import, as a command imports them."""
    code = (
        "from qwen35mm.cli.quick_imports import quick_imports\n"
        "with quick_imports():\n import qwen35mm.backends.local, qwen35mm.web"
    )
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    found = []
    for line in done.stderr.splitlines():
        parts = line.split("|")
        if len(parts) == 3 and parts[2].strip() in _IMPORTS and parts[1].strip().isdigit():
            found.append((int(parts[1]) / 1e6, parts[2].strip()))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="a checkpoint's folder; the bundled demo")
    parser.add_argument("--surfaces", default="ask,caption,serve,chat", help="which of ask, caption, serve and chat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = str(options.model.resolve())
    with contextlib.ExitStack() as stack:
        surfaces: dict[str, Callable[[Path], Times]] = {}
        commands = {"ask": ask, "caption": caption, "serve": serve}
        for name in options.surfaces.split(","):
            if name == "chat":
                playwright = stack.enter_context(sync_playwright())
                browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
                stack.callback(browser.close)
                surfaces[name] = lambda folder, browser=browser: chat(browser, model, folder)
            elif name in commands:
                surfaces[name] = lambda folder, measure=commands[name]: measure(model, folder)
            else:
                parser.error(f"--surfaces takes ask, caption, serve and chat, with commas between; got '{name}'.")
        rounds: dict[tuple[str, str], list[float]] = {}
        for number in range(options.repeats + 1):
            for name, measure in surfaces.items():
                with tempfile.TemporaryDirectory() as folder:
                    for what, seconds in measure(Path(folder)).items():
                        if number:
                            rounds.setdefault((name, what), []).append(seconds)
    results = [
        {"surface": name, "until": what, "seconds": Spread.of(seconds)} for (name, what), seconds in rounds.items()
    ]
    imports = import_times()
    info = machine()
    print_machine(info)
    rows = [(each["surface"], each["until"], each["seconds"].text(2)) for each in results]
    print_table(("surface", "until", "seconds from the command"), rows)
    print("imports, each with what it imports: " + ", ".join(f"{name} {s:.2f} s" for s, name in imports))
    print_json("startup", options, machine=info, results=results, imports={name: s for s, name in imports})


if __name__ == "__main__":
    main()
