"""Programs beside the page: the routes of `qwen35mm serve` on the page's own model, for those with a key."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from qwen35mm.cli.chat import open_page
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import ConfigError
from qwen35mm.model import LoadedModel
from qwen35mm.model_library import BackendOptions, BackendSwitch
from qwen35mm.server.keys import Keys
from qwen35mm.settings import Logins, ModelOptions, PageOptions
from qwen35mm.web import Server, serve
from qwen35mm.web.serving.programs import ProgramAccess, program_routes
from tests.chat.fake_backend import FakeBackend
from tests.children import environment

PATIENCE_S = 60
KEY = "a-key-of-another-program"
HELLO: list[Any] = [{"role": "user", "content": "How many shapes are there?"}]


@pytest.fixture(scope="module")
def switch(demo: LoadedModel) -> Iterator[BackendSwitch]:
    options = BackendOptions(device="cpu", settings=EngineSettings(slots=2, context_length=1024))
    switch = BackendSwitch.of(options.start(demo), options)
    yield switch
    switch.close()


@pytest.fixture(scope="module")
def server(switch: BackendSwitch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("responses")
    server = serve(switch, port=0, programs=ProgramAccess(Keys([KEY]), slots=2, responses_dir=folder))
    yield server
    server.close()


def token_of(server: Server) -> str:
    assert server.token is not None
    return server.token.value


def client_of(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def test_programs_ask_the_pages_model_with_its_token_or_a_key(server: Server, switch: BackendSwitch) -> None:
    answers = set()
    for key in (token_of(server), KEY):
        client = client_of(server, key)
        assert [each.id for each in client.models.list()] == [switch.loaded.name]
        chunks = client.chat.completions.create(
            model="default", messages=HELLO, stream=True, max_tokens=8, temperature=0, reasoning_effort="none"
        )
        answers.add("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert len(answers) == 1
    assert answers != {""}
    own = httpx.get(f"{server.url}metrics", headers={"x-api-key": KEY})
    assert re.search(r"qwen35mm_requests_total\{.*(length|stop).* 2", own.text)


def test_a_response_is_kept_and_gone_on_from(server: Server) -> None:
    responses = client_of(server, KEY).responses
    first = responses.create(model="default", input="How many shapes are there?", max_output_tokens=16)
    assert responses.retrieve(first.id).output_text == first.output_text
    second = responses.create(model="default", input="And now?", previous_response_id=first.id, max_output_tokens=16)
    assert second.previous_response_id == first.id


def test_neither_a_wrong_key_nor_the_pages_own_lets_a_program_in(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "another-key-than-those").models.list()
    assert server.token is not None
    shown = {"x-qwen35mm": server.token.key}
    assert httpx.post(f"{server.url}qwen35mm/api/start", headers=shown, json={}).status_code == 200
    assert httpx.get(f"{server.url}v1/models", headers=shown).status_code == 401
    assert httpx.get(f"{server.address}v1/models").status_code == 200, "the address has the token in it"


def test_docs_stand_beside_the_page_under_their_own_policy(server: Server) -> None:
    for name in ("docs", "docs/docs.js", "docs/swagger-ui.css"):
        answer = httpx.get(f"{server.url}{name}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert httpx.get(f"{server.url}openapi.json").status_code == 401
    assert httpx.get(f"{server.url}openapi.json", headers={"x-api-key": token_of(server)}).status_code == 200


@pytest.mark.parametrize("headers", [{"origin": "https://example.org"}, {"sec-fetch-site": "cross-site"}])
def test_another_sites_page_is_refused_though_it_has_a_key(server: Server, headers: dict[str, str]) -> None:
    own = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{server.url}v1/models", headers={**own, **headers}).status_code == 403
    assert httpx.get(f"{server.url}v1/models", headers={**own, "host": "example.org"}).status_code == 421
    assert httpx.get(f"{server.url}v1/models", headers=own).status_code == 200


def test_after_a_change_programs_get_the_new_model(server: Server, switch: BackendSwitch) -> None:
    headers = {"x-qwen35mm": "1", "authorization": f"Bearer {token_of(server)}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as page:
        assert page.post("qwen35mm/api/change_model", json={"context_length": 768}).status_code == 200
        while page.post("qwen35mm/api/change_state", json={}).json()["busy"]:
            pass
    model: Any = next(iter(client_of(server, KEY).models.list()))
    assert model.max_model_len == switch.context_length == 768


async def test_a_person_finds_a_slot_however_many_programs_ask(demo: LoadedModel) -> None:
    """Of several slots one is the page's; programs wait in a line of their own."""
    running, most, end = 0, 0, asyncio.Event()

    class Slow:
        loaded = demo
        media, context_length, is_ready = FakeBackend().media, 100, True
        info = FakeBackend().info

        async def stream(self, _: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await end.wait()
            running -= 1
            raise ConfigError("that's all")
            yield

    programs: Any = Starlette(routes=program_routes(Slow(), ProgramAccess(slots=3)))  # pyright: ignore
    transport = httpx.ASGITransport(programs)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        asked = [asyncio.ensure_future(client.post("/v1/chat/completions", json={"messages": HELLO})) for _ in range(5)]
        while running < 2:
            assert not any(each.done() for each in asked)
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (running, most) == (2, 2)
        end.set()
        assert {each.status_code for each in await asyncio.gather(*asked)} == {400}
    assert most == 2


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SPACE_ID", "SPACES_ZERO_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "keys").write_text(KEY)
    return tmp_path


@pytest.mark.parametrize(
    ("page", "opens"),
    [
        ({}, True),
        ({"no_api": True}, False),
        ({"host": "0.0.0.0"}, False),
        ({"auth": Logins([("ann", "x")])}, False),
        ({"host": "0.0.0.0", "api_key_file": "keys"}, True),
    ],
)
def test_programs_are_answered_on_ones_own_page_and_elsewhere_where_keys_are_named(
    home: Path, page: dict[str, Any], opens: bool
) -> None:
    if "api_key_file" in page:
        page = {**page, "api_key_file": home / page["api_key_file"]}
    with open_page(ModelOptions(device="cpu", slots=3, no_disk_cache=True), PageOptions(**page)) as (_, how):
        access = how["programs"]
        assert (access is not None) is opens
        if opens:
            assert (access.slots, bool(access.keys)) == (3, "api_key_file" in page)


@pytest.mark.slow
def test_a_page_that_no_program_asks_imports_nothing_for_them() -> None:
    code = "import sys, qwen35mm.web, qwen35mm.server.keys; print(*(name for name in sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    names = set(done.stdout.split())
    assert "qwen35mm.web.serving.programs" in names
    assert not names & {"qwen35mm.server.app", "prometheus_client"}
