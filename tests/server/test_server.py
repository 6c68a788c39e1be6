"""Who is let in, in what order, and what happens to those who send nonsense or hang up."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.routing import Route

from qwen35mm.backends.local import LocalBackend
from qwen35mm.errors import ConfigError, QueueFullError
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Keys
from qwen35mm.server.queue import FairQueue
from tests.server.conftest import HTTP, PATIENCE_S, Endless, serving

FIRST, SECOND = "first-key-of-sixteen", "second-key-of-sixteen"
ASKED = {"messages": [{"role": "user", "content": "Hello " * 40}], "temperature": 0, "max_tokens": 4}


# What says nothing of this server, or nothing but that it runs.
OPEN = ("/health", "/docs", "/docs/{name}")


def post(address: str, body: Any = ASKED, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HTTP.post(f"{address}/v1/chat/completions", content=content, headers=named)


def test_every_route_needs_a_key_that_tells_of_this_server(backend: LocalBackend) -> None:
    app = create_app(backend, keys=Keys([FIRST, SECOND]))
    with serving(app) as address:
        routes = [route for route in app.routes if isinstance(route, Route)]
        assert {"/v1/chat/completions", "/v1/models", "/docs", "/openapi.json"} <= {route.path for route in routes}
        for route in routes:
            for method in route.methods or ():
                path = route.path.replace("{name:path}", "demo")
                answer = HTTP.request(method, f"{address}{path}".replace("{name}", "docs.js"), json={})
                assert answer.status_code == (200 if path in OPEN else 401), path
        document = HTTP.get(f"{address}/openapi.json", headers={"authorization": f"Bearer {FIRST}"}).json()
        assert "/v1/chat/completions" in document["paths"]
        assert post(address, authorization="Bearer wrong").json()["error"]["code"] == "invalid_api_key"
        known = {"authorization": f"Bearer {SECOND}"}, {"x_api_key": SECOND}
        for headers in (
            *known,
            {"authorization": "Bearer another", "x_api_key": SECOND},
            known[0] | {"x_api_key": "?"},
        ):
            assert post(address, **headers).status_code == 200
        # What one key's holder says is never found by another's.
        cached = [
            post(address, authorization=f"Bearer {key}").json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in (SECOND, FIRST, SECOND)
        ]
        assert cached[0] == cached[2] > cached[1] == 0


def test_keys_come_from_a_file_and_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# mine\n{FIRST}\n\n{SECOND}\n")
    keys = Keys.read(path)
    assert keys.caller(f"bearer {FIRST}") != keys.caller(None, SECOND)
    for text, words in (("", "holds no API key"), ("short", "Key 1 of .* 16 to 200")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            Keys.read(path)
        assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="can't be read"):
        Keys.read(tmp_path)


def test_other_names_and_other_sites_are_refused(address: str) -> None:
    assert post(address, host="rebound.example").status_code == 421
    assert post(address, origin="https://evil.example").status_code == 403
    assert post(address, sec_fetch_site="cross-site").status_code == 403
    assert post(address, origin=address).status_code == 200


def test_a_client_that_hangs_up_frees_its_place(endless: Endless) -> None:
    with serving(create_app(endless, num_places=1, max_waiting=1)) as address:  # pyright: ignore[reportArgumentType]
        place = urlsplit(address)
        said = ASKED["messages"]
        bodies = [("chat/completions", ASKED), ("responses", {"input": said})]
        for stream, (path, asked) in itertools.product((True, False), bodies):
            body = json.dumps({**asked, "stream": stream})
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", place.port or 0)) as client:
                client.sendall((head + body).encode())
                assert endless.begun.acquire(timeout=PATIENCE_S)
            assert endless.ended.acquire(timeout=PATIENCE_S)
        endless.go_on.set()
        assert post(address).status_code == 200


def test_a_bug_is_told_by_its_number_in_the_log(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(backend, "stream", broken)
    with serving(create_app(backend)) as address:
        answer = post(address)
    message = answer.json()["error"]["message"]
    found = re.fullmatch(r"Something went wrong inside the program; its log has it under (\w+)\. .*", message)
    assert answer.status_code == 500
    assert found is not None
    assert found[1] in caplog.text


def test_a_full_line_says_when_to_come_again(endless: Endless) -> None:
    with serving(create_app(endless, num_places=1, max_waiting=1)) as address:  # pyright: ignore[reportArgumentType]
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(post(address).status_code)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert endless.begun.acquire(timeout=PATIENCE_S)
        while HTTP.get(f"{address}/ready").json()["waiting"] < 1:
            pass
        full = post(address)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) > 0
        assert "qwen35mm_requests_waiting 1.0" in HTTP.get(f"{address}/metrics").text
        endless.go_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert answers == [200, 200]


async def test_callers_take_turns() -> None:
    line = FairQueue(num_places=1, max_waiting=8)
    order: list[str] = []

    async def ask(caller: str) -> None:
        async with line.place(caller):
            order.append(caller)
            await asyncio.sleep(0)

    holding = asyncio.Event()

    async def hold() -> None:
        async with line.place("holder"):
            await holding.wait()

    first = asyncio.create_task(hold())
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(ask(caller)) for caller in ("many", "many", "many", "few", "gone", "other")]
    await asyncio.sleep(0)
    tasks[4].cancel()
    await asyncio.sleep(0)
    assert line.num_waiting == 5
    holding.set()
    await asyncio.gather(first, *tasks, return_exceptions=True)
    assert order == ["many", "few", "other", "many", "many"]
    assert line.num_waiting == 0
    async with line.place("again"):
        waiting = [asyncio.create_task(ask(str(number))) for number in range(8)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="8 requests are waiting"):
            await ask("late")
    await asyncio.gather(*waiting)


def test_a_conversation_becomes_its_prompt(client: openai.OpenAI, address: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool]}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    answer = client.chat.completions.create(
        model="demo",
        messages=body["messages"],
        tools=body["tools"],
        max_tokens=1,
        extra_body={"return_token_ids": True, "chat_template_kwargs": body["chat_template_kwargs"]},
    ).model_dump()
    found = HTTP.post(f"{address}/tokenize", json={**body, "return_token_strs": True}).json()
    assert found["tokens"] == answer["prompt_token_ids"]
    assert "".join(found["token_strs"]) == HTTP.post(f"{address}/apply-template", json=body).json()["prompt"]
    prompt = HTTP.post(f"{address}/apply-template", json={**body, "add_generation_prompt": False}).json()["prompt"]
    assert prompt.endswith("Hello<|im_end|>\n")
    begun = [*body["messages"], {"role": "assistant", "content": "Well"}]
    body |= {"messages": begun, "continue_final_message": True}
    assert HTTP.post(f"{address}/apply-template", json=body).json()["prompt"].endswith("Well")


async def test_one_callers_requests_leave_a_place_for_anothers() -> None:
    """Four long prompts of one key would otherwise hold every slot."""
    line = FairQueue(num_places=3, max_waiting=8, several=True)
    order: list[str] = []
    over = asyncio.Event()

    async def ask(caller: str) -> None:
        async with line.place(caller):
            order.append(caller)
            await over.wait()

    tasks = [asyncio.create_task(ask("many")) for _ in range(4)]
    await asyncio.sleep(0)
    assert (order, line.num_waiting) == (["many", "many"], 2)
    tasks.append(asyncio.create_task(ask("few")))
    await asyncio.sleep(0)
    assert order == ["many", "many", "few"]
    over.set()
    await asyncio.gather(*tasks)
    assert (len(order), line.num_waiting) == (5, 0)


async def test_the_caller_with_the_fewest_places_is_next() -> None:
    line = FairQueue(num_places=3, max_waiting=8)
    order: list[str] = []
    ends = {name: asyncio.Event() for name in ("a1", "a2", "b1", "a3", "b2", "c1")}

    async def ask(name: str) -> None:
        async with line.place(name[0]):
            order.append(name)
            await ends[name].wait()

    tasks = [asyncio.create_task(ask(name)) for name in ends]
    await asyncio.sleep(0)
    assert order == ["a1", "a2", "b1"], "without several keys one may hold them all"
    for number, name in enumerate(("b1", "a1", "a2"), start=4):
        ends[name].set()
        while len(order) < number:
            await asyncio.sleep(0)
    assert order[3:] == ["b2", "c1", "a3"]
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks)


def test_tokens_and_back(client: openai.OpenAI, address: str) -> None:
    text = "Two circles, <|im_end|> and ü."
    found = HTTP.post(f"{address}/tokenize", json={"prompt": text}).json()
    assert found["count"] == len(found["tokens"])
    assert HTTP.post(f"{address}/tokenize", json={"content": text}).json() == found
    assert HTTP.post(f"{address}/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    for path, body, param in (
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"prompt": "a" * 2_000_001}, "prompt"),
        ("detokenize", {"tokens": [10**9]}, "tokens"),
        ("detokenize", {"tokens": [1, "x"]}, "tokens.1"),
    ):
        answer = HTTP.post(f"{address}/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
