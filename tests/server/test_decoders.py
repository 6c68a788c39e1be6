"""What clients send is decoded in processes of their own: what a medium does to one is that request's error alone."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cli.serve import ServerOptions, _load
from qwen35mm.decoding import Decoders, DecodingProcessor
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.settings import ModelsOptions
from tests import hostile_decoder
from tests.server.conftest import HTTP, PATIENCE_S, sent, serving

PICTURE = asset_path("samples") / "one-shape.png"
CLIP = asset_path("samples") / "moves-right.mp4"


def body(path: Any = PICTURE, what: bytes = b"") -> dict[str, Any]:
    kind = "video" if path == CLIP else "image"
    url = f"data:{kind}/x;base64,{base64.b64encode(path.read_bytes() + what).decode()}"
    content = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4}


def ask(address: str, asked: dict[str, Any], path: str = "chat/completions") -> httpx.Response:
    return HTTP.post(f"{address}/v1/{path}", json=asked)


@pytest.fixture
def hostile(demo: LoadedModel, decoders: Decoders) -> Iterator[str]:
    """The address of a server that decodes apart."""
    backend = LocalBackend(demo, settings=EngineSettings(slots=2), min_segment=16, decoders=decoders)
    with serving(create_app(backend, num_places=4)) as address:
        yield address
    backend.close()


def test_another_request_is_answered_beside_a_decoder_that_never_ends(
    hostile: str, address: str, decoders: Decoders
) -> None:
    with sent(hostile, "/v1/chat/completions", body(CLIP, hostile_decoder.STUCK)):
        limit_s = time.monotonic() + PATIENCE_S
        while not decoders._state.busy:
            assert time.monotonic() < limit_s
            time.sleep(0.01)
        (stuck,) = decoders._state.busy
        # The same answers as of a server that decodes by itself.
        for each in (body(), body(CLIP), {**body(), "mm_processor_kwargs": {"max_pixels": 128 * 128}}):
            there, here = (ask(at, each).json() for at in (hostile, address))
            assert there["choices"] == here["choices"]
            assert there["usage"]["prompt_tokens"] == here["usage"]["prompt_tokens"]
        assert stuck in decoders._state.busy
    # Whoever hangs up ends it.
    while stuck in decoders._state.busy:
        assert time.monotonic() < limit_s + PATIENCE_S
        time.sleep(0.01)
    stuck._child.wait(PATIENCE_S)


def test_what_a_medium_does_is_its_own_requests_error(hostile: str, demo: LoadedModel) -> None:
    crash = body(what=hostile_decoder.CRASH)
    asked = [
        (crash, "The decoder broke down over the data URI"),
        (body(CLIP, hostile_decoder.NONSENSE), "The decoder broke down over the data URI"),
        ({**body(what=hostile_decoder.BOMB), "mm_processor_kwargs": {"fps": 1}}, "takes more memory than there is"),
    ]
    with ThreadPoolExecutor(3) as threads:
        bad = [(threads.submit(ask, hostile, each), words) for each, words in asked]
        text = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert ask(hostile, text).status_code == ask(hostile, body()).status_code == 200
        for each, words in bad:
            assert (each.result().status_code, words in each.result().json()["error"]["message"]) == (400, True)
    data = crash["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    counted = {"model": "default", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    assert ask(hostile, counted, "messages/count_tokens").status_code == 400
    assert ask(hostile, text).status_code == 200
    with ExitStack() as stack:
        backend = LocalBackend(demo, settings=EngineSettings(slots=1), decoders=Decoders(timeout_s=1.0))
        stack.callback(backend.close)
        stuck = ask(stack.enter_context(serving(create_app(backend))), body(what=hostile_decoder.STUCK))
        assert (stuck.status_code, "took too long" in stuck.json()["error"]["message"]) == (400, True)


def test_the_command_decodes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("qwen35mm.server.app.create_app", lambda backend, **_: made.append(backend))
    with ExitStack() as stack:
        _load(ModelsOptions(no_disk_cache=True), ServerOptions(no_store=True), None, None, stack)
        (backend,) = made
        assert isinstance(backend.media, DecodingProcessor)
        assert backend.media.prepare(PICTURE).plan == backend.media.direct.prepare(PICTURE).plan
        assert backend.media.decoders._state.idle
    assert not backend.media.decoders._state.idle, "they end with it"
