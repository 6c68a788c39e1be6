"""Servers whose models can be chosen on the page: what is kept of them, and changing to one and back."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.chat.replies.prompting import prompt_messages
from qwen35mm.chat.store.records import Attachment, Node
from qwen35mm.cli.chat import open_page
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import ConfigError, NotFoundError, Qwen35mmError, StorageError
from qwen35mm.model import LoadedModel
from qwen35mm.model_library import BackendOptions, BackendSwitch
from qwen35mm.settings import ModelOptions, PageOptions
from qwen35mm.web import Server as Page
from qwen35mm.web import serve
from qwen35mm.web.serving.programs import ProgramAccess
from qwen35mm.web.serving.servers import MAX_SERVERS, Server, Servers
from tests.backends.remote.server import ModelServer, fails, running_server
from tests.chat.fake_backend import FakeBackend

PATIENCE_S = 60
KEY = "sk-very-secret"


def test_a_server_is_kept_with_its_key_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    servers = Servers(path, Server("http://given"))
    kept = servers.add("http://a", "m", KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.id for each in servers.all()] == ["given", kept.id]
    assert Servers(path).find(kept.id).key == KEY
    assert KEY not in repr(kept)
    # The same one once more takes its place.
    again = servers.add("http://a", "m", None)
    assert [each.key for each in Servers(path).all()] == [None]
    servers.remove(again.id)
    assert KEY not in path.read_text()
    with pytest.raises(NotFoundError):
        servers.find(again.id)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("data", ["{", "[]x", '[{"address": 1}]', f'[{{"key": "{KEY}"}}]', "\xff"])
def test_a_damaged_file_is_said_to_be_and_left_alone(tmp_path: Path, data: str) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(data.encode("latin-1"))
    for use in (Servers(path).all, lambda: Servers(path).add("http://a", None, None)):
        with pytest.raises(StorageError, match="can't be read") as caught:
            use()
        assert KEY not in str(caught.value)
    assert path.read_bytes() == data.encode("latin-1")


def test_there_is_a_most_of_them(tmp_path: Path) -> None:
    servers = Servers(tmp_path / "servers.json")
    (tmp_path / "servers.json").write_text(
        json.dumps([{"id": str(n), "address": f"http://{n}", "model": None, "key": None} for n in range(MAX_SERVERS)])
    )
    with pytest.raises(ConfigError, match="100 servers"):
        servers.add("http://one.more", None, None)


@pytest.fixture(scope="module")
def other() -> Iterator[ModelServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def switch(demo: LoadedModel) -> Iterator[BackendSwitch]:
    options = BackendOptions(device="cpu", settings=EngineSettings(slots=2, context_length=512))
    switch = BackendSwitch.of(options.start(demo), options)
    yield switch
    switch.close()


@pytest.fixture(scope="module")
def served(switch: BackendSwitch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    folder = tmp_path_factory.mktemp("data")
    server = serve(switch, port=0, token="", data_dir=folder, programs=ProgramAccess())
    yield server, folder
    server.close()


@pytest.fixture
def ask(served: tuple[Page, Path]) -> Iterator[Any]:
    """Asks for one of the page's requests; an error is its words."""
    with httpx.Client(base_url=served[0].url, headers={"x-qwen35mm": "1"}, timeout=PATIENCE_S) as client:

        def call(method: str, **arguments: Any) -> Any:
            answer = client.post(f"qwen35mm/api/{method}", json=arguments)
            return answer.json() if answer.is_success else answer.json()["error"]["message"]

        yield call


def changed(ask: Any, **change: Any) -> Any:
    """Waits for a change; the error that came of it."""
    state = ask("change_model", **change)
    while state["busy"]:
        time.sleep(0.01)
        state = ask("change_state")
    return state["error"]


