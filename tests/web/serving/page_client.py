"""The page's routes without a server: requests go straight into the application."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import Mount

from qwen35mm.chat.quotas import STRANGERS, Quotas, Usage
from qwen35mm.chat.replies.replies import Replies
from qwen35mm.chat.replies.turns import Turns
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.http.requests import Requests
from qwen35mm.http.sessions import HEADER
from qwen35mm.web.serving.api import Api
from qwen35mm.web.serving.app import PREFIX, _routes
from qwen35mm.web.serving.examples import choose_examples, load_samples
from qwen35mm.web.serving.files import Files
from qwen35mm.web.serving.people import People
from qwen35mm.web.serving.texts import Texts
from qwen35mm_preprocess.say import english
from tests.chat.fake_backend import FakeBackend

ANN, BOB = "a" * 32, "b" * 32


def showing(key: str, **more: str) -> HTTPConnection:
    """A request of the page with this key."""
    headers = [(name.encode(), value.encode()) for name, value in {HEADER: key, **more}.items()]
    return HTTPConnection({"type": "http", "method": "POST", "query_string": b"", "headers": headers})


class PageClient:
    """A page that several people use; `token` is the key of one's page."""

    def __init__(self, folder: Path, *, shared: bool = True, quotas: Quotas = STRANGERS) -> None:
        self.backend = FakeBackend()
        self.store = ConversationStore(folder)
        self.replies = Replies(self.store, self.backend, grace_s=10**6)
        self.people = People(shared=shared)
        self.usage = Usage(self.store, quotas)
        turns = Turns(self.backend, self.store, self.replies)
        examples = choose_examples(load_samples())
        app = {"model": self.backend.info.name}
        api = Api(self.backend, self.store, self.replies, turns, lambda: app, self.usage, examples)
        self.files = Files(self.store, self.people, self.backend, self.usage, examples)
        requests = Requests(self.people.asking, api, self.files, Texts(self.store))
        self.app: Any = Starlette(routes=[Mount(PREFIX, routes=_routes(requests, self.files))])

    async def request(
        self,
        method: str,
        path: str,
        token: str = ANN,
        *,
        header: bool = True,
        address: str = "127.0.0.1",
        **how: Any,
    ) -> httpx.Response:
        """One request to a path below the page's prefix."""
        headers = {**({HEADER: token} if header else {}), **how.pop("headers", {})}
        transport = httpx.ASGITransport(self.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, f"{PREFIX}/{path}", headers=headers, **how)

    async def file(self, path: str, token: str = ANN, **how: Any) -> httpx.Response:
        """A file as a browser asks for it, which sets no header: with the page's ticket."""
        ticket = self.people._tickets.of(token)
        return await self.request("GET", path, header=False, params={"ticket": ticket}, **how)

    async def export(self, token: str = ANN, **params: str) -> httpx.Response:
        """An archive of one's conversations."""
        code = (await self.call("download", token)).json()["code"]
        return await self.request("GET", "export", header=False, params={**params, "code": code})

    async def call(self, method: str, /, token: str = ANN, **arguments: Any) -> httpx.Response:
        """One of the page's requests."""
        return await self.request("POST", f"api/{method}", token, json=arguments)

    async def upload(self, data: bytes, name: str, token: str = ANN, **how: Any) -> httpx.Response:
        return await self.request("POST", "upload", token, params={"name": name}, content=data, **how)

    async def ask(self, text: str, token: str = ANN, **arguments: Any) -> dict[str, Any]:
        """Sends, and watches to the end; the chat as it is then."""
        sent = (await self.call("send", token, text=text, **arguments)).json()
        await self.watch(sent["reply"], token)
        return (await self.call("open", token, conversation=sent["chat"]["id"])).json()

    def owner(self, token: str = ANN) -> str:
        """Whom a cookie stands for."""
        return self.people.asking(showing(token)).owner

    async def watch(self, reply: str, token: str = ANN) -> None:
        """Watches a reply to its end."""
        async with aclosing(self.replies.watch(self.owner(token), [reply])) as views:  # pyright: ignore
            async for _ in views:
                pass

    async def send_body(
        self,
        path: str,
        chunks: list[bytes],
        *,
        cut: bool | None,
        begun: asyncio.Event | None = None,
        left: asyncio.Event | None = None,
    ) -> list[dict[str, Any]]:
        """A request whose body comes in pieces, without a length.

        Args:
            cut: whether the connection is lost after them; None leaves it open and silent.
            begun: set when all of them were taken.
            left: the connection is lost when this is set.
        """
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
        ]
        if cut is not None:
            messages.append({"type": "http.disconnect"} if cut else {"type": "http.request", "body": b""})
        headers = [(HEADER.encode(), ANN.encode())]
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"{PREFIX}/{path}",
            "query_string": query.encode(),
            "headers": headers,
        }
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not messages:
                if begun is not None:
                    begun.set()
                await (left or asyncio.Event()).wait()
                return {"type": "http.disconnect"}
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return sent


def problem(response: httpx.Response) -> str:
    """The words of an error."""
    return english(response.json()["error"]["message"])
