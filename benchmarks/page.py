"""How the chat page feels and what it takes when conversations are long, in a real Chromium.

    python -m benchmarks.page [--messages 3000] [--turns 100] [--pictures 50] [--seconds 8] [--repeats 3]

The server runs in a process of its own on a backend that writes an essay at a steady speed, so that nothing of a model
is in the figures. Beside the long conversation stands an empty one, measured in the same way: what differs is the
length. No other page is measured: none could be opened on these conversations.

opening    from the click in the sidebar until the last message is seen, and until all are drawn
writing    frames while an answer is written below the conversation
typing     from a key until the frame that shows its letter
memory     of page and server, before and after so many questions with answers, some with a picture each
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from playwright.sync_api import Browser, FilePayload, expect

from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from qwen35mm.chat.records import Conversation, Node
from qwen35mm.chat.store import ConversationStore, new_id
from qwen35mm.chat.tree import Tree
from qwen35mm.contract import Event, Finished, GenerationRequest, TextDelta
from tests.chat.fake_backend import MARKDOWN, FakeBackend, make_result
from tests.web.browser import ChatPage, open_browser

_OWNER = "local"
_WORDS_A_SECOND = 100
_KEYS = "the quick brown fox jumps over the lazy dog and goes on "
_PICTURE_SIZE = (1280, 960)
_MIB = 2**20
_PAUSE_MS = 2000

# Milliseconds from the click until the last message is in sight, and until there are `count` of them.
_OPEN = """([count, title]) => new Promise((resolve) => {
    const began = performance.now();
    performance.clearResourceTimings();
    let seen = null;
    const look = () => {
        const rows = document.querySelectorAll('.message');
        const last = rows[rows.length - 1];
        if (seen === null && rows.length && last.getBoundingClientRect().top < innerHeight)
            seen = performance.now() - began;
        if (seen === null || rows.length < count) return requestAnimationFrame(look);
        const asked = performance.getEntriesByType('resource').find(({ name }) => name.endsWith('/api/open'));
        resolve({ seen, all: performance.now() - began, bytes: asked.decodedBodySize, request: asked.duration });
    };
    [...document.querySelectorAll('.chat a')].find((each) => each.textContent.includes(title)).click();
    requestAnimationFrame(look);
})"""
# Milliseconds between frames for so long.
_FRAMES = """(ms) => new Promise((resolve) => {
    const times = [];
    const look = (now) => {
        times.push(now);
        if (now - times[0] < ms) return requestAnimationFrame(look);
        resolve(times.slice(1).map((time, at) => time - times[at]));
    };
    requestAnimationFrame(look);
})"""
# Collects milliseconds from each key until what it changed is painted: the task behind the next frame.
_KEY_TIMES = """() => {
    window.keyTimes = [];
    document.querySelector('.composer textarea').addEventListener('keydown', ({ timeStamp }) =>
        requestAnimationFrame(() => setTimeout(() => window.keyTimes.push(performance.now() - timeStamp))));
}"""


class EssayBackend(FakeBackend):
    """Answers "essay" with Markdown without an end, at a steady speed."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The essay, or what the fake answers."""
        if request.messages[-1].text != "essay":
            async for event in super().stream(request):
                yield event
            return
        began, count = time.monotonic(), 0
        while count < 100_000:
            for word in f"{MARKDOWN}\n\n".split(" "):
                yield TextDelta(f"{word} ")
                count += 1
                await asyncio.sleep(max(began + count / _WORDS_A_SECOND - time.monotonic(), 0))
        yield Finished(make_result(""))


def keep_a_long_one(store: ConversationStore, title: str, num_messages: int) -> None:
    """A conversation of questions, and answers with code, a table and a formula."""
    nodes: list[Node] = []
    now_s = time.time()
    for number in range(num_messages):
        text = f"Message {number}. " + (MARKDOWN if number % 2 else "What is that? " * 20)
        role = "assistant" if number % 2 else "user"
        nodes.append(Node(new_id(), nodes[-1].id if nodes else None, role, now_s + number / 1000, text=text))
    head = nodes[-1].id if nodes else None
    store.insert(_OWNER, [(Conversation(new_id(), title, now_s, now_s, head=head), Tree(nodes))])