def test_a_server_answers_in_the_models_place_and_the_model_again(
    ask: Any, other: ModelServer, switch: BackendSwitch, served: tuple[Page, Path]
) -> None:
    other.models = ["small", "large"]
    assert ask("add_server", address=other.url) == {"names": ["small", "large"], "server": None}
    added = ask("add_server", address=other.url, model="large", key=KEY)
    assert other.headers[-1]["Authorization"] == f"Bearer {KEY}"
    assert changed(ask, server=added["server"]) is None
    app = ask("start")["app"]
    assert (app["model"], app["is_demo"], app["server"]["host"]) == ("large", False, other.host)
    # One that tells nothing of itself.
    assert any("estimate" in str(note) for note in app["server"]["notes"])
    listed = ask("models")
    assert [each["current"] for each in listed["models"]] == [False] * len(listed["models"])
    (server,) = listed["servers"]
    assert (server["name"], server["host"], server["has_key"], server["current"]) == ("large", other.host, True, True)
    assert KEY not in json.dumps(listed)
    assert stat.S_IMODE((served[1] / "servers.json").stat().st_mode) == 0o600
    # The model in this process gave its memory back, and programs are told where it is.
    with pytest.raises(Qwen35mmError, match=other.host):
        switch.loaded  # noqa: B018
    refused = httpx.post(f"{served[0].url}v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert (refused.status_code, other.host in refused.text) == (501, True)

    local = next(each for each in listed["models"] if each["is_demo"])
    assert changed(ask, source=local["source"]) is None
    assert ask("start")["app"]["server"] is None
    assert ask("remove_server", server=added["server"]) == {}
    assert ask("models")["servers"] == []
    assert KEY not in (served[1] / "servers.json").read_text()


def test_a_server_that_cannot_be_used_changes_nothing(ask: Any, other: ModelServer, switch: BackendSwitch) -> None:
    other.models = ["tiny"]
    other.model_acts = [fails(401, {"error": {"message": "Bad key."}})]
    refusal = ask("add_server", address=other.url, key="wrong-key")
    assert "401" in str(refusal)
    assert "wrong-key" not in str(refusal)
    assert "address" in str(ask("add_server", address="ftp://nowhere"))
    added = ask("add_server", address=other.url)
    other.model_acts = [fails(401, {"error": {"message": "Bad key."}})]
    assert changed(ask, server=added["server"])
    assert switch.loaded.model is not None
    assert ask("start")["app"]["server"] is None
    assert "server no longer exists" in str(ask("change_model", server="nobody"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SPACE_ID", "SPACES_ZERO_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "key").write_text(f"{KEY}\n")
    return tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_a_server_no_model_is_loaded(
    home: Path, other: ModelServer, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr("qwen35mm.model_library.options.load", None)
    other.models = ["tiny"]
    page = PageOptions(host=host, backend=other.url, backend_key_file=home / "key")
    with open_page(ModelOptions(device="cpu", max_frames=5), page) as (backend, how):
        assert isinstance(backend, BackendSwitch) is (host == "127.0.0.1")
        assert (backend.info.name, backend.info.host, backend.is_demo) == ("tiny", other.host, False)
        assert (backend.media.budget.max_frames, how["server"].address) == (5, other.url)
        assert (how["programs"] is None) is (host == "0.0.0.0")
    assert other.headers[-1]["Authorization"] == f"Bearer {KEY}"


def test_what_contradicts_a_server_is_said(home: Path, other: ModelServer) -> None:
    contradictions: list[tuple[ModelOptions, dict[str, Any]]] = [
        (ModelOptions(model="x"), {}),
        (ModelOptions(), {"backend_key": "k", "backend_key_file": home / "key"}),
        (ModelOptions(), {"backend_key_file": home / "nothing"}),
        (ModelOptions(), {"backend_model": "another", "backend": "http://127.0.0.1:9"}),
        (ModelOptions(), {"host": "0.0.0.0", "api_key_file": home / "key"}),
    ]
    for model, page in contradictions:
        with pytest.raises(Qwen35mmError), open_page(model, PageOptions(**{"backend": other.url, **page})):
            pass


def test_what_one_model_read_of_a_video_is_read_anew_by_another() -> None:
    """A server is sent frames, of which each counts by itself."""
    path = asset_path("samples/moves-up.mp4")
    there, here = Server("http://a").backend().media, FakeBackend().media
    plan = there.plan(path, "video")
    media: Any = type("Media", (), {"path": staticmethod(lambda digest: path)})
    node = Node("0" * 32, None, "user", 0.0, "?", attachments=(Attachment("ab", "video", "a.mp4", 1, plan),))
    plans = [prompt_messages([node], media, processor=each)[0].media[0].plan for each in (None, there, here)]
    assert plans == [plan, plan, None]
