"""Bodies that are damaged, too large, packed, or come too slowly: a clear answer, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import FastAPI

from qwen35mm.http import bodies
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.parts import Sources
from tests.server.instant import Answer, Instant, ask

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello, what is there?"}]}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BLOCKS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text"}]}]},
]
WHOLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**SAID, "temperature": 0.5, "max_tokens": 8, "stop": ["x"], "seed": 3, "stream": True}),
    (CHAT, {"messages": [*SAID["messages"], {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL]}),
    (MESSAGES, {"model": "default", "max_tokens": 8, "messages": BLOCKS, "system": [{"type": "text", "text": "So."}]}),
    (f"{MESSAGES}/count_tokens", {"model": "default", "messages": BLOCKS[:1], "thinking": {"type": "disabled"}}),
    ("/tokenize", {"prompt": "Two circles.", "model": "default"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/apply-template", SAID),
]
# In place of a value: what no field takes, and what some might.
STRANGE = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "01", "0x1", "'x'", "undefined", r'"\ud800"', r'"\u12"'),
    *("9" * 5000, "-1", "1e308", "true", "null", "[]", "{}", '""', '"\\u0000"', '"\x00"', '"' + "x" * 3000 + '"'),
    *("[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "[null]", '[[["x"]]]', '{"type": ["text"]}'),
)


def damaged(chance: random.Random) -> tuple[str, bytes]:
    """A path, and a body for it with one thing wrong, or at least strange."""
    path, values = chance.choice(WHOLE)
    data = json.dumps(values).encode()
    at = chance.randrange(1, len(data))
    match chance.randrange(7):
        case 0:
            return path, data[:at]
        case 1:
            return path, data[:at] + bytes([chance.randrange(128, 256)]) + data[at:]
        case 2:
            return path, data[:at] + chance.choice([b"\0", b"}", b"]", b'"', b",", b"\x1b", b"\\"]) + data[at + 1 :]
        case 3:
            return path, data.decode().encode(chance.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case 4:
            return path, data * 2
        case 5:  # a key twice
            return path, b'{"messages": 5, "prompt": 5, "tokens": 5, ' + data[1:]
    marked = json.loads(data)
    places = list(places_of(marked))
    holder, key = chance.choice(places)
    holder[key] = "put it here"
    return path, json.dumps(marked).replace('"put it here"', chance.choice(STRANGE), 1).encode()


def places_of(value: Any) -> Any:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places_of(each)


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Instant:
    return Instant(demo)


@pytest.fixture(scope="module")
def app(backend: Instant) -> FastAPI:
    return create_app(backend)


def check_refusal(path: str, answer: Answer) -> None:
    """The status is the client's fault, and told in the form of the protocol."""
    assert 400 <= answer.status < 500, answer.content
    assert answer.headers["content-type"] == ["application/json"]
    told = answer.json()
    if path.startswith(MESSAGES):
        assert told["type"] == "error"
        assert set(told["error"]) == {"type", "message"}
    else:
        assert set(told["error"]) == {"message", "type", "param", "code"}
    assert 10 < len(told["error"]["message"]) < 1100
    assert len(answer.content) < 3000


async def test_three_hundred_damaged_bodies(app: FastAPI) -> None:
    chance = random.Random(17)
    refused = 0
    for _ in range(300):
        path, body = damaged(chance)
        answer = await ask(app, path, body)
        try:
            json.loads(body, parse_constant=float, object_pairs_hook=unique)
        except ValueError:
            is_json = False
        except RecursionError:
            is_json = False
        else:
            is_json = True
        if answer.status != 200 or not is_json:
            if answer.status == 200:  # what Python's reader refuses and JSON doesn't, and what is mended
                assert b'"messages": 5' in body or b"9999" in body or not body.isascii(), body[:300]
                continue
            refused += 1
            check_refusal(path, answer)
    assert refused > 200


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError
    return dict(pairs)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e400}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b"[" * 10_000,
        b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"messages": [{"role": ["user"], "content": "hi"}]}',
        b'{"messages": [{"role": "user", "content": [5]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]}',
    ],
)
async def test_a_damaged_body_is_told_so(body: bytes, app: FastAPI) -> None:
    answer = await ask(app, CHAT, body)
    check_refusal(CHAT, answer)
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + json.dumps("x" * 10_000).encode() + b"}",
        json.dumps({"messages": [{"role": ["x"] * 100_000}]}).encode(),
        json.dumps({**SAID, "stop": [1] * 100_000}).encode(),
        json.dumps(SAID).encode() + b" " * 10 + b"," * (bodies.MAX_VALUES + 1),
    ],
    ids=["text", "a long role", "many faults", "many values"],
)
async def test_what_is_wrong_is_told_shortly(body: bytes, app: FastAPI) -> None:
    check_refusal(CHAT, await ask(app, CHAT, body))


@pytest.mark.parametrize("field", [{"n": True}, {"seed": True}, {"frequency_penalty": False}, {"top_logprobs": False}])
async def test_true_is_no_number(field: dict[str, Any], app: FastAPI) -> None:
    answer = await ask(app, CHAT, json.dumps({**SAID, **field}).encode())
    check_refusal(CHAT, answer)


