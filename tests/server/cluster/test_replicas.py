"""Two engines on a local Ray cluster: who gets which request, who hangs up, and what happens when one is killed.

What needs no Ray is in test_front.py and test_conversations.py, and comes first here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import GenerationRequest, TextDelta
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import ConfigError, EngineError
from qwen35mm.server.app import create_app
from qwen35mm.server.cluster.front import create_front
from tests.server.conftest import sent, serving

pytest.importorskip("ray.serve")

from ray.exceptions import RayActorError

from qwen35mm.server.cluster import replicas
from qwen35mm.server.cluster.replicas import ClusterSettings, open_cluster

# Ray, and two processes with a model, take half a minute to start on a busy machine.
PATIENCE_S = 240
SYSTEM = {"role": "system", "content": "You are kind. " * 20}


def broken() -> FastAPI:
    raise ConfigError("There is no such model.")


class InProcess:
    """What Ray Serve does with a deployment of one engine, without processes; it dies `num_deaths` times."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.num_deaths = 0
        self.deleted: list[str] = []

    def deployment(self, kind: Any, **how: Any) -> Any:
        assert how["num_replicas"] == 1
        return SimpleNamespace(bind=lambda make_app: functools.partial(kind, make_app))

    def start(self, **_: Any) -> None:
        pass

    def run(self, make: Callable[[], Any], **_: Any) -> InProcess:
        try:
            self.engine = make()
        except ConfigError as error:
            raise RuntimeError from error
        return self

    def status(self) -> Any:
        found = {"engine": SimpleNamespace(message="Traceback:\nqwen35mm.errors.ConfigError: There is no such model.")}
        return SimpleNamespace(applications={"broken": SimpleNamespace(deployments=found)})

    def delete(self, name: str, **_: Any) -> None:
        self.deleted.append(name)

    def get_replica_context(self) -> Any:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))

    def options(self, **how: Any) -> Any:
        assert how == {"method_name": "answer", "stream": True}
        return SimpleNamespace(remote=lambda call: Batches(self, call))

    def broadcast(self, method: str, call: Any) -> Any:
        async def results(**_: Any) -> list[Any]:
            return [await getattr(self.engine, method)(call)]

        return SimpleNamespace(results_async=results)


class Batches:
    """An answer on its way from an engine."""

    def __init__(self, engines: InProcess, call: Any) -> None:
        self._engines, self._batches = engines, engines.engine.answer(call)

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        if self._engines.num_deaths:
            self._engines.num_deaths -= 1
            raise RayActorError
        async for batch in self._batches:
            yield batch

    def cancel(self) -> None:
        pass


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    engines = InProcess()
    monkeypatch.setattr(replicas, "serve", engines)
    monkeypatch.setattr(replicas, "connect", lambda address: [{"CPU": 2.0}])
    monkeypatch.setattr(replicas, "ray", SimpleNamespace(shutdown=lambda: None))
    return engines


def test_a_cluster_answers_as_its_engines_do_and_asks_again_when_one_dies(
    in_process: InProcess, backend: LocalBackend
) -> None:
    body = {"messages": [user("Hello. ")], "temperature": 0, "max_tokens": 4}
    with (
        open_cluster(ClusterSettings("local", 1), lambda: create_app(backend), name="test", slots=1) as cluster,
        serving(create_front(cluster)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_S) as client,
    ):
        answer = client.post("/v1/chat/completions", json=body)
        in_process.num_deaths = 1
        again = client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, in_process.num_deaths) == (200, 0)
        assert again.json()["choices"] == answer.json()["choices"]
        assert 'qwen35mm_requests_total{end="length",engine="a"} 2.0' in client.get("/metrics").text
    assert in_process.deleted == ["test"]


def test_why_engines_cannot_start_is_said(in_process: InProcess) -> None:
    with pytest.raises(EngineError, match=r"started\. There is no such model\.$"):
        open_cluster(ClusterSettings("local", 1), broken, name="broken", slots=1).__enter__()


@pytest.mark.slow
def test_engines_that_cannot_start_are_said() -> None:
    settings = ClusterSettings("local", 1)
    # Here, since a process can have one cluster at a time: the others share theirs.
    with pytest.raises(EngineError, match=r"started\. There is no such model\.$"):
        open_cluster(settings, broken, name="broken", slots=1).__enter__()


