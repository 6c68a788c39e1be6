"""Servers side by side: all are asked the same, and the table has what their clients saw."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import serving
from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.engine import EngineSettings
from qwen35mm.server.app import create_app
from tests.benchmarks.conftest import RunHere
from tests.server.conftest import serving as serving_app


class Served:
    """In place of `Server`: one application for all of them, and their commands."""

    load_s = 0.5
    commands: dict[str, list[str]]
    address: str

    def __init__(self, name: str, command: list[str], model: str) -> None:
        self.name, self.model = name, "default"
        self.commands[name] = command

    def close(self) -> None:
        del self.commands[self.name]


@pytest.fixture
def asked(demo: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The requests' bodies."""
    backend = LocalBackend(demo, settings=EngineSettings(slots=2))
    bodies: list[dict[str, Any]] = []
    ask = serving.ask

    async def noting(client: Any, body: dict[str, Any], *rest: Any) -> Any:
        bodies.append(json.loads(json.dumps(body)))
        return await ask(client, body, *rest)

    with contextlib.closing(backend), serving_app(create_app(backend, num_places=2)) as address:
        monkeypatch.setattr(Served, "commands", {}, raising=False)
        monkeypatch.setattr(Served, "address", address, raising=False)
        monkeypatch.setattr(serving, "Server", Served)
        monkeypatch.setattr(serving, "ask", noting)
        yield bodies


def test_clients_of_every_server_see_the_same(asked: list[dict[str, Any]], on_demo: RunHere) -> None:
    options = ["--clients", "1,2", "--prompt-tokens", "150", "--reply-tokens", "3", "--conversations", "2"]
    data = on_demo("serving", *options, "--peer", "transformers", "--peer", "llama.cpp", *LLAMA)
    (rows,) = data["tables"].values()
    names = ["qwen35mm", "transformers", "llama.cpp"]
    assert [(row["server"], row["clients"]) for row in rows] == [
        (name, clients) for clients in (1, 2) for name in names
    ]
    for row in rows:
        for turn in ("first turn", "second turn"):
            assert 0 < row[f"{turn}: first token, s"] <= row[f"{turn}: 95 %"] <= row[f"{turn}: worst"]
        read = row["clients"] * row["first turn: prompt"] / row["first turn: worst"]
        assert row["prompt tok/s"]["low"] == pytest.approx(read, rel=0.1)
        assert row["tok/s"]["count"] == 2 / row["clients"]
        assert 140 < row["first turn: prompt"] < row["second turn: prompt"] < 250
        assert row["second turn: cached"] > 100
    # One to warm up, two one after the other, two at one time: two turns each, for every server.
    assert len(asked) == (1 + 2 + 2) * 2 * 3
    firsts = [body["messages"][0]["content"] for body in asked if len(body["messages"]) == 1]
    assert len(set(firsts)) == 5
    assert all(firsts.count(text) == 3 for text in firsts)
    assert {body["max_tokens"] for body in asked} == {3}
    assert [len(body["messages"]) for body in asked[:4]] == [1, 3, 1, 3]
    assert Served.commands == {}, "every server has ended"


def test_a_long_prompt_has_company(
    asked: list[dict[str, Any]], on_demo: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_SHORT_EVERY_S", 0.01)
    data = on_demo("serving", "--beside", "600")
    ((row,),) = data["tables"].values()
    assert row["shorts"] == len(asked) - 6
    assert 0 < row["short beside, s"] <= row["largest"]
    assert all(row[f"long {name}, s"] > 0 for name in ("alone", "with shorts", "with reply"))
    assert row["reply beside, tok/s"] >= 0
    texts = [body["messages"][0]["content"] for body in asked]
    assert len(set(texts)) == len(texts)
    assert sorted({body["max_tokens"] for body in asked}) == [1, 600]


LLAMA = ["--llama-server", __file__, "--gguf", __file__]


def test_each_server_is_started_for_all_clients(tmp_path: Path) -> None:
    values = {
        "model": str(demo_model_path()),
        "device": "cpu",
        "dtype": "bfloat16",
        "clients": [1, 8],
        "ray": 2,
        "beside": 0,
        "weights": "int8",
    }
    values |= {"prompt_tokens": 100, "reply_tokens": 10, "peer": ["transformers", "llama.cpp"]}
    arguments = Namespace(**values, gguf=[Path("some.gguf")], program=Path("llama-server"))
    found = {name: command for name, command, _ in serving.commands(arguments, tmp_path)}
    assert list(found) == ["qwen35mm", "qwen35mm --replicas 2", "transformers", "llama.cpp"]
    assert found["qwen35mm"][found["qwen35mm"].index("--slots") + 1] == "8"
    llama = found["llama.cpp"]
    assert llama[llama.index("--parallel") + 1] == "8"
    assert int(llama[llama.index("--ctx-size") + 1]) == 8 * int(
        found["qwen35mm"][found["qwen35mm"].index("--context-length") + 1]
    )
    assert all("{port}" in command for command in found.values())
    assert str(torch.get_num_threads()) in llama
    # What transformers gets has the words and not the eyes, whose processor takes another library.
    text = Path(found["transformers"][4])
    assert json.loads((text / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert (text / "tokenizer.json").exists()
    assert not list(text.glob("*processor*"))


def test_a_server_that_does_not_start_is_quoted() -> None:
    with pytest.raises(SystemExit, match=r"some server isn't ready \(status 3\):\nno model on port \d+"):
        serving.Server("some server", ["sh", "-c", "echo no model on port {port}; exit 3"], "m")


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.95, 4), (0.0, 1)])
def test_percentiles_are_values_that_were_seen(share: float, expected: float) -> None:
    assert serving.percentile([4, 1, 3, 2], share) == expected


def test_words_are_the_same_each_time_and_different_for_each_client() -> None:
    script = serving.Script(Namespace(model=str(demo_model_path()), prompt_tokens=50))
    assert script.words(1, 0, 0, 0) == script.words(1, 0, 0, 0) != script.words(1, 0, 1, 0)
    assert len(script.words(1, 0, 0, 1)) < len(script.words(1, 0, 0, 0))
