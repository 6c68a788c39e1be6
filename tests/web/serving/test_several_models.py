"""A page with several models: which one answers it, what it says of them, and programs beside it."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import httpx
import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.shelf import LentBackend
from qwen35mm.chat.replies.turns import Person
from qwen35mm.chat.settings import Settings
from qwen35mm.cli.chat import open_page
from qwen35mm.errors import ConfigError
from qwen35mm.model import LoadedModel
from qwen35mm.model_library import HUB_MODELS, BackendSwitch
from qwen35mm.settings import ModelsOptions, PageOptions
from qwen35mm.web import serve
from qwen35mm.web.serving.models import Models as PageModels
from qwen35mm.web.serving.programs import ProgramAccess
from qwen35mm.web.serving.servers import Servers
from qwen35mm_preprocess.say import english
from tests.server.instant import TEXT
from tests.server.test_several import ASKED, Models
from tests.web.serving.test_servers import PATIENCE_S, changed


@pytest.fixture
def models(demo: LoadedModel) -> Models:
    return Models(demo, memory_bytes=1)


@pytest.fixture
def page(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    models.shelf.put("demo", models.shelf.offers[0].load(print))
    backend = BackendSwitch(models.shelf, "demo")
    for name in ("QWEN35MM_MODELS", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "models"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    server = serve(backend, port=0, token="", data_dir=tmp_path, programs=ProgramAccess())
    with httpx.Client(base_url=server.url, headers={"x-qwen35mm": "1"}, timeout=PATIENCE_S) as client:
        yield client
    server.close()


@pytest.fixture
def ask(page: httpx.Client) -> Any:
    def call(method: str, **arguments: Any) -> Any:
        answer = page.post(f"qwen35mm/api/{method}", json=arguments)
        return answer.json() if answer.is_success else answer.json()["error"]["message"]

    return call


def told(ask: Any) -> list[tuple[str, bool, bool]]:
    listed = [each for each in ask("models")["models"] if each["is_offered"]]
    return [(each["name"], each["current"], each["is_loaded"]) for each in listed]


def answered(ask: Any, page: httpx.Client, method: str = "send", **asked: Any) -> Any:
    """A question's answer when it has ended."""
    sent = ask(method, **({"text": "Hello"} | asked))
    reply, chat = sent["reply"], sent["chat"]["id"]
    with page.stream("POST", "qwen35mm/watch", json={"answers": [reply]}) as stream:
        for _ in stream.iter_lines():
            pass
    return next(each for each in ask("open", conversation=chat)["messages"] if each["id"] == reply)


def test_another_of_the_models_answers_and_the_first_again(ask: Any, page: httpx.Client, models: Models) -> None:
    app = ask("start")["app"]
    assert (app["model"], app["models"], app["has_several"], app["suggestion"]) == ("demo", True, True, None)
    assert told(ask) == [("demo", True, True), ("bee", False, False)]
    listed = ask("models")
    assert [each["displaces"] for each in listed["models"][:2]] == [False, True]
    assert [each["name"] for each in listed["models"][2:]] == ["demo"], "the one of this machine, of another folder"
    assert len(listed["downloads"]) == len(HUB_MODELS)
    assert answered(ask, page)["model"] == "demo"
    assert changed(ask, source="bee") is None
    assert told(ask) == [("demo", False, False), ("bee", True, True)]
    assert ask("start")["app"]["settings"]["adapters"] == ["poet"]
    assert answered(ask, page)["model"] == "bee"
    # One that has left still counts what is typed, and comes back for the next answer.
    assert changed(ask, source="demo") is None
    page.post("v1/chat/completions", json=ASKED | {"model": "bee"}).raise_for_status()
    assert told(ask) == [("demo", True, False), ("bee", False, True)]
    assert ask("measure", text="Hello")["tokens"]["all"] > 0
    assert ask("memory")
    models.may_load.clear()
    sent = ask("send", text="Hello")
    with page.stream("POST", "qwen35mm/watch", json={"answers": [sent["reply"]]}) as stream:
        lines = stream.iter_lines()
        while "Loading the model" not in next(lines):
            pass
        models.may_load.set()
        assert any(TEXT in line for line in lines)
    assert told(ask) == [("demo", True, True), ("bee", False, False)]
    assert "There is no folder 'other'" in english(changed(ask, source="other"))


def test_a_tab_is_answered_by_the_model_that_it_shows(ask: Any, page: httpx.Client, models: Models) -> None:
    changed(ask, source="bee")
    told = "Another model answers now: {}. Reload the page to use it."
    assert english(ask("send", text="Hello", model="demo")) == told.format("bee")
    models.shelf._memory_bytes = 2
    page.post("v1/chat/completions", json=ASKED | {"model": "demo"}).raise_for_status()
    assert answered(ask, page, model="demo")["model"] == "demo"
    chat = ask("send", text="Hello", model="bee")["chat"]
    reply = chat["messages"][-1]
    assert reply["model"] == "bee"
    ask("stop", node=reply["id"])
    again = {"conversation": chat["id"], "node": reply["parent"]}
    assert answered(ask, page, "again", **again, model="demo")["model"] == "demo"
    gone = {"conversation": chat["id"], "node": reply["id"], "model": "gone"}
    assert english(ask("continue", **gone)) == told.format("demo")


