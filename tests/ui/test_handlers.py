"""The handlers, called as Gradio calls them; the browser tests see the rest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen35mm.assets import asset_path
from qwen35mm.ui.handlers import ChatHandlers
from qwen35mm.ui.state import Conversation
from tests.ui.fake_backend import FakeBackend

SETTINGS = (False, 0.7, "", "")
PICTURE = asset_path("samples") / "one-shape.png"
EXAMPLES = [{"text": "echo Hi", "files": [{"path": str(PICTURE)}]}]


def pressed(index: Any, **claims: Any) -> Any:
    return SimpleNamespace(index=index, value=claims)


async def test_an_example_is_known_by_its_number() -> None:
    backend, conversation = FakeBackend(), Conversation()
    event = pressed(0, text="echo Other", files=[{"path": "/etc/hostname"}])
    views = [view async for view in ChatHandlers(backend, EXAMPLES).send_example(event, conversation, *SETTINGS)]
    assert [(turn.text, turn.files) for turn in conversation.turns] == [("echo Hi", (PICTURE,))]
    assert views[-1][0][-1]["content"] == [{"type": "text", "text": "Hi "}]


@pytest.mark.parametrize("index", [1, -1, None, "0", [0, 0]])
async def test_an_example_that_is_none_is_not_sent(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.ui.handlers.gr.Info", lambda message: None)
    backend, conversation = FakeBackend(), Conversation()
    event = pressed(index, text="echo Other", files=[{"path": str(Path("/etc/hostname"))}])
    _ = [view async for view in ChatHandlers(backend, EXAMPLES).send_example(event, conversation, *SETTINGS)]
    assert conversation.turns == []


async def test_a_closed_handler_ends_the_work() -> None:
    """What Gradio does when the browser is gone."""
    backend, conversation = FakeBackend(), Conversation()
    views = ChatHandlers(backend, EXAMPLES).send({"text": "slow"}, conversation, *SETTINGS)
    async for _ in views:
        if backend.active:
            break
    run = conversation.run
    assert run is not None
    await views.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    _ = [None async for _ in run.updates()]
    assert backend.active == 0
    assert conversation.run is None


async def test_the_box_is_emptied_once_and_then_left_alone() -> None:
    views = [
        view[2]
        async for view in ChatHandlers(FakeBackend(), EXAMPLES).send({"text": "echo a b"}, Conversation(), *SETTINGS)
    ]
    assert views[0]["value"] == {"text": "", "files": []}
    assert all("value" not in view for view in views[1:])
    assert (views[-1]["submit_btn"], views[-1]["stop_btn"]) == (True, False)


async def test_turns_share_a_conversation_until_a_new_chat() -> None:
    backend, conversation = FakeBackend(), Conversation()
    handlers = ChatHandlers(backend, EXAMPLES)
    for text in ("echo One", "echo Two"):
        _ = [view async for view in handlers.send({"text": text}, conversation, *SETTINGS)]
    _ = [view async for view in handlers.retry(conversation, *SETTINGS)]
    await handlers.new_chat(conversation)
    _ = [view async for view in handlers.send({"text": "echo Three"}, conversation, *SETTINGS)]
    names = [call.conversation for call in backend.calls]
    assert names[0] is not None
    assert names[0] == names[1] == names[2] != names[3]
    assert {(call.retain, call.tenant) for call in backend.calls} == {("conversation", None)}


async def test_on_a_shared_server_each_session_is_a_tenant() -> None:
    backend, sessions = FakeBackend(), [Conversation(), Conversation()]
    handlers = ChatHandlers(backend, EXAMPLES, shared=True)
    for conversation in sessions:
        _ = [view async for view in handlers.send({"text": "echo One"}, conversation, *SETTINGS)]
        await handlers.new_chat(conversation)
        _ = [view async for view in handlers.send({"text": "echo Two"}, conversation, *SETTINGS)]
    tenants = [call.tenant for call in backend.calls]
    assert tenants == [session.tenant for session in sessions for _ in range(2)]
    assert tenants[0] != tenants[2]


async def test_retry_without_a_question_does_nothing() -> None:
    backend = FakeBackend()
    _ = [view async for view in ChatHandlers(backend, EXAMPLES).retry(Conversation(), *SETTINGS)]
    assert backend.calls == []
