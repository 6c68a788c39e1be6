"""Small bodies that become large, and forms of nothing but parts: refused, and others are answered meanwhile."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.security.conftest import OpenFront
from tests.security.fronts import MIB, Front, Name

SIZE = 4 * MIB
# More than are taken.
_NUM_KEYS = 2**20
BODIES: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"[" * SIZE,
    "lists that end": lambda: b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "ends": lambda: b"[" * 101 + b"]" * SIZE,
    "objects": lambda: b'{"a":' * (SIZE // 5),
    "ones": lambda: b"[" + b"1," * (SIZE // 2) + b"1]",
    "in a field": lambda: b'{"messages": ' + b"[" * SIZE,
    "keys": lambda: b"{" + b",".join(b'"%x":1' % number for number in range(_NUM_KEYS)) + b"}",
    "empty texts": lambda: b'{"input": [' + b'"",' * (SIZE // 3) + b'""]}',
    "digits": lambda: b'{"max_tokens": ' + b"9" * SIZE + b"}",
    "escapes": lambda: b'{"text": "' + b"\\u0000" * (SIZE // 6) + b'"}',
    "blanks": lambda: b" " * SIZE,
}
ROUTES: dict[Name, tuple[str, ...]] = {
    "serve": ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/detokenize"),
    "chat": ("/qwen35mm/api/send", "/qwen35mm/api/preferences", "/gradio_api/call/chat", "/gradio_api/queue/join"),
    "review": ("/api/save", "/api/items", "/api/find"),
}
# All fronts read JSON with the same function, but Gradio's routes are in the chat.
SOME = ("lists", "keys", "digits")
CASES: list[Any] = [
    *(("serve", bomb) for bomb in BODIES),
    *(pytest.param("chat", bomb, marks=() if bomb in SOME else pytest.mark.slow) for bomb in BODIES),
    *(("review", bomb) for bomb in SOME),
]
# By the bodies of all routes at one time, and what the allocator keeps of them.
MAX_GROWTH = 300 * MIB
_PART = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n\r\n'
FORMS: dict[str, Callable[[], bytes]] = {
    "parts": lambda: _PART * (SIZE // len(_PART)) + b"--b--",
    "a long name": lambda: _PART.replace(b'"a"', b'"' + b"a" * SIZE + b'"') + b"--b--",
    "headers": lambda: b"--b\r\n" + b"A: b\r\n" * (SIZE // 6) + b"\r\n\r\n--b--",
    "a header": lambda: b"--b\r\nA: " + b"b" * SIZE,
    "no end": lambda: _PART + b"x" * SIZE,
    "line ends": lambda: b"\r\n" * (SIZE // 2),
    "dashes": lambda: b"-" * SIZE,
    "fields": lambda: b"a=b&" * (SIZE // 4),
    "escapes": lambda: b"username=" + b"%00" * (SIZE // 3),
}
_MULTIPART, _ENCODED = "multipart/form-data; boundary=b", "application/x-www-form-urlencoded"


@functools.cache
def body_of(bomb: str) -> bytes:
    return BODIES[bomb]()


def send(front: Front, path: str, body: bytes, kind: str, answers: list[tuple[str, int, str]]) -> None:
    try:
        with front.client() as client:
            answer = client.post(path, content=body, headers={"content-type": kind})
            answers.append((path, answer.status_code, answer.text[:300]))
    except httpx.TransportError as error:
        # A server may hang up on whom it has refused.
        answers.append((path, 400, repr(error)))


def attack(front: Front, asked: list[tuple[str, bytes, str]]) -> None:
    """Sends all of them at one time, and asks what is small meanwhile, which is answered within `PATIENCE_S`.

    A busy machine is no failure: where one is quiet, others wait for less than two seconds.
    """
    with front.client() as client:
        assert front.ask(client).status_code == 200
        before = front.rss()
        answers: list[tuple[str, int, str]] = []
        threads = [threading.Thread(target=send, args=(front, *each, answers), daemon=True) for each in asked]
        for thread in threads:
            thread.start()
        waits = []
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert front.ask(client).status_code == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.01)
    assert len(answers) == len(asked)
    wrong = [each for each in answers if each[1] >= 500]
    assert not wrong
    assert front.rss() - before < MAX_GROWTH
    front.check()
    told = f"{front.name}: {[each[:2] for each in answers]}, at most {max(waits):.2f} s for others"
    print(f"{told}, {(front.rss() - before) // MIB} MiB more")


@pytest.mark.parametrize(("name", "bomb"), CASES)
def test_a_body_that_would_fill_the_memory_is_refused(name: Name, bomb: str, open_front: OpenFront) -> None:
    asked: list[Any] = [(path, body_of(bomb), "application/json") for path in ROUTES[name]]
    attack(open_front(name), asked)


@pytest.mark.parametrize("bomb", FORMS)
def test_a_form_of_nothing_but_parts_is_refused(bomb: str, open_front: OpenFront) -> None:
    body, kind = FORMS[bomb](), _ENCODED if bomb in ("fields", "escapes") else _MULTIPART
    paths = ("/login", "/gradio_api/upload", "/qwen35mm/logout", "/qwen35mm/password", "/qwen35mm/upload")
    attack(open_front("chat"), [(path, body, kind) for path in paths])