def test_trouble_with_another_model_keeps_the_one_that_answers(ask: Any, page: httpx.Client, models: Models) -> None:
    models.is_damaged = True
    assert "'bee' can't be loaded: model.safetensors is cut off." in english(changed(ask, source="bee"))
    assert ask("start")["app"]["model"] == "demo"
    assert english(ask("models")["models"][1]["reason"]) == "model.safetensors is cut off."
    assert answered(ask, page)["model"] == "demo"


def test_one_change_at_a_time(ask: Any, models: Models) -> None:
    models.may_load.clear()
    assert ask("change_model", source="bee")["busy"]
    assert "already loading" in english(ask("change_model", source="demo"))
    threading.Timer(0, models.may_load.set).start()
    while ask("change_state")["busy"]:
        pass
    assert ask("start")["app"]["model"] == "bee"


async def test_a_model_that_waits_for_others_answers_need_not_be_waited_for(models: Models, tmp_path: Path) -> None:
    models.shelf.put("demo", models.shelf.offers[0].load(print))
    switch = BackendSwitch(models.shelf, "demo")
    rest = AsyncMock()
    api, me = PageModels(switch, rest, Servers(tmp_path / "servers.json")), Person("me")
    async with models.shelf.lease("demo"):
        await api.change_model(me, source="bee")
        with anyio.fail_after(PATIENCE_S):
            while not (state := api.state())["is_waiting"]:
                await asyncio.sleep(0)
            assert english(state["label"]) == "Waiting for the answer in progress"
            await api.cancel_change(me)
            while (state := api.state())["busy"]:
                await asyncio.sleep(0)
    assert (state["error"], state["is_cancelled"]) == (None, True)
    assert (switch.name, models.shelf.num_waiting) == ("demo", 0)
    assert models.shelf.is_open("demo")


def test_programs_name_any_of_them(page: httpx.Client) -> None:
    for name in ("bee", "demo"):
        assert page.post("v1/chat/completions", json=ASKED | {"model": name}).json()["model"] == name
    found = page.get("v1/models").json()["data"]
    assert {each["id"]: each["status"]["value"] for each in found if "parent" not in each}["demo"] == "loaded"
    assert page.post("v1/chat/completions", json=ASKED | {"model": "other"}).status_code == 404


def test_a_model_of_this_machine_comes_beside_those_of_the_command_line_or_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("QWEN35MM_MODELS", str(tmp_path / "models"))
    other = shutil.copytree(demo_model_path(), tmp_path / "models" / "other")
    options = ModelsOptions(device="cpu", context_length=512, model=["assets/demo=one", "assets/demo=two"])
    with open_page(options, PageOptions(data_dir=tmp_path / "data")) as (backend, how):
        assert isinstance(backend, BackendSwitch)
        server = serve(backend, **{**how, "port": 0, "token": "", "tools": ()})
        try:
            with httpx.Client(base_url=server.url, headers={"x-qwen35mm": "1"}, timeout=PATIENCE_S) as client:

                def ask(method: str, **arguments: Any) -> Any:
                    answer = client.post(f"qwen35mm/api/{method}", json=arguments)
                    assert answer.is_success, answer.text
                    return answer.json()

                names = ["one", "two", "other"]
                listed = ask("models")["models"]
                assert [(each["name"], each["is_offered"]) for each in listed] == [
                    *zip(names, (True, True, False), strict=True)
                ]
                assert ask("plan", source=str(other))["leaving"] == []
                monkeypatch.setattr(backend.shelf, "_memory_bytes", backend.shelf.offers[0].num_bytes + 1)
                assert ask("plan", source=str(other))["leaving"] == [{"name": "one", "is_demo": True}]
                assert changed(ask, source=str(other)) is None
                assert told(ask) == [("one", False, False), ("two", False, False), ("other", True, True)]
                assert ask("start")["app"]["model"] == "other"
                programs = client.get("v1/models").json()["data"]
                assert [each["id"] for each in programs] == names
                assert changed(ask, source="two") is None
                assert ask("start")["app"]["model"] == "two"
        finally:
            server.close()


def test_the_command_opens_it_with_the_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ModelsOptions(device="cpu", model=["assets/demo=one", "assets/demo=two"], keep_alive=60.0)
    with open_page(options, PageOptions()) as (backend, how):
        assert isinstance(backend, LentBackend)
        assert backend.info.name == "one"
        assert backend.shelf.state("two") == "unloaded"
        assert how["programs"] is not None
        assert Settings.read({}).adapter(backend.info) is None
    # Where strangers share the page, each model has their limits, and programs need keys.
    with open_page(options, PageOptions(host="0.0.0.0")) as (backend, how):
        assert isinstance(backend, LentBackend)
        assert (backend.context_length, [each.num_slots for each in backend.shelf.offers]) == (8192, [2, 2])
        assert how["programs"] is None
    # `qwen35mm.cli.chat` is the command.
    monkeypatch.setattr(sys.modules["qwen35mm.cli.chat"], "zero_gpu", lambda: print)
    with pytest.raises(ConfigError, match="On ZeroGPU the page has one model"), open_page(options, PageOptions()):
        pass
