"""`qwen35mm serve`, mostly without its port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from qwen35mm.assets import demo_model_path
from tests.children import environment
from tests.cli.conftest import Run
from tests.small_adapters import write_adapter

ASKED = {"input": "Hello", "max_output_tokens": 2}


@pytest.fixture
def asked(qwen35mm: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Starts the command, asks what it serves, and ends it; gives the answer."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    answers: list[Any] = []

    def ask(method: str, path: str, *options: object, **how: Any) -> Any:
        def run(app: Any, **_: object) -> None:
            answers.append(TestClient(app, "http://127.0.0.1").request(method, path, **how))

        monkeypatch.setattr("qwen35mm.http.run.run", run)
        done = qwen35mm("serve", "--no-disk-cache", *options)
        assert done.returncode == 0, done.stderr
        return answers[-1]

    return ask


def test_adapters_are_models_of_their_own(asked: Callable[..., Any], qwen35mm: Run, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    as_in_vllm = json.dumps({"name": "poet", "path": str(adapter), "base_model_name": "demo"})
    chosen = ("--lora-modules", as_in_vllm, "--lora", f"{adapter}=0.5")
    found = asked("GET", "/v1/models", *chosen).json()["data"]
    assert [each["id"] for each in found] == ["demo", "poet"]
    for name in ("demo", "default"):
        done = qwen35mm("serve", "--lora", f"{name}={adapter}")
        assert f"{name} is a name of the model: give the adapter another one" in done.stderr
    for command in (("ask", "Hello"), ("caption", tmp_path, "--preset", "plain")):
        done = qwen35mm(*command, "--lora", f"poet={adapter}")
        assert "only `serve` and `chat` choose among adapters by name" in " ".join(done.stderr.split())
    done = qwen35mm("caption", tmp_path, "--preset", "plain", "--lora", adapter, "--backend", "http://127.0.0.1:1")
    assert "--lora changes a model on this machine" in " ".join(done.stderr.split())


def test_several_models_are_served_by_their_names(asked: Callable[..., Any], qwen35mm: Run, tmp_path: Path) -> None:
    demo, adapter = demo_model_path(), write_adapter(tmp_path / "adapter")
    both = ("--model", demo, "--model", f"{demo}=bee", "--keep-alive", "10m", "--served-model-name", "alias")
    found = asked("GET", "/v1/models", *both, "--lora", f"poet={adapter}").json()["data"]
    assert [(each["id"], each["status"]["value"]) for each in found] == [
        ("demo", "loaded"), ("alias", "loaded"), ("poet", "loaded"), ("bee", "unloaded")
    ]  # fmt: skip
    for name in ("bee", "poet"):
        answer = asked("POST", "/v1/responses", *both, "--lora", f"poet={adapter}", json=ASKED | {"model": name})
        assert answer.json()["model"] == name
    for options, told in (
        (("--model", demo, "--model", demo), "Two models have the name 'demo'"),
        (("--model", demo, "--model", f"{demo}=default"), "the first model has this name"),
        (("--model", demo, "--model", tmp_path), "config.json"),
        (("--model", demo, "--keep-alive", "soon"), "expected a time such as 10m"),
    ):
        assert told in " ".join(qwen35mm("serve", *options).stderr.split())


def test_responses_are_kept_where_it_is_said(asked: Callable[..., Any], tmp_path: Path) -> None:
    path = f"/v1/responses/{asked('POST', '/v1/responses', json=ASKED).json()['id']}"
    folder = tmp_path / "data" / "qwen35mm" / "responses"
    assert (folder / "conversations.sqlite").is_file()
    assert asked("GET", path, "--no-store").status_code == 404
    folder = folder.rename(tmp_path / "moved")
    assert asked("GET", path, "--responses-dir", folder).status_code == 200


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines of a cluster, in this process, as Ray Serve has been told to make them; only the latest answers."""
    pytest.importorskip("ray.serve")
    from ray import cloudpickle, serve

    from qwen35mm.server.cluster import replicas

    made: list[Any] = []

    def run(application: Any, **_: object) -> Any:
        # Ray's own objects: it looks at the options and finds the router by its name.
        told = application._bound_deployment
        assert told._deployment_config.request_router_config.get_request_router_class() is replicas.ConversationRouter
        arguments = cloudpickle.loads(cloudpickle.dumps(told.init_args))  # pyright: ignore[reportPrivateImportUsage]
        made.append(replicas.Replica(*arguments))
        return Handle(made[-1])

    known = {"deployment": serve.deployment, "run": run}
    nothing = {"start": lambda **_: None, "delete": lambda *_, **__: None}
    monkeypatch.setattr(replicas, "serve", SimpleNamespace(**known, **nothing))
    monkeypatch.setattr(replicas, "connect", lambda address: [{"CPU": 2.0}])
    return made


class Handle:
    """Ray Serve's handle of an engine in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def options(self, *, method_name: str, stream: bool) -> Any:
        assert stream

        def remote(call: Any) -> Any:
            return Answers(getattr(self._engine, method_name)(call))

        return SimpleNamespace(remote=remote)


class Answers:
    """What an engine answers, as Ray Serve streams it."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def __aiter__(self) -> Any:
        return self._answers

    def cancel(self) -> None:
        pass


def test_engines_of_a_cluster_are_started_with_what_the_command_was_given(
    asked: Callable[..., Any], qwen35mm: Run, engines: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines are started elsewhere: what is named by a way from here is found there, too.
    monkeypatch.chdir(tmp_path)
    options = ["--ray", "local", "--replicas", 1, "--responses-dir", "kept", "--context-length", 100]
    assert asked("POST", "/v1/responses", *options, json=ASKED).json()["status"] == "incomplete"
    assert (tmp_path / "kept" / "conversations.sqlite").is_file()
    too_long = asked("POST", "/v1/responses", *options, json={"input": "Hello " * 100})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert len(engines) == 2
    refused = qwen35mm("serve", "--ray", "local", "--replicas", 3)
    assert refused.returncode == 1
    assert "2 processors, too few for 3 engines" in refused.stderr
    refused = qwen35mm("serve", "--ray", "local", "--replicas", 3, "--max-replicas", 2)
    assert "At most 2 engines are fewer than the 3 at least" in refused.stderr


def test_the_command_is_ready_soon_needs_nothing_of_the_page_and_ends_cleanly(tmp_path: Path) -> None:
    kept = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data")}
    command = [sys.executable, "-X", "importtime", "-m", "qwen35mm", "serve", "--port", "0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment(**kept), cwd=tmp_path, text=True
        )
    try:
        assert process.stdout is not None
        found = re.search(r"(http://[0-9.:]+)/v1", process.stdout.readline())
        assert found, (tmp_path / "log").read_text()[-2000:]
        assert httpx.get(f"{found[1]}/ready", timeout=60).json()["status"] == "ready"
        used = psutil.Process(process.pid).cpu_times()
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    # Of a core: how long it takes is the machine's matter, which may have other things to do.
    assert used.user + used.system < 4
    imported = {line.rpartition("|")[2].strip() for line in (tmp_path / "log").read_text().splitlines()}
    assert {"torch", "fastapi", "qwen35mm.server.app"} <= imported
    assert not {name.partition(".")[0] for name in imported} & {"gradio", "pandas", "transformers", "ray"}
    assert not any(name.startswith("qwen35mm.web") for name in imported)