async def test_unknown_addresses_and_ways_are_told_in_the_protocols_form(app: FastAPI) -> None:
    for method, path, status in (
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("GET", "/nothing", 404),
        ("PUT", "/v1/models/demo", 405),
        ("GET", f"{MESSAGES}/x", 404),
        ("GET", "/v1/models/a%00b", 404),
        ("GET", "//health", 404),
        ("BREW", "/health", 405),
    ):
        answer = await ask(app, path, method=method)
        assert answer.status == status
        check_refusal(path, answer)
    for headers, status in ((("origin", "https://evil.example"), 403), (("host", "evil.example"), 421)):
        answer = await ask(app, CHAT, headers=[headers])
        assert answer.status == status
        check_refusal(CHAT, answer)


async def test_what_requests_fetch_counts_as_their_bodies_do(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_SMALL_BYTES", 1000)
    come, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def fetch(address: str, place: str) -> bytes:
        bodies.hold(8000)
        come.release()
        await go_on.wait()
        return b"no picture"

    app = create_app(Instant(demo), sources=Sources(fetch=fetch), max_held_bytes=15_000)
    part = {"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    for _ in range(2):
        first = asyncio.create_task(ask(app, CHAT, body))
        await come.acquire()
        second = await ask(app, CHAT, body)
        assert (second.status, second.json()["error"]["code"]) == (429, "too_much_at_once")
        go_on.set()
        assert (await first).status == 400
        go_on.clear()


async def test_a_server_whose_engine_ended_asks_to_be_started_again(demo: LoadedModel) -> None:
    class Ended(Instant):
        @property
        def has_ended(self) -> bool:
            return True

    for path in ("/health", "/ready"):
        assert (await ask(create_app(Instant(demo)), path, method="GET")).status == 200
        answer = await ask(create_app(Ended(demo)), path, method="GET")
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_ended")
        assert answer.headers["retry-after"] == ["5"]
        assert (await ask(create_app(Instant(demo)), path, method="HEAD")).status == 200


async def test_a_packed_body_is_not_unpacked(app: FastAPI) -> None:
    answer = await ask(app, CHAT, b"\x1f\x8b", headers=[("content-encoding", "gzip")])
    assert answer.status == 415
    check_refusal(CHAT, answer)


async def pieces_of(size: int, num_pieces: int, told: Callable[[], object] = int) -> AsyncIterator[bytes]:
    yield b'{"messages": "'
    for _ in range(num_pieces):
        told()
        yield b"x" * size
        await asyncio.sleep(0)
    yield b'"}'


async def test_thirty_megabytes_leave_nothing_behind(app: FastAPI) -> None:
    await ask(app, CHAT, pieces_of(1, 1))
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        check_refusal(CHAT, await ask(app, CHAT, pieces_of(2**20, 30)))
        peak = tracemalloc.get_traced_memory()[1]
        # A thread of a pool may hold its last work for a moment longer.
        for _ in range(200):
            gc.collect()
            after = tracemalloc.get_traced_memory()[0]
            if after - before < 2**20:
                break
            await asyncio.sleep(0.05)
    finally:
        tracemalloc.stop()
    assert after - before < 2**20
    # The bytes, and the text that they hold; a growing buffer is up to an eighth larger than what is in it.
    assert peak - before < 75 * 2**20


async def test_what_is_too_large_is_refused_by_its_length_and_before_its_end(backend: Instant) -> None:
    app = create_app(backend, max_body_bytes=10_000)
    sent = itertools.count()
    answer = await ask(app, CHAT, pieces_of(1000, 1000, lambda: next(sent)), headers=[("content-length", str(10_001))])
    assert (answer.status, next(sent)) == (413, 0)
    answer = await ask(app, CHAT, pieces_of(1000, 1000, lambda: next(sent)))
    assert answer.status == 413
    assert next(sent) < 15
    check_refusal(CHAT, answer)
    assert (await ask(app, CHAT, json.dumps(SAID).encode(), headers=[("content-length", "x" * 50)])).status == 200


async def test_large_bodies_are_taken_as_far_as_there_is_room_and_small_ones_always(
    backend: Instant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_SMALL_BYTES", 1000)
    app = create_app(backend, max_body_bytes=10_000, max_held_bytes=15_000)
    come = asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        yield b" " * 9000
        await come.wait()
        yield json.dumps(SAID).encode()

    first = asyncio.ensure_future(ask(app, CHAT, held()))
    await asyncio.sleep(0.01)
    for headers in ((), (("content-length", "9016"),)):
        second = await ask(app, CHAT, pieces_of(1000, 9), headers=headers)
        assert (second.status, second.json()["error"]["code"]) == (429, "too_much_at_once")
        assert int(second.headers["retry-after"][0]) > 0
    assert (await ask(app, CHAT, json.dumps(SAID).encode())).status == 200
    come.set()
    assert (await first).status == 200
    # Its room is free again.
    assert (await ask(app, CHAT, pieces_of(1000, 9))).status == 400


async def test_a_body_that_stalls_is_given_up(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.02)

    async def stalls() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = await ask(app, CHAT, stalls())
    assert answer.status == 408
    check_refusal(CHAT, answer)
