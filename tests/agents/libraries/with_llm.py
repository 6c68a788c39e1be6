"""`llm`, the command: a model of its file extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, LONG, MODEL, PERSON, error_of, png, run

HOME = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(HOME)
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {BASE}/v1\n  vision: true\n  supports_tools: true\n"
    "  supports_schema: true\n  can_stream: true\n  reasoning: true\n"
)


def _llm(*arguments, text=""):
    command = [sys.executable, "-m", "llm", *arguments, "-m", "local", "--key", "none"]
    done = subprocess.run(command, capture_output=True, text=True, input=text, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def plain():
    assert "sunny" in _llm("prompt", "Hello", "--no-stream")


def streamed():
    assert "sunny" in _llm("prompt", "Hello", "-s", "Be brief.")


def goes_on():
    _llm("prompt", "Hello")
    assert "sunny" in _llm("prompt", "And tomorrow?", "-c")


def thinking():
    assert "sunny" in _llm("prompt", "Hello", "-o", "reasoning_effort", "low")


def tools():
    tool = 'def weather(city: str) -> str:\n    """Weather of a city."""\n    return "Sunny."\n'
    for more in ((), ("--no-stream",)):
        assert "sunny" in _llm("prompt", "Weather in Rome?", "--functions", tool, *more)


def structured():
    assert json.loads(_llm("prompt", "Who?", "--schema", json.dumps(PERSON)))["age"] == 3


def image():
    import base64

    path = HOME / "a.png"
    path.write_bytes(base64.b64decode(png()))
    assert "1 media" in _llm("prompt", "See", "-a", str(path))


def overflow():
    assert "maximum context length" in str(error_of(lambda: _llm("prompt", text=LONG)))


if __name__ == "__main__":
    run(plain, streamed, goes_on, thinking, tools, structured, image, overflow)
