"""Responses by their ids: whose they are, how long they stay, and what goes with them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from qwen35mm.assets import asset_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.contract import GenerationRequest, Image, TextDelta
from qwen35mm.errors import EngineError, NotFoundError, StorageError
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Caller, Keys
from qwen35mm.server.openai.responses import routes
from qwen35mm.server.openai.responses.items import Turn, item_id
from qwen35mm.server.openai.responses.kept import ON_DISK, KeptResponses, Past
from qwen35mm_preprocess import MediaLimits, MediaSourceError
from tests.server.conftest import HTTP, Scripted, sample, serving
from tests.server.openai.test_responses import ask, check, events_of, picture

ANN, BOB = Caller("ann"), Caller("bob")
KEYS = ("first-key-of-sixteen", "second-key-of-sixteen")
PICTURE = asset_path("samples").joinpath("two-shapes.jpg").read_bytes()


@pytest.fixture
def kept(tmp_path: Path) -> KeptResponses:
    return KeptResponses.on_disk(tmp_path)


def add(kept: KeptResponses, previous: str | None = None, *, file: bytes = b"", caller: Caller = ANN) -> str:
    """A response that goes on from another one; its id."""
    past = kept.begin() if previous is None else kept.past(caller, previous)
    question, node = new_id(), new_id()
    content: list[dict[str, Any]] = [{"type": "input_text", "text": f"turn {len(past.turns) // 2}"}]
    content += [{"type": "input_image", "detail": "auto", "media": 0}] if file else []
    asked = {"id": item_id("message", question, 0), "type": "message", "role": "user", "content": content}
    said = {"id": item_id("message", node, 0), "type": "message", "role": "assistant", "content": []}
    response = {"id": f"resp_{node}", "status": "completed", "model": "demo", "output": [said]}
    turn = Turn((asked,), (Image(file),) if file else ())
    kept.add(caller, past, question, turn, (), response, MediaLimits())
    return response["id"]


def texts(past: Past) -> list[str]:
    return [turn.items[0]["content"][0]["text"] for turn in past.turns[::2]]


def test_a_response_branches_and_is_its_callers_alone(kept: KeptResponses) -> None:
    first = add(kept, file=PICTURE)
    second, other = add(kept, first), add(kept, first)
    third = add(kept, second)
    assert texts(kept.past(ANN, third)) == ["turn 0", "turn 1", "turn 2"]
    assert texts(kept.past(ANN, other)) == ["turn 0", "turn 1"]
    assert kept.past(ANN, other).conversation == kept.past(ANN, third).conversation
    found = kept.find(ANN, first)
    (medium,) = found.turn.media
    assert Path(str(medium.source)).read_bytes() == PICTURE
    assert kept.address(medium).startswith("data:image/jpeg;base64,")
    for call in (kept.find, kept.past, kept.delete):
        for caller, name in ((BOB, first), (ANN, f"resp_{'0' * 32}"), (ANN, "resp_"), (ANN, "")):
            with pytest.raises(NotFoundError):
                call(caller, name)
    name = found.turn.items[0]["id"]
    assert kept.item(ANN, name)[0]["role"] == "user"
    # A question's place is no response.
    question = name.removeprefix("msg_")[:32]
    for caller, item in ((BOB, name), (ANN, name + "1"), (ANN, f"msg_{'0' * 33}"), (ANN, "x")):
        with pytest.raises(NotFoundError):
            kept.item(caller, item)
    with pytest.raises(NotFoundError):
        kept.find(ANN, f"resp_{question}")


def test_what_is_deleted_goes_with_the_last_that_goes_on_from_it(kept: KeptResponses, tmp_path: Path) -> None:
    first = add(kept, file=PICTURE)
    second = add(kept, first)
    third, other = add(kept, second), add(kept, second)
    item = kept.find(ANN, first).turn.items[0]["id"]
    for name in (first, second):
        kept.delete(ANN, name)
        for call in (kept.find, kept.past, kept.delete):
            with pytest.raises(NotFoundError):
                call(ANN, name)
    with pytest.raises(NotFoundError):
        kept.item(ANN, item)
    assert texts(kept.past(ANN, other)) == ["turn 0", "turn 1", "turn 2"]
    kept.delete(ANN, third)
    assert list(tmp_path.glob("media/??/*"))
    kept.delete(ANN, other)
    assert not list(tmp_path.glob("media/??/*"))
    assert ConversationStore(tmp_path).find("api:ann") == []
    again = add(kept, add(kept))
    kept.delete(ANN, again)
    assert ConversationStore(tmp_path).find("api:ann") != []


def test_the_oldest_go_where_there_are_too_many(tmp_path: Path) -> None:
    kept = KeptResponses(ConversationStore(tmp_path), replace(ON_DISK, conversations=2))
    first, second, third, theirs = add(kept), add(kept), add(kept), add(kept, caller=BOB)
    for _ in range(16):
        theirs = add(kept, theirs, caller=BOB)
    with pytest.raises(NotFoundError):
        kept.find(ANN, first)
    assert [json.dumps(kept.find(ANN, name).response["id"]) for name in (second, third)]
    assert kept.find(BOB, theirs)


def test_in_memory_nothing_stays() -> None:
    kept = KeptResponses.in_memory()
    medium = kept.find(ANN, add(kept, add(kept, file=PICTURE))).turn
    assert medium.media == ()
    folder = Path(str(kept.find(ANN, add(kept, file=PICTURE)).turn.media[0].source)).parent
    assert folder.exists()
    del kept
    assert not folder.exists()


def test_responses_outlive_a_restart_and_are_apart_by_key(
    backend: LocalBackend, client: openai.OpenAI, refused: Callable[..., Any], tmp_path: Path
) -> None:
    def started() -> Any:
        return serving(create_app(backend, keys=Keys([*KEYS]), kept=KeptResponses.on_disk(tmp_path)))

    with started() as address:
        first = ask(client.with_options(base_url=f"{address}/v1", api_key=KEYS[0]), picture())
    with started() as address:
        mine, theirs = (client.with_options(base_url=f"{address}/v1", api_key=key) for key in KEYS)
        assert mine.responses.retrieve(first.id).to_dict() == first.to_dict()
        second = ask(mine, "And the colours?", previous_response_id=first.id)
        assert second.usage.input_tokens > first.usage.input_tokens
        for call in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.input_items.list):
            assert refused(call, response_id=first.id).status_code == 404
        assert refused(ask, client=theirs, previous_response_id=first.id).status_code == 400
        reference = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "And?"}]
        assert refused(ask, client=theirs, given=reference).status_code == 404
        assert ask(mine, reference).status == "completed"


@pytest.mark.parametrize("error", [StorageError("The disk is full."), MediaSourceError("The file is gone.")])
def test_an_answer_is_given_though_it_cannot_be_kept(
    error: Exception, backend: LocalBackend, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptResponses.in_memory()

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(kept, "add", fail)
    with serving(create_app(backend, kept=kept)) as address:
        client = client.with_options(base_url=f"{address}/v1")
        whole = ask(client)
        streamed = list(ask(client, stream=True))[-1].response  # pyright: ignore
        assert (whole.status, whole.store, streamed.store) == ("completed", False, False)
        assert streamed.output_text == whole.output_text


def test_a_kept_response_is_there_until_it_is_deleted(
    client: openai.OpenAI, address: str, refused: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(client, [{"role": "developer", "content": "Look."}, *picture()])
    second = ask(client, "And?", previous_response_id=first.id)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    got = HTTP.get(f"{address}/v1/responses/{first.id}/input_items").json()
    check(ResponseItemList, got)
    pages = list(client.responses.input_items.list(first.id, limit=1, order="asc"))
    assert [item.id for item in pages] == [item["id"] for item in reversed(got["data"])]
    assert [part.to_dict() for part in pages[1].content] == [  # pyright: ignore
        {"type": "input_image", "detail": "auto"},
        {"type": "input_text", "text": "How many shapes are there?"},
    ]
    (shown, _) = client.responses.input_items.list(first.id, include=["message.input_image.image_url"])
    assert shown.content[0].image_url == sample("two-shapes.jpg")  # pyright: ignore
    assert len(list(client.responses.input_items.list(second.id))) == 1
    monkeypatch.setattr(routes, "_MAX_PAGE_BYTES", 10)
    page = client.responses.input_items.list(first.id, include=["message.input_image.image_url"], order="asc")
    assert (len(page.data), page.has_more) == (1, True)
    error = refused(client.responses.input_items.list, response_id=first.id, include=["message.input_image.image_url"])
    assert (error.code, error.param) == ("too_large", "include")
    assert refused(client.responses.cancel, response_id=first.id).status_code == 400
    client.responses.delete(first.id)
    unknown = f"resp_{'0' * 32}"
    not_kept = ask(client, store=False)
    assert not not_kept.store
    for name in (first.id, unknown, not_kept.id, "resp_x", "x" * 5000):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            assert refused(call, response_id=name).status_code == 404
        error = refused(ask, client=client, previous_response_id=name)
        assert (error.status_code, error.code) == (400, "previous_response_not_found")
    # What went on from it is still there, with all that it knows.
    assert ask(client, "And?", previous_response_id=second.id).usage.input_tokens > second.usage.input_tokens


class Failing(Scripted):
    """The model's backend, but its replies end with an error after the first piece."""

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Any]:
        async for event in super().stream(request):
            yield event
            if isinstance(event, TextDelta):
                raise EngineError("The model broke.")


def test_a_response_that_fails_says_so_and_is_not_gone_on_from(
    backend: LocalBackend, client: openai.OpenAI, refused: Callable[..., Any]
) -> None:
    failing = Failing(backend)
    failing.text = "Hello"
    with serving(create_app(failing)) as address:  # pyright: ignore[reportArgumentType]
        *_, done, error, failed = events_of(address)
        assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
        assert (error["type"], error["message"]) == ("error", "The model broke.")
        assert failed["type"] == "response.failed"
        response = failed["response"]
        assert (response["status"], response["error"]) == (
            "failed",
            {"code": "server_error", "message": "The model broke."},
        )
        client = client.with_options(base_url=f"{address}/v1")
        assert client.responses.retrieve(response["id"]).to_dict() == Response.construct(**response).to_dict()
        assert refused(ask, client=client, previous_response_id=response["id"]).code == "previous_response_not_found"
        assert refused(ask, client=client).status_code == 500