def test_fewer_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(ConfigError, match="At most 2 engines"):
        ClusterSettings(num_engines=3, most_engines=2)


class Gated(LocalBackend):
    """Says one token and then nothing while the folder holds a file `shut`; tells in `begun` and `ended` of each."""

    folder: Path

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Any, None]:
        name = f"{os.getpid()} {time.monotonic_ns()}"
        (self.folder / f"begun {name}").touch()
        try:
            async for event in super().stream(request):
                yield event
                while isinstance(event, TextDelta) and (self.folder / "shut").exists():
                    await asyncio.sleep(0.02)
        finally:
            (self.folder / f"ended {name}").touch()


def make_app(folder: Path) -> FastAPI:
    backend = Gated.load(demo_model_path(), settings=EngineSettings(slots=1), min_segment=16)
    assert isinstance(backend, Gated)
    backend.folder = folder
    return create_app(backend, num_places=1, max_waiting=1)


class Served:
    """The front's address, and the folder that its engines look into."""

    def __init__(self, client: httpx.Client, folder: Path) -> None:
        self.client, self._folder = client, folder

    def body(self, *messages: dict[str, Any], stream: bool = False) -> dict[str, Any]:
        return {"messages": [SYSTEM, *messages], "temperature": 0, "max_tokens": 8, "stream": stream}

    def ask(self, *messages: dict[str, Any], stream: bool = False) -> tuple[str, int]:
        """What is said, and how many of the prompt's tokens were cached."""
        body = self.body(*messages, stream=stream) | {"stream_options": {"include_usage": True} if stream else None}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not stream:
            values = answer.json()
            return values["choices"][0]["message"]["content"], cached(values)
        data = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(each["choices"][0]["delta"].get("content") or "" for each in data if each["choices"])
        return text, cached(data[-1])

    def finished(self) -> dict[str, int]:
        """Requests that each engine has answered."""
        found: dict[str, int] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("qwen35mm_requests_running{"):
                found.setdefault(line.split('engine="')[1].split('"')[0], 0)
            if line.startswith(('qwen35mm_requests_total{end="length"', 'qwen35mm_requests_total{end="stop"')):
                name = line.split('engine="')[1].split('"')[0]
                found[name] = found.get(name, 0) + int(float(line.rsplit(" ", 1)[1]))
        return found

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Replies don't go on after their first token."""
        (self._folder / "shut").touch()
        try:
            yield
        finally:
            (self._folder / "shut").unlink()

    def processes(self, what: str) -> list[int]:
        """The engines' processes where a reply has begun, or ended, in order."""
        found = sorted(self._folder.glob(f"{what} *"), key=lambda path: int(path.name.split()[2]))
        return [int(path.name.split()[1]) for path in found]


def cached(values: dict[str, Any]) -> int:
    return values["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_for(found: Callable[[], Any]) -> Any:
    # However long it takes on a busy machine: only what never comes is given up.
    for _ in range(20 * 600):
        if value := found():
            return value
        time.sleep(0.05)
    raise TimeoutError("it never came")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("engines")
    load = functools.partial(make_app, folder)
    settings = ClusterSettings("local", 2, cpus_an_engine=1)
    with (
        open_cluster(settings, load, name="test", slots=1) as cluster,
        serving(create_front(cluster)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_S) as client,
    ):
        yield Served(client, folder)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text * 20}


