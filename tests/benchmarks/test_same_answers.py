"""Answers beside llama.cpp's, with a server that says what it is told to."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import httpx
import pytest
from PIL import Image

from benchmarks import same_answers
from qwen35mm.assets import demo_model_path


def picture(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(out, "JPEG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((256, 256), (256, 256)), ((300, 290), (288, 288)), ((64, 64), (256, 256)), ((60, 240), (128, 512)),
        ((300, 220), (320, 224)), ((1000, 1000), (512, 512)), ((1024, 256), (1024, 256)), ((1000, 270), (992, 256)),
    ],
)  # fmt: skip
def test_pictures_get_sides_that_nobody_resizes(size: tuple[int, int], expected: tuple[int, int]) -> None:
    fitted = Image.open(io.BytesIO(same_answers.whole_patches(picture(*size))))
    assert (fitted.format, fitted.size) == ("PNG", expected)


@pytest.mark.parametrize("is_same", [True, False])
def test_what_differs_is_shown_and_counted(
    is_same: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    class Server:
        address = "http://server"

        def __init__(self, name: str, command: list[str], model: str, environment: dict[str, str]) -> None:
            self.closed = False
            assert "--mmproj" in command

        def close(self) -> None:
            self.closed = True

    def post(address: str, json: dict[str, Any], timeout: float) -> httpx.Response:
        asked.append(json)
        answer = "Hello." if is_same or len(asked) == 1 else "Goodbye."
        content = {"choices": [{"message": {"content": f"{answer} "}}]}
        return httpx.Response(200, json=content, request=httpx.Request("POST", address))

    monkeypatch.setattr(same_answers, "TEXTS", {"small talk": 1})
    monkeypatch.setattr(same_answers, "PICTURES", {"color": 1})
    monkeypatch.setattr(same_answers, "answer_cases", lambda model, cases: ["Hello."] * len(cases))
    monkeypatch.setattr(same_answers, "Server", Server)
    monkeypatch.setattr(httpx, "post", post)
    files = [f"--{name}={__file__}" for name in ("llama-server", "gguf", "mmproj")]
    monkeypatch.setattr(sys, "argv", ["same_answers", "--model", str(demo_model_path()), *files])
    with pytest.raises(SystemExit) as ended:
        same_answers.main()
    *different, summary = capsys.readouterr().out.splitlines()
    assert ended.value.code == (0 if is_same else 1)
    assert different == ([] if is_same else ["color: 'Hello.' here, 'Goodbye. ' there"])
    assert summary == f"The same: 1 of 1 about texts, {int(is_same)} of 1 about pictures"
    text, about_picture = asked
    assert isinstance(text["messages"][-1]["content"], str)
    (url,) = (p["image_url"]["url"] for p in about_picture["messages"][0]["content"] if p["type"] == "image_url")
    sent = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
    assert sent.width % 32 == sent.height % 32 == 0


def test_files_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--llama-server", "/nowhere/llama-server", "--gguf", __file__, "--mmproj", __file__]
    monkeypatch.setattr(sys, "argv", ["same_answers", *options])
    with pytest.raises(SystemExit, match="2"):
        same_answers.main()
    assert "/nowhere/llama-server is no file" in capsys.readouterr().err
