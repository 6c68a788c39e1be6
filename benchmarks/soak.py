"""Runs a front under mixed use for a long time and checks that memory, files, threads and processes don't grow.

    python -m benchmarks.soak [--minutes 30] [--front chat] [--clients 8]

`qwen35mm serve`, `chat` or `review` runs with the bundled model. Clients use it in random order: requests of the page,
streamed and whole completions, pictures, refused requests, wrong tokens. One in ten hangs up in the middle. Clients
delete what they make. Every few seconds the front is sampled from outside: resident memory with its children, open
files, threads, children, and temporary files.

After a warm-up that fills caches, the slope of memory over time is estimated with its 95 % interval. Memory "grows" if
the whole interval is above --most; if only part of it is, the time was too short. Files, threads, processes and
temporary files must not be more in the last third than in the first. The command fails if something grows or an answer
was a 5xx.
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
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.frame import Rows, parse, parser, report
from qwen35mm.assets import asset_path
from tests.security.fronts import NAMES, Front, started

_MIB = 2**20
_TIMEOUT_S = 300.0
_PAGE = "/qwen35mm"
# How many more are fine in the last third: new connections, threads and decoders at work.
_MORE = {"files": 8.0, "threads": 4.0, "children": 4.0, "temporary": 2.0}
# Smaller growth may be a single buffer.
_SEEN_MIB = 4.0
_TINY = {"max_tokens": 8, "messages": [{"role": "user", "content": "How many shapes are there, and which?"}]}

Actions = list[tuple[str, Callable[[], Awaitable[object]]]]


class Client:
    """Sends requests one after the other. `answers` counts them by name and status."""

    def __init__(self, front: Front, chance: random.Random, answers: Counter[str]) -> None:
        self.front, self.chance, self.answers = front, chance, answers
        self.http = httpx.AsyncClient(base_url=front.address, headers=front.headers, timeout=_TIMEOUT_S)
        self.pictures = sorted(asset_path("samples").glob("*.jpg"))

    async def run(self, until_s: float) -> None:
        actions = {"serve": self._programs(), "chat": [*self._page(), *self._programs()], "review": self._review()}
        async with self.http:
            while (began_s := time.monotonic()) < until_s:
                name, act = self.chance.choice([*actions[self.front.name], *self._strangers()])
                hangs_up = self.chance.random() < 0.1
                patience_s = min(self.chance.random() if hangs_up else _TIMEOUT_S, until_s - began_s)
                try:
                    await asyncio.wait_for(act(), patience_s)
                except asyncio.TimeoutError:
                    self.answers[f"{name}: {'hung up' if patience_s < _TIMEOUT_S else 'no answer'}"] += 1

    async def ask(self, name: str, method: str, path: str, **how: Any) -> httpx.Response:
        """Sends one request and reads the answer to its end."""
        answer = await self.http.request(method, path, **how)
        self.answers[f"{name}: {answer.status_code}"] += 1
        return answer

    def _asks(self, name: str, method: str, path: str, **how: Any) -> Actions:
        return [(name, lambda: self.ask(name, method, path, **how))]

    def _programs(self) -> Actions:
        picture = base64.b64encode(self.chance.choice(self.pictures).read_bytes()).decode()
        shown = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}}
        looked = {**_TINY, "messages": [{"role": "user", "content": [shown]}]}
        chat, stream = "/v1/chat/completions", {"stream": True}
        return [
            *self._asks("completion", "POST", chat, json=_TINY),
            *self._asks("streamed", "POST", chat, json={**_TINY, **stream, "max_tokens": 64}),
            *self._asks("picture", "POST", chat, json={**looked, **stream}),
            *self._asks("messages", "POST", "/v1/messages", json={**_TINY, "model": "default"}),
            *self._asks("models", "GET", "/v1/models"),
            ("response", self._respond),
            *self._asks("refused", "POST", chat, json={**_TINY, "max_tokens": "many"}),
        ]

    async def _respond(self) -> None:
        body = {"input": "Hello", "max_output_tokens": 8, "stream": self.chance.random() < 0.5}
        answer = await self.ask("response", "POST", "/v1/responses", json=body)
        if answer.status_code == 200 and not body["stream"]:
            kept = answer.json()["id"]
            await self.ask("response", "POST", "/v1/responses", json={**body, "previous_response_id": kept})
            await self.ask("response", "DELETE", f"/v1/responses/{kept}")

    def _page(self) -> Actions:
        api = f"{_PAGE}/api"
        return [
            *self._asks("start", "POST", f"{api}/start", json={}),
            *self._asks("list", "POST", f"{api}/list", json={"query": "shapes"}),
            ("chat", self._chat),
            ("chat", self._chat),
            *self._asks("script", "GET", f"{_PAGE}/web/main.js"),
            *self._asks("no such chat", "POST", f"{api}/open", json={"conversation": "a" * 32}),
            *self._asks("wrong body", "POST", f"{api}/send", content=b"{" * 1000),
        ]

    async def call(self, name: str, **arguments: Any) -> httpx.Response:
        """Sends one of the page's requests."""
        return await self.ask(name, "POST", f"{_PAGE}/api/{name}", json=arguments)

    async def _chat(self) -> None:
        """A question about a picture, another question, an export; deletes the chat."""
        file = self.chance.choice(self.pictures)
        sent = await self.ask("upload", "POST", f"{_PAGE}/upload?name={file.name}", content=file.read_bytes())
        digest, settings = sent.json()["attachments"][0]["digest"], {"max_tokens": 16, "thinking": False}
        attached = [{"digest": digest, "kind": "image", "name": file.name}]
        question: dict[str, Any] = {"text": "What is there?", "attachments": attached, "settings": settings}
        await self.call("measure", **question)
        begun = await self.call("send", **question)
        if begun.status_code != 200:
            # A person's answers in progress are limited.
            await asyncio.sleep(1.0)
            return
        chat = begun.json()["chat"]["id"]
        try:
            last = await self._answered(chat)
            await self.ask("thumbnail", "GET", f"{_PAGE}/thumbnail/{digest}")
            await self.call("send", conversation=chat, parent=last, text="And now?", settings=settings)
            await self._answered(chat)
            code = (await self.call("download")).json()["code"]
            await self.ask("export", "GET", f"{_PAGE}/export?ids={chat}&code={code}")
        finally:
            # Also if the client hangs up.
            await asyncio.shield(asyncio.ensure_future(self.call("delete", conversation=chat)))

    async def _answered(self, chat: str) -> str:
        """Waits for a chat's answer; returns the last message's id."""
        while True:
            shown = (await self.http.post(f"{_PAGE}/api/start", json={})).json()
            messages = (await self.http.post(f"{_PAGE}/api/open", json={"conversation": chat})).json()["messages"]
            if messages[-1]["id"] not in shown["running"]:
                return messages[-1]["id"]
            await asyncio.sleep(0.1)

    def _review(self) -> Actions:
        return [
            *self._asks("look", "POST", "/api/look", json={}),
            *self._asks("find", "POST", "/api/find", json={"words": "a"}),
            *self._asks("media", "GET", f"/media/{self.chance.randrange(2)}"),
            *self._asks("small", "GET", f"/small/{self.chance.randrange(2)}"),
            ("save", self._save),
            *self._asks("undo", "POST", "/api/undo", json={}),
        ]

    async def _save(self) -> None:
        look = await self.ask("look", "POST", "/api/look", json={})
        numbers = look.json()["numbers"][:1]
        items = (await self.ask("items", "POST", "/api/items", json={"numbers": numbers})).json()["items"]
        body = {"number": numbers[0], "digest": items[0]["digest"], "text": f"Caption {self.chance.random()}."}
        await self.ask("save", "POST", "/api/save", json=body)

    def _strangers(self) -> Actions:
        wrong = {"authorization": "Bearer wrong", "cookie": f"qwen35mm-token-{self.front.port}=wrong"}
        path = {"serve": "/v1/models", "chat": f"{_PAGE}/api/start", "review": "/api/look"}[self.front.name]
        return [
            *self._asks("wrong token", "POST", path, json={}, headers=wrong),
            *self._asks("not there", "GET", "/nothing/at/all"),
            ("broken", self._break),
        ]

    async def _break(self) -> None:
        """Sends half a request on its own connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.front.port)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            writer.write(self.chance.choice([b"GET / HT", b"\0\0\0", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]))
            await asyncio.wait_for(reader.read(1000), self.chance.random())
        writer.close()
        self.answers["broken: sent"] += 1


async def watch(front: Front, answers: Counter[str], every_s: float, until_s: float) -> Rows:
    """Samples the front until the time is over."""
    process, samples, began_s = psutil.Process(front.process.pid), [], time.monotonic()
    while time.monotonic() < until_s:
        sample = {"minute": (time.monotonic() - began_s) / 60, "RSS, MiB": front.rss() / _MIB}
        sample |= {"files": process.num_fds(), "threads": process.num_threads()}
        sample["children"] = len(process.children(recursive=True))
        sample["temporary"] = sum(1 for each in (front.folder / "tmp").rglob("*") if each.is_file())
        samples.append({**sample, "answers": sum(answers.values())})
        await asyncio.sleep(every_s)
    return samples


def growth(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope of (minute, value) per hour, by least squares, and half of its 95 % interval."""
    minutes, values = zip(*samples, strict=True)
    slope, begin = statistics.linear_regression(minutes, values)
    squares = sum((value - begin - slope * at) ** 2 for at, value in samples)
    middle = statistics.fmean(minutes)
    spread = sum((at - middle) ** 2 for at in minutes)
    freedom = len(samples) - 2
    error = math.sqrt(squares / freedom / spread) if freedom > 0 else math.inf
    # Approximates Student's t: 2.3 for ten samples, 2 for many.
    return 60 * slope, 60 * error * (1.96 + 2.5 / max(freedom, 1))