_NAMES = (f"Conversation {number}. " for number in itertools.count())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_conversations_are_spread_and_each_turn_finds_the_one_before(served: Served, stream: bool) -> None:
    before = wait_for(lambda: len(found := served.finished()) == 2 and found)
    conversations = [[user(next(_NAMES))] for _ in range(2)]
    hits: list[list[int]] = [[], []]
    for _ in range(3):
        for messages, counts in zip(conversations, hits, strict=True):
            text, num_cached = served.ask(*messages, stream=stream)
            counts.append(num_cached)
            messages += [{"role": "assistant", "content": text}, user("And then? ")]
    for counts in hits:
        assert counts[0] < counts[1] < counts[2]
    after = served.finished()
    assert sorted(after[name] - before[name] for name in after) == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_ends_the_work_on_the_engine(served: Served, stream: bool) -> None:
    message = user(next(_NAMES))
    num_begun = len(served.processes("begun"))
    with served.shut():
        if stream:
            with served.client.stream("POST", "/v1/chat/completions", json=served.body(message, stream=True)) as answer:
                next(line for line in answer.iter_lines() if '"content":' in line and '"content":""' not in line)
        else:
            with sent(str(served.client.base_url), "/v1/chat/completions", served.body(message)):
                wait_for(lambda: served.processes("begun")[num_begun:])
        begun = wait_for(lambda: served.processes("begun")[num_begun:])
        # While it is shut: nothing else ends it.
        wait_for(lambda: served.processes("ended")[num_begun:] == begun)
    assert served.ask(message)[0]


@pytest.mark.slow
def test_an_engine_that_is_killed_before_its_answer_is_replaced_by_another(served: Served) -> None:
    message = user(next(_NAMES))
    text, _ = served.ask(message)
    messages = [message, {"role": "assistant", "content": text}, user("And then? ")]
    expected = []
    num_begun = len(served.processes("begun"))
    with served.shut():
        asking = threading.Thread(target=lambda: expected.append(served.ask(*messages)))
        asking.start()
        (process,) = wait_for(lambda: served.processes("begun")[num_begun:])
        os.kill(process, signal.SIGKILL)
        other = wait_for(lambda: served.processes("begun")[num_begun + 1 :])[0]
    asking.join(PATIENCE_S)
    assert other != process
    (found,) = expected
    assert found[0]
    # The conversation stays where it is now, and another engine is started.
    text, num_cached = served.ask(*messages, {"role": "assistant", "content": found[0]}, user("So. "))
    assert served.processes("begun")[-1] == other
    assert num_cached > found[1]
    wait_for(lambda: len(served.finished()) == 2)


@pytest.mark.slow
def test_a_stream_whose_engine_is_killed_says_so_and_the_conversation_goes_on(served: Served) -> None:
    message = user(next(_NAMES))
    expected, _ = served.ask(message)
    num_begun = len(served.processes("begun"))
    body = served.body(message, stream=True)
    with served.shut(), served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(line for line in lines if '"content":' in line and '"content":""' not in line)
        os.kill(served.processes("begun")[num_begun], signal.SIGKILL)
        last = list(lines)[-1]
    assert json.loads(last[6:])["error"]["code"] == "engine_lost"
    # Computed anew, and the same.
    assert served.ask(message, stream=True)[0] == expected
    wait_for(lambda: len(served.finished()) == 2)


@pytest.mark.slow
def test_a_response_is_gone_on_from_by_its_engine_also_while_that_is_busy(served: Served) -> None:
    wait_for(lambda: len(served.finished()) == 2)
    num_begun = len(served.processes("begun"))
    asked = {"model": "default", "input": next(_NAMES), "max_output_tokens": 4}
    first = served.client.post("/v1/responses", json=asked).json()
    # Each engine keeps its own: another one would know nothing of it.
    goes_on = {**asked, "previous_response_id": first["id"]}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(served.client.post("/v1/responses", json=goes_on))

    with served.shut():
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(served.processes("begun")) >= num_begun + 2)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(set(served.processes("begun")[num_begun:])) == 1
    assert served.client.get(f"/v1/responses/{first['id']}").json() == first


@pytest.mark.slow
def test_more_than_the_engines_take_is_refused_with_a_time(served: Served) -> None:
    wait_for(lambda: len(served.finished()) == 2)
    statuses: list[int] = []

    def ask(text: str) -> None:
        answer = served.client.post("/v1/chat/completions", json=served.body(user(text)))
        statuses.append(answer.status_code)
        assert answer.status_code == 200 or answer.headers["retry-after"]

    with served.shut():
        # One at work and one waiting at each engine.
        threads = [threading.Thread(target=ask, args=[next(_NAMES)]) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(statuses) >= 2)
    for thread in threads:
        thread.join(PATIENCE_S)
    # More where one engine got more than half of what came at once.
    assert statuses.count(429) >= 2
    assert statuses.count(200) == len(threads) - statuses.count(429)
