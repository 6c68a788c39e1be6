"""A front under mixed use for a long time: whether it takes more and more memory, files, threads or processes.

    python -m benchmarks.soak [--minutes 30] [--front chat] [--clients 8]

`qwen35mm serve`, `chat` or `review` runs on the bundled model, in a process of its own. Clients ask it all the while,
each one thing after the other, in an order by chance: what the page asks, completions streamed and not, responses and
messages, media, things that are refused, wrong tokens; and now and then one hangs up in the middle. What a client made
it deletes again. Every few seconds it is looked at from outside: resident memory with that of its children, open files,
threads, children, and files in its folder for temporary ones.

Behind a warm-up, in which caches fill, the memory's growth is the slope of a line through the samples, with the range
that it lies in by 95 %. It "grows" where all of that range is above --most; where it reaches from below to far above,
the time was too short to tell. Files, threads, processes and temporary files must be as many in the last third as in
the first. The program's end is a failure where something grows, or an answer was a 5xx.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import machine, print_json, print_machine, print_table
from qwen35mm.assets import asset_path
from tests.security.fronts import NAMES, Front, started

_MIB = 2**20
_TIMEOUT_S = 300.0
_PAGE = "/qwen35mm"
# Each of these may be so many more in the last third: connections that are just open, threads that are just
# asked, decoders that wait for media.
_MORE = {"files": 8.0, "threads": 4.0, "children": 4.0, "temporary": 2.0}
# Less than that may be one buffer.
_SEEN_MIB = 4.0
_SAID = [{"role": "user", "content": "How many shapes are there, and which?"}]
_TINY = {"max_tokens": 8, "messages": _SAID}


@dataclass(frozen=True)
class Sample:
    """A front at one moment; `requests` were answered before."""

    time_s: float
    rss_mib: float
    files: int
    threads: int
    children: int
    temporary: int
    requests: int


@dataclass(frozen=True)
class Growth:
    """A slope, and half of the range that it lies in by 95 %."""

    per_hour: float
    plus_minus: float

    @property
    def text(self) -> str:
        return f"{self.per_hour:+.1f} +- {self.plus_minus:.1f}"


class Client:
    """One that asks for one thing after the other; `answers` counts them by what was done and the status."""

    def __init__(self, front: Front, chance: random.Random, answers: Counter[str], waits: list[float]) -> None:
        self.front = front
        self.chance = chance
        self.answers = answers
        self.waits = waits
        self.http = httpx.AsyncClient(base_url=front.address, headers=front.headers, timeout=_TIMEOUT_S)
        self.pictures = sorted(asset_path("samples").glob("*.jpg"))

    async def run(self, until_s: float) -> None:
        """Goes on until then."""
        actions = {"serve": self._programs(), "chat": [*self._page(), *self._programs()], "review": self._review()}
        async with self.http:
            while time.monotonic() < until_s:
                name, act = self.chance.choice([*actions[self.front.name], *self._strangers()])
                began_s = time.monotonic()
                hangs_up = self.chance.random() < 0.1
                patience_s = min(self.chance.random() if hangs_up else _TIMEOUT_S, until_s - began_s)
                try:
                    # Anything that is begun may be left in its middle.
                    await asyncio.wait_for(act(), patience_s)
                    self.waits.append(time.monotonic() - began_s)
                except asyncio.TimeoutError:
                    self.answers[f"{name}: {'hung up' if patience_s < _TIMEOUT_S else 'no answer'}"] += 1

    async def ask(self, name: str, method: str, path: str, **how: Any) -> httpx.Response:
        """One request, read to its end."""
        answer = await self.http.request(method, path, **how)
        self.answers[f"{name}: {answer.status_code}"] += 1
        return answer

    def _programs(self) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        picture = base64.b64encode(self.chance.choice(self.pictures).read_bytes()).decode()
        shown = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}}
        looked = {**_TINY, "messages": [{"role": "user", "content": [shown]}]}
        chat, stream = "/v1/chat/completions", {"stream": True}
        return [
            ("completion", lambda: self.ask("completion", "POST", chat, json=_TINY)),
            ("streamed", lambda: self.ask("streamed", "POST", chat, json={**_TINY, **stream, "max_tokens": 64})),
            ("picture", lambda: self.ask("picture", "POST", chat, json={**looked, **stream})),
            ("messages", lambda: self.ask("messages", "POST", "/v1/messages", json={**_TINY, "model": "default"})),
            ("models", lambda: self.ask("models", "GET", "/v1/models")),
            ("response", self._respond),
            ("refused", lambda: self.ask("refused", "POST", chat, json={**_TINY, "max_tokens": "many"})),
        ]

    async def _respond(self) -> None:
        body = {"input": "Hello", "max_output_tokens": 8, "stream": self.chance.random() < 0.5}
        answer = await self.ask("response", "POST", "/v1/responses", json=body)
        if answer.status_code == 200 and not body["stream"]:
            kept = answer.json()["id"]
            await self.ask("response", "POST", "/v1/responses", json={**body, "previous_response_id": kept})
            await self.ask("response", "DELETE", f"/v1/responses/{kept}")

    def _page(self) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        return [
            ("start", lambda: self.call("start")),
            ("list", lambda: self.call("list", query="shapes")),
            ("chat", self._chat),
            ("chat", self._chat),
            ("script", lambda: self.ask("script", "GET", f"{_PAGE}/web/main.js")),
            ("no such chat", lambda: self.call("open", conversation="a" * 32)),
            ("wrong body", lambda: self.ask("wrong body", "POST", f"{_PAGE}/api/send", content=b"{" * 1000)),
        ]

    async def call(self, name: str, **arguments: Any) -> httpx.Response:
        """One of the page's requests."""
        return await self.ask(name, "POST", f"{_PAGE}/api/{name}", json=arguments)

    async def _chat(self) -> None:
        """A question about a picture, its answer, another question, an export, and the end of all of it."""
        file = self.chance.choice(self.pictures)
        sent = await self.ask("upload", "POST", f"{_PAGE}/upload?name={file.name}", content=file.read_bytes())
        found = sent.json()["attachments"][0]
        attached = [{"digest": found["digest"], "kind": "image", "name": file.name}]
        settings = {"max_tokens": 16, "thinking": False}
        question: dict[str, Any] = {"text": "What is there?", "attachments": attached, "settings": settings}
        await self.call("measure", **question)
        begun = await self.call("send", **question)
        if begun.status_code != 200:
            # A person has so many answers in progress at one time.
            await asyncio.sleep(1.0)
            return
        chat = begun.json()["chat"]["id"]
        try:
            last = await self._answered(chat)
            await self.ask("thumbnail", "GET", f"{_PAGE}/thumbnail/{found['digest']}")
            await self.call("send", conversation=chat, parent=last, text="And now?", settings=settings)
            await self._answered(chat)
            code = (await self.call("download")).json()["code"]
            await self.ask("export", "GET", f"{_PAGE}/export?ids={chat}&code={code}")
        finally:
            # Also where it is left in the middle.
            await asyncio.shield(asyncio.ensure_future(self.call("delete", conversation=chat)))

    async def _answered(self, chat: str) -> str:
        """Waits until nothing of a chat is being written; its last message."""
        while True:
            shown = (await self.http.post(f"{_PAGE}/api/start", json={})).json()
            messages = (await self.http.post(f"{_PAGE}/api/open", json={"conversation": chat})).json()["messages"]
            if messages[-1]["id"] not in shown["running"]:
                return messages[-1]["id"]
            await asyncio.sleep(0.1)

    def _review(self) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        return [
            ("look", lambda: self.ask("look", "POST", "/api/look", json={})),
            ("find", lambda: self.ask("find", "POST", "/api/find", json={"words": "a"})),
            ("media", lambda: self.ask("media", "GET", f"/media/{self.chance.randrange(2)}")),
            ("small", lambda: self.ask("small", "GET", f"/small/{self.chance.randrange(2)}")),
            ("save", self._save),
            ("undo", lambda: self.ask("undo", "POST", "/api/undo", json={})),
        ]

    async def _save(self) -> None:
        look = await self.ask("look", "POST", "/api/look", json={})
        numbers = look.json()["numbers"][:1]
        items = (await self.ask("items", "POST", "/api/items", json={"numbers": numbers})).json()["items"]
        body = {"number": numbers[0], "digest": items[0]["digest"], "text": f"Caption {self.chance.random()}."}
        await self.ask("save", "POST", "/api/save", json=body)

    def _strangers(self) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        wrong = {"authorization": "Bearer wrong", "cookie": f"qwen35mm-token-{self.front.port}=wrong"}
        path = {"serve": "/v1/models", "chat": f"{_PAGE}/api/start", "review": "/api/look"}[self.front.name]
        return [
            ("wrong token", lambda: self.ask("wrong token", "POST", path, json={}, headers=wrong)),
            ("not there", lambda: self.ask("not there", "GET", "/nothing/at/all")),
            ("broken", self._break),
        ]

    async def _break(self) -> None:
        """Half a request, on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.front.port)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            writer.write(self.chance.choice([b"GET / HT", b"\0\0\0", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]))
            await asyncio.wait_for(reader.read(1000), self.chance.random())
        writer.close()
        self.answers["broken: sent"] += 1


async def watch(front: Front, answers: Counter[str], every_s: float, until_s: float) -> list[Sample]:
    """Looks at it again and again."""
    process, samples = psutil.Process(front.process.pid), []
    began_s = time.monotonic()
    while time.monotonic() < until_s:
        samples.append(
            Sample(
                time.monotonic() - began_s,
                front.rss() / _MIB,
                process.num_fds(),
                process.num_threads(),
                len(process.children(recursive=True)),
                sum(1 for each in (front.folder / "tmp").rglob("*") if each.is_file()),
                sum(answers.values()),
            )
        )
        await asyncio.sleep(every_s)
    return samples


def growth(samples: Sequence[tuple[float, float]]) -> Growth:
    """The slope of values over seconds, by the hour, by least squares."""
    times, values = zip(*samples, strict=True)
    slope, begin = statistics.linear_regression(times, values)
    squares = sum((value - begin - slope * at) ** 2 for at, value in samples)
    middle = statistics.fmean(times)
    spread = sum((at - middle) ** 2 for at in times)
    freedom = len(samples) - 2
    error = math.sqrt(squares / freedom / spread) if freedom > 0 else math.inf
    # Of Student's t for ten samples and more: 2.3, and 2 for many.
    return Growth(3600 * slope, 3600 * error * (1.96 + 2.5 / max(freedom, 1)))


def judge(samples: Sequence[Sample], warm_up_s: float, most_mib: float) -> dict[str, str]:
    """What each of the numbers did behind the warm-up: "constant", "grows", or "too short"."""
    told: dict[str, str] = {}
    rest = [each for each in samples if each.time_s >= warm_up_s]
    if len(rest) < 6:
        return dict.fromkeys(("rss", *_MORE), "too short")
    found = growth([(each.time_s, each.rss_mib) for each in rest])
    low, high = found.per_hour - found.plus_minus, found.per_hour + found.plus_minus
    # Of a few seconds, the smallest step is many MiB an hour.
    seen_mib = found.per_hour * (rest[-1].time_s - rest[0].time_s) / 3600
    is_growth = low > most_mib and seen_mib > _SEEN_MIB
    told["rss"] = "grows" if is_growth else "constant" if high <= most_mib else "too short"
    third = len(rest) // 3
    for name, more in _MORE.items():
        first, last = (
            statistics.median(getattr(each, name) for each in part) for part in (rest[:third], rest[-third:])
        )
        told[name] = "grows" if last - first > more else "constant"
    return told


async def soak(front: Front, options: argparse.Namespace) -> tuple[list[Sample], Counter[str], list[float]]:
    """Samples, answers by what was asked, and how long each took."""
    answers: Counter[str] = Counter()
    waits: list[float] = []
    until_s = time.monotonic() + 60 * options.minutes
    clients = [
        Client(front, random.Random(f"{options.seed} {each}"), answers, waits) for each in range(options.clients)
    ]
    watching = asyncio.ensure_future(watch(front, answers, options.every, until_s))
    await asyncio.gather(watching, *(client.run(until_s) for client in clients))
    samples = watching.result()
    return samples, answers, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", choices=NAMES, default="chat")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, help="minutes; a third of them without it, at most 5")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--most", type=float, default=30.0, help="MiB an hour that are no growth")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.warm_up is None:
        options.warm_up = min(5.0, options.minutes / 3)
    with tempfile.TemporaryDirectory() as folder, started(options.front, Path(folder)) as front:
        samples, answers, waits = asyncio.run(soak(front, options))
        front.check()
    told = judge(samples, 60 * options.warm_up, options.most)
    rest = [(each.time_s, each.rss_mib) for each in samples if each.time_s >= 60 * options.warm_up]
    rss = growth(rest) if len(rest) >= 3 else None
    errors = {name: number for name, number in answers.items() if name.endswith("no answer") or ": 5" in name}
    info = machine()
    print_machine(info)
    rows = [
        (
            f"{each.time_s / 60:.1f}",
            f"{each.rss_mib:.0f}",
            *(each.files, each.threads, each.children, each.temporary, f"{each.requests:,}"),
        )
        for each in samples
    ]
    print_table(("minute", "RSS, MiB", "files", "threads", "children", "temporary", "answers"), rows)
    print_table(("asked, and answered", "times"), sorted(answers.items()))
    if rss is not None:
        print(f"RSS behind {options.warm_up:.1f} minutes: {rss.text} MiB an hour")
    print(", ".join(f"{name}: {verdict}" for name, verdict in told.items()))
    print_json(
        "soak",
        options,
        machine=info,
        verdict=told,
        rss_per_hour=None if rss is None else asdict(rss),
        answers=dict(answers),
        errors=errors,
        longest_s=max(waits, default=0.0),
        samples=[asdict(each) for each in samples],
    )
    if errors or "grows" in told.values():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
