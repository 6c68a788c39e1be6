"""The server of transformers with the bundled model: chats and captions are what the model says in this process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.captioning.texts.presets import preset_question
from qwen35mm.cli import main
from qwen35mm.contract import GenerationRequest, Image, Message, SamplingParams, Text, TextDelta
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from tests.backends.events import collect, result_of
from tests.children import ROOT, environment
from tests.forked import PATIENCE_S

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PICTURE = Image(asset_path("samples") / "one-shape.png")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    command = [sys.executable, "-m", "tests.backends.remote.transformers_serve", str(demo_model_path()), *options]
    log = tmp_path_factory.mktemp("serve") / "log"
    env = environment(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text("utf-8")[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@pytest_asyncio.fixture
async def remote(url: str) -> AsyncIterator[RemoteBackend]:
    remote = RemoteBackend(url, model=str(demo_model_path()))
    await remote.connect()
    yield remote
    await remote.aclose()


@pytest.fixture(scope="module")
def local(demo: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(demo)
    yield backend
    backend.close()


async def test_it_is_known_for_what_it_is(remote: RemoteBackend) -> None:
    assert (remote.info.schemas, remote.info.continues, remote.info.exact_counts) == (False, False, False)
    assert "top_k" in remote.info.unsupported


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_chat_says_what_the_model_says_here(remote: RemoteBackend, local: LocalBackend, thinking: bool) -> None:
    messages = [Message("system", (Text("Be brief."),)), Message("user", (PICTURE, Text("What is this?")))]
    for _ in range(2):
        events = await collect(remote.stream(GenerationRequest(messages, GREEDY, enable_thinking=thinking)))
        there = result_of(events)
        here = result_of(await collect(local.stream(GenerationRequest(messages, GREEDY, enable_thinking=thinking))))
        assert there.text.strip() == here.text.strip()
        assert (there.reasoning or "").strip() == (here.reasoning or "").strip()
        assert there.num_prompt_tokens == here.num_prompt_tokens
        assert sum(isinstance(event, TextDelta) for event in events) > 1
        messages += [Message("assistant", (Text(here.text),)), Message("user", (Text("Which colour?"),))]


async def test_leaving_it_ends_its_work(remote: RemoteBackend) -> None:
    endless = replace(GREEDY, max_tokens=2000)
    stream: Any = remote.stream(
        GenerationRequest([Message("user", (Text("Tell me all."),))], endless, enable_thinking=True)
    )
    async for event in stream:
        if isinstance(event, TextDelta):
            break
    await stream.aclose()
    assert await asyncio.to_thread(remote.wait_idle, PATIENCE_S)
    assert result_of(
        await collect(remote.stream(GenerationRequest([Message("user", (PICTURE, Text("What?")))], GREEDY)))
    ).text


async def test_what_it_ignores_is_refused_before_it_is_asked(remote: RemoteBackend) -> None:
    with pytest.raises(RequestError, match="json_schema"):
        remote.check(GenerationRequest(params=replace(GREEDY, json_schema='{"type": "object"}')))


def test_captions(
    url: str, local: LocalBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    folder = tmp_path / "pictures"
    folder.mkdir()
    names = ("one-shape.png", "two-shapes.jpg")
    for name in names:
        (folder / name).write_bytes((asset_path("samples") / name).read_bytes())
    arguments = ["--preset", "plain", "--backend", url, "--model", str(demo_model_path()), "--temperature", "0"]
    with pytest.raises(SystemExit) as ended:
        main(["caption", str(folder), *arguments])
    assert not ended.value.code, capsys.readouterr().err
    for name in names:
        written = (folder / name).with_suffix(".txt").read_text("utf-8").strip()
        question = preset_question("plain").text
        messages = [Message("user", (Image(folder / name), Text(question)))]
        params = SamplingParams(temperature=0.0)
        here = result_of(asyncio.run(collect(local.stream(GenerationRequest(messages, params, enable_thinking=False)))))
        assert written == here.text.strip()