def judge(samples: Rows, warm_up_minutes: float, most_mib: float) -> dict[str, str]:
    """The verdict on each number after the warm-up: "constant", "grows" or "too short"."""
    rest = [each for each in samples if each["minute"] >= warm_up_minutes]
    if len(rest) < 6:
        return dict.fromkeys(("memory", *_MORE), "too short")
    per_hour, plus_minus = growth([(each["minute"], each["RSS, MiB"]) for each in rest])
    # In a short run the smallest step is many MiB an hour.
    seen_mib = per_hour * (rest[-1]["minute"] - rest[0]["minute"]) / 60
    grows = per_hour - plus_minus > most_mib and seen_mib > _SEEN_MIB
    memory = "grows" if grows else "constant" if per_hour + plus_minus <= most_mib else "too short"
    verdict, third = {"memory": memory}, len(rest) // 3
    for name, more in _MORE.items():
        first, last = (statistics.median(each[name] for each in part) for part in (rest[:third], rest[-third:]))
        verdict[name] = "grows" if last - first > more else "constant"
    return verdict | {"memory's growth": f"{per_hour:+.1f} +- {plus_minus:.1f} MiB an hour"}


async def soak(front: Front, arguments: argparse.Namespace) -> tuple[Rows, Counter[str]]:
    answers: Counter[str] = Counter()
    until_s = time.monotonic() + 60 * arguments.minutes
    clients = [Client(front, random.Random(f"{arguments.seed} {n}"), answers) for n in range(arguments.clients)]
    watching = asyncio.ensure_future(watch(front, answers, arguments.every, until_s))
    await asyncio.gather(watching, *(client.run(until_s) for client in clients))
    return watching.result(), answers


def main() -> None:
    options = parser(__doc__, model=False, repeats=None)
    options.add_argument("--front", choices=NAMES, default="chat")
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--warm-up", type=float, help="minutes; by default a third of them, at most 5")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--every", type=float, default=10.0, help="seconds between two samples")
    options.add_argument("--most", type=float, default=30.0, help="MiB an hour that don't count as growth")
    options.add_argument("--seed", type=int, default=0)
    arguments = parse(options)
    if arguments.warm_up is None:
        arguments.warm_up = min(5.0, arguments.minutes / 3)
    with tempfile.TemporaryDirectory() as folder, started(arguments.front, Path(folder)) as front:
        samples, answers = asyncio.run(soak(front, arguments))
        front.check()
    verdict = judge(samples, arguments.warm_up, arguments.most)
    errors = {name: number for name, number in answers.items() if name.endswith("no answer") or ": 5" in name}
    counts = [{"asked, and answered": name, "times": number} for name, number in sorted(answers.items())]
    tables = {"The front": samples, "Requests": counts, "Verdict": [verdict]}
    report("soak", arguments, tables, errors=errors)
    if errors or "grows" in verdict.values():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
