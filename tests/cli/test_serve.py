"""`qwen35mm serve`, mostly without its port."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from tests.children import environment
from tests.cli.conftest import Run

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


@pytest.mark.slow
def test_responses_are_kept_where_it_is_said(asked: Callable[..., Any], tmp_path: Path) -> None:
    path = f"/v1/responses/{asked('POST', '/v1/responses', json=ASKED).json()['id']}"
    folder = tmp_path / "data" / "qwen35mm" / "responses"
    assert (folder / "conversations.sqlite").is_file()
    assert asked("GET", path).status_code == 200
    assert asked("GET", path, "--no-store").status_code == 404
    assert asked("GET", path, "--responses-dir", folder).status_code == 200
    assert asked("GET", path, "--responses-dir", tmp_path / "other").status_code == 404
    folder.rename(tmp_path / "moved")
    assert asked("POST", "/v1/responses", "--no-store", json=ASKED).json()["store"]
    assert not folder.exists()


@pytest.mark.slow
def test_engines_of_a_cluster_are_started_with_what_the_command_was_given(
    asked: Callable[..., Any], qwen35mm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.serve")
    # Engines are started elsewhere: what is named by a way from here is found there, too.
    monkeypatch.chdir(tmp_path)
    options = ["--ray", "local", "--replicas", 1, "--responses-dir", "kept", "--context-length", 100]
    assert asked("POST", "/v1/responses", *options, json=ASKED).json()["status"] == "incomplete"
    assert (tmp_path / "kept" / "conversations.sqlite").is_file()
    too_long = asked("POST", "/v1/responses", *options, json={"input": "Hello " * 100})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    refused = qwen35mm("serve", "--ray", "somewhere")
    assert refused.returncode == 1
    assert "There is no Ray cluster at 'somewhere'" in refused.stderr
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
