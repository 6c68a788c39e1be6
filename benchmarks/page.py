"""Speed of the chat page with a long conversation, in a real Chromium.

    python -m benchmarks.page [--messages 3000] [--seconds 8] [--repeats 3]

Measures opening (from the click in the sidebar until the last message is visible, and until all are drawn), typing
(from a key until the frame that shows its letter), and frames while an answer is written. Compares with an empty
conversation. Then loads the page on a slow line (150 ms latency, 1.6 Mbit/s), for the first time and again. The server
runs in its own process with a backend that writes at a steady speed, so no model affects the figures. There is no peer,
since no other page can open these conversations.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, expect

from benchmarks.frame import Rows, Sample, Spread, parse, parser, report
from qwen35mm.chat.store.records import Conversation, Node
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tree import Tree
from qwen35mm.contract import Event, Finished, GenerationRequest, TextDelta
from tests.chat.fake_backend import MARKDOWN, FakeBackend, make_result
from tests.web.browser import ChatPage, open_browser

_OWNER = "local"
_WORDS_A_SECOND = 100
_KEYS = "the quick brown fox jumps over the lazy dog and goes on "

# Milliseconds from the click until the last message is visible, and until there are `count` messages.
_OPEN = """([count, title]) => new Promise((resolve) => {
    const began = performance.now();
    let seen = null;
    const look = () => {
        const rows = document.querySelectorAll('.message');
        const last = rows[rows.length - 1];
        if (seen === null && rows.length && last.getBoundingClientRect().top < innerHeight)
            seen = performance.now() - began;
        if (seen === null || rows.length < count) return requestAnimationFrame(look);
        resolve({ seen, all: performance.now() - began });
    };
    [...document.querySelectorAll('.chat a')].find((each) => each.textContent.includes(title)).click();
    requestAnimationFrame(look);
})"""
# Milliseconds between the frames of `ms` milliseconds.
_FRAMES = """(ms) => new Promise((resolve) => {
    const times = [];
    const look = (now) => {
        times.push(now);
        if (now - times[0] < ms) return requestAnimationFrame(look);
        resolve(times.slice(1).map((time, at) => time - times[at]));
    };
    requestAnimationFrame(look);
})"""
# Collects milliseconds from each key until its change is painted: the task after the next frame.
_KEY_TIMES = """() => {
    window.keyTimes = [];
    document.querySelector('.composer textarea').addEventListener('keydown', ({ timeStamp }) =>
        requestAnimationFrame(() => setTimeout(() => window.keyTimes.push(performance.now() - timeStamp))));
}"""
# A phone's line: 150 ms latency, 1.6 Mbit/s down and 0.75 Mbit/s up.
_SLOW_LINE = {"offline": False, "latency": 150, "downloadThroughput": 200_000, "uploadThroughput": 93_750}
# Notes when a person could type, in milliseconds since the page was asked for.
_NOTE_USABLE = """new MutationObserver((_, observer) => {
    if (!document.querySelector('.composer textarea')) return;
    window.usableMs = performance.now();
    observer.disconnect();
}).observe(document, { childList: true, subtree: true })"""


class EssayBackend(FakeBackend):
    """Answers "essay" with endless Markdown at a steady speed."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The essay, or the fake backend's answer."""
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
    """Stores a conversation of questions, and answers with code, a table and a formula."""
    nodes: list[Node] = []
    now_s = time.time()
    for number in range(num_messages):
        text = f"Message {number}. " + (MARKDOWN if number % 2 else "What is that? " * 20)
        role = "assistant" if number % 2 else "user"
        nodes.append(Node(new_id(), nodes[-1].id if nodes else None, role, now_s + number / 1000, text=text))
    head = nodes[-1].id if nodes else None
    store.insert(_OWNER, [(Conversation(new_id(), title, now_s, now_s, head=head), Tree(nodes))])


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Runs the page over a data folder: its address, and the server's process."""
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
    """The server's process: prints its address and ends when its input ends."""
    from qwen35mm.web import serve

    server = serve(EssayBackend(context_length=10**7), port=0, data_dir=folder)
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