def pictures(number: int) -> list[FilePayload]:
    """Files of so many photo-like pictures, each another one, as Playwright takes them."""
    random = np.random.default_rng(0)
    files = []
    for each in range(number):
        coarse = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        data = io.BytesIO()
        Image.fromarray(coarse).resize(_PICTURE_SIZE, Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
        files.append({"name": f"photo {each}.jpg", "mimeType": "image/jpeg", "buffer": data.getvalue()})
    return files


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The page over a data folder: its address, and the server's process."""
    command = [sys.executable, "-m", "benchmarks.page", "--serve", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "the server didn't start"
        yield address, psutil.Process(process.pid)
    finally:
        process.stdin.close()
        process.wait()


def serve_until_the_end(folder: Path) -> None:
    """The server's own process: prints its address, and ends with its input."""
    from qwen35mm.web import serve

    server = serve(EssayBackend(context_length=10**7), port=0, data_dir=folder)
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


def opening(page: ChatPage, title: str, num_messages: int, repeats: int) -> dict[str, Any]:
    """Each time in a page that has drawn nothing of it before."""
    found = []
    for _ in range(repeats):
        page.new_chat()
        page.page.reload()
        expect(page.titles.filter(has_text=title)).to_be_visible()
        found.append(page.page.evaluate(_OPEN, [num_messages, title]))
    spreads = {name: Spread.of([each[name] for each in found]) for name in ("request", "seen", "all")}
    return {**spreads, "bytes": found[0]["bytes"]}


def writing(page: ChatPage, server: psutil.Process, seconds: float) -> dict[str, Any]:
    """Frames while an answer is written, and the server's share of a core meanwhile."""
    page.ask("essay")
    expect(page.answers.last.locator(".block").nth(3)).to_be_visible()
    used = server.cpu_times()
    gaps = page.page.evaluate(_FRAMES, 1000 * seconds)
    now = server.cpu_times()
    page.stop_button.click()
    expect(page.stop_button).to_be_hidden()
    return {
        "frames_per_s": 1000 * len(gaps) / sum(gaps),
        "p99_ms": float(np.percentile(gaps, 99)),
        "longest_ms": max(gaps),
        "num_over_50_ms": sum(gap > 50 for gap in gaps),
        "server_cores": (now.user + now.system - used.user - used.system) / seconds,
    }


def typing(page: ChatPage) -> dict[str, Any]:
    """Milliseconds a key, and what is sent and received for all of them."""
    sent: list[int] = []
    page.page.on("request", lambda request: sent.append(len(request.post_data or "")))
    page.box.click()
    page.page.evaluate(_KEY_TIMES)
    page.page.keyboard.type(_KEYS, delay=60)
    page.page.wait_for_function(f"window.keyTimes.length === {len(_KEYS)}")
    times = page.page.evaluate("window.keyTimes")
    # What it costs is asked for when nothing is typed for a moment.
    page.page.wait_for_timeout(_PAUSE_MS)
    page.box.fill("")
    return {
        "median_ms": float(np.median(times)),
        "p95_ms": float(np.percentile(times, 95)),
        "longest_ms": max(times),
        "num_requests": len(sent),
        "sent_bytes": sum(sent),
    }


def memory(browser: Browser, address: str, server: psutil.Process, turns: int, num_pictures: int) -> dict[str, Any]:
    """MiB, before and after so many turns; every picture has been in sight."""
    page = ChatPage(browser, address, viewport={"width": 1200, "height": 850})
    page.ask("echo begin")
    page.wait_answered()
    before = _memory(page, server)
    files = pictures(num_pictures)
    for turn in range(turns):
        if turn < num_pictures:
            page.page.locator(".composer input[type=file]").first.set_input_files([files[turn]])
            expect(page.thumbnails.locator(".label")).to_contain_text("tokens")
        page.ask(f"echo answer {turn} with some words in it, " + "and more " * 20)
        expect(page.thumbnails).to_have_count(0)
        page.wait_answered(turn + 2)
    for picture in page.questions.locator("img").all():
        picture.scroll_into_view_if_needed()
    page.page.wait_for_function("() => [...document.querySelectorAll('.files img')].every((image) => image.complete)")
    after = _memory(page, server)
    page.close()
    return {"before": before, "after": after}


def _memory(page: ChatPage, server: psutil.Process) -> dict[str, float]:
    """MiB of what the page's scripts and elements hold, of its process alone, and of the server's."""
    session = page.context.new_cdp_session(page.page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    renderers = [
        child.memory_full_info().uss
        for child in psutil.Process().children(recursive=True)
        if "--type=renderer" in " ".join(child.cmdline())
    ]
    # The page's is the largest: others wait for pages to come.
    return {
        "heap": metrics["JSHeapUsedSize"] / _MIB,
        "elements": metrics["Nodes"],
        "page": max(renderers) / _MIB,
        "server": server.memory_full_info().uss / _MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=3000, help="of the long conversation")
    parser.add_argument("--turns", type=int, default=100, help="questions before memory is looked at")
    parser.add_argument("--pictures", type=int, default=50, help="of these, so many with one")
    parser.add_argument("--seconds", type=float, default=8.0, help="of writing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (folder := vars(options).pop("serve")) is not None:
        return serve_until_the_end(folder)
    titles = {"empty": 2, "long": options.messages}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(ConversationStore(Path(folder))) as store:
            for title, num_messages in titles.items():
                keep_a_long_one(store, f"{title} one", num_messages)
        with served(Path(folder)) as (address, server), open_browser() as browser:
            version = browser.version
            results["memory"] = memory(browser, address, server, options.turns, options.pictures)
            for title, num_messages in titles.items():
                page = ChatPage(browser, address)
                results[title] = {
                    "opening": opening(page, f"{title} one", num_messages, options.repeats),
                    "typing": typing(page),
                    "writing": writing(page, server, options.seconds),
                }
                page.close()
    info = {**machine(), "chromium": version}
    print_machine(info)
    _print(results, options)
    print_json("page", options, machine=info, results=results)
    return None


def _print(results: dict[str, Any], options: argparse.Namespace) -> None:
    names = ("empty", "long")
    opened, typed, written = ([results[name][part] for name in names] for part in ("opening", "typing", "writing"))
    rows = [
        ("opening: the request, ms", *(each["request"].text(0) for each in opened)),
        ("opening: its answer, KiB", *(f"{each['bytes'] / 1024:,.0f}" for each in opened)),
        ("opening: the end is seen, ms", *(each["seen"].text(0) for each in opened)),
        ("opening: all is drawn, ms", *(each["all"].text(0) for each in opened)),
        ("a key, ms: median, p95, longest", *(_three(each, "median_ms", "p95_ms") for each in typed)),
        ("requests and bytes while typing", *(f"{each['num_requests']}, {each['sent_bytes']:,}" for each in typed)),
        ("frames a second while writing", *(f"{each['frames_per_s']:.1f}" for each in written)),
        ("frames, ms: p99, longest", *(f"{each['p99_ms']:.0f}, {each['longest_ms']:.0f}" for each in written)),
        ("frames over 50 ms", *(str(each["num_over_50_ms"]) for each in written)),
        ("the server's cores while writing", *(f"{each['server_cores']:.2f}" for each in written)),
    ]
    print_table(("", "2 messages", f"{options.messages:,} messages"), rows)
    before, after = results["memory"]["before"], results["memory"]["after"]
    words = f"{2 * options.turns:,} messages, {options.pictures} pictures"
    kinds = {"page": "the page's process, MiB", "heap": "its scripts' heap, MiB", "server": "the server, MiB"}
    print_table(
        ("", "at first", words), [(label, f"{before[kind]:.0f}", f"{after[kind]:.0f}") for kind, label in kinds.items()]
    )


def _three(values: dict[str, float], *names: str) -> str:
    return ", ".join(f"{values[name]:.0f}" for name in (*names, "longest_ms"))


if __name__ == "__main__":
    main()