def opening(page: ChatPage, title: str, num_messages: int, repeats: int) -> Sample:
    """Opens the conversation repeatedly, each time in a page that hasn't drawn it before."""
    found = []
    for _ in range(repeats):
        page.new_chat()
        page.page.reload()
        expect(page.titles.filter(has_text=title)).to_be_visible()
        found.append(page.page.evaluate(_OPEN, [num_messages, title]))
    parts = {"seen": "the end is seen", "all": "all is drawn"}
    return {f"opening, ms: {text}": Spread.of(each[name] for each in found) for name, text in parts.items()}


def typing(page: ChatPage) -> Sample:
    """Milliseconds for each key."""
    page.box.click()
    page.page.evaluate(_KEY_TIMES)
    page.page.keyboard.type(_KEYS, delay=60)
    page.page.wait_for_function(f"window.keyTimes.length === {len(_KEYS)}")
    times = Spread.of(page.page.evaluate("window.keyTimes"))
    page.box.fill("")
    return {"a key, ms": times}


def writing(page: ChatPage, server: psutil.Process, seconds: float) -> Sample:
    """Frames while an answer is written, and the server's share of a core."""
    page.ask("essay")
    expect(page.answers.last.locator(".block").nth(3)).to_be_visible()
    used = server.cpu_times()
    gaps = page.page.evaluate(_FRAMES, 1000 * seconds)
    now = server.cpu_times()
    page.stop_button.click()
    expect(page.stop_button).to_be_hidden()
    frames = {"frames/s while writing": 1000 * len(gaps) / sum(gaps), "a frame, ms": Spread.of(gaps)}
    cores = (now.user + now.system - used.user - used.system) / seconds
    return frames | {"frames over 50 ms": sum(gap > 50 for gap in gaps), "the server's cores": cores}


def loading(browser: Browser, address: str, repeats: int) -> Rows:
    """What a first and a second visit on a slow line take."""
    visits: dict[str, list[dict[str, float]]] = {"first visit": [], "second visit": []}
    ended: list[dict[str, Any]] = []
    for _ in range(repeats):
        with contextlib.closing(browser.new_context()) as context:
            context.add_init_script(_NOTE_USABLE)
            page = context.new_page()
            line = context.new_cdp_session(page)
            line.send("Network.enable")
            line.send("Network.emulateNetworkConditions", _SLOW_LINE)
            line.on("Network.loadingFinished", lambda event: ended.append(event))
            for url, visit in zip((address, address.partition("t/")[0]), visits.values(), strict=True):
                ended.clear()
                page.goto(url, wait_until="networkidle")
                paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                visit.append(
                    {
                        "first paint, ms": page.evaluate(paint),
                        "usable, ms": page.evaluate("window.usableMs"),
                        "requests": len(ended),
                        "KiB": sum(each["encodedDataLength"] for each in ended) / 1024,
                    }
                )
    return [
        {"": what, **{name: Spread.of(each[what] for each in visit) for name, visit in visits.items()}}
        for what in visits["first visit"][0]
    ]


def main() -> None:
    options = parser(__doc__, model=False)
    options.add_argument("--messages", type=int, default=3000, help="of the long conversation")
    options.add_argument("--seconds", type=float, default=8.0, help="of writing")
    options.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parse(options)
    if (data := vars(arguments).pop("serve")) is not None:
        return serve_until_the_end(data)
    measured: dict[str, Sample] = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"empty": 2, "long": arguments.messages}
        with contextlib.closing(ConversationStore(Path(folder))) as store:
            for title, num_messages in sizes.items():
                keep_a_long_one(store, f"{title} one", num_messages)
        with served(Path(folder)) as (address, server), open_browser() as browser:
            for title, num_messages in sizes.items():
                page = ChatPage(browser, address)
                found = opening(page, f"{title} one", num_messages, arguments.repeats)
                measured[f"{num_messages} messages"] = found | typing(page) | writing(page, server, arguments.seconds)
                page.close()
            slow = loading(browser, address, arguments.repeats)
            version = f"Chromium {browser.version}"
    short, *_ = measured.values()
    rows = [{"": what, **{size: found[what] for size, found in measured.items()}} for what in short]
    return report("page", arguments, {"The page": rows, "A slow line": slow}, browser=version)


if __name__ == "__main__":
    main()
