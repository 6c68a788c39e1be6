"""What the chat template can be told, by each protocol, and system messages at any place."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from qwen35mm.contract import GenerationRequest, Message
from qwen35mm.errors import ConfigError
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import ChatTemplate
from qwen35mm.server.app import create_app
from qwen35mm.server.notes import HEADER
from tests.prompt.templates import always_thinking, switching
from tests.server.instant import Answer, Instant, ask

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
CLAUDE = {"messages": HELLO, "model": "default", "max_tokens": 5}
THOUGHT = {"role": "assistant", "content": "Hi", "reasoning_content": "Be polite."}


class Recording(Instant):
    """Instant, with the texts of the prompts that it is asked."""

    prompts: list[str]

    async def _answer(self, work: Any, request: Any, *, commits: bool = False) -> Any:
        self.prompts.append(self.loaded.tokenizer.decode(work.prompt.token_ids.tolist()))
        async for event in super()._answer(work, request, commits=commits):
            yield event


def backend_with(demo: LoadedModel, source: str, **options: Any) -> Recording:
    backend = Recording(replace(demo, template=ChatTemplate(source)), **options)
    backend.prompts = []
    return backend


@pytest.fixture
def backend(demo: LoadedModel) -> Recording:
    return backend_with(demo, switching(demo.template.source))


def post(backend: Instant, path: str, body: dict[str, Any], *, strict: bool = False) -> Answer:
    app = create_app(backend, strict_fields=strict)
    return asyncio.run(ask(app, path, json.dumps(body).encode(), headers=[("content-type", "application/json")]))


@pytest.mark.parametrize(
    ("path", "body", "effort"),
    [
        (CHAT, {"messages": HELLO, "reasoning_effort": "low"}, "low"),
        (CHAT, {"messages": HELLO, "reasoning_effort": "high"}, "xhigh"),
        (RESPONSES, {"input": "Hello", "reasoning": {"effort": "minimal"}}, "low"),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}},
            "low",
        ),
        ("/v1/messages", {**CLAUDE, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, "xhigh"),
        (RESPONSES, {"input": "Hello", "chat_template_kwargs": {"enable_thinking": True}}, "xhigh"),
        # A template's own option goes before the protocol's field.
        (
            CHAT,
            {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "xhigh"}},
            "xhigh",
        ),
    ],
)
def test_an_effort_reaches_the_template(backend: Recording, path: str, body: dict[str, Any], effort: str) -> None:
    answer = post(backend, path, body)
    assert answer.status == 200, answer.content
    assert HEADER not in answer.headers
    assert f"Effort: {effort}" in backend.prompts[0]


def test_no_effort_turns_thinking_off(backend: Recording) -> None:
    kwargs = {"reasoning_effort": "none"}
    for said in ({"reasoning_effort": "none"}, {"chat_template_kwargs": kwargs}):
        assert post(backend, CHAT, {"messages": HELLO, **said}).status == 200
    assert all(prompt.endswith("<think>\n\n</think>\n\n") and "Effort" not in prompt for prompt in backend.prompts)


def test_thinking_of_earlier_answers_stays_if_asked_for(backend: Recording) -> None:
    messages = [*HELLO, THOUGHT, *HELLO]
    for preserve in (True, False):
        body = {"messages": messages, "chat_template_kwargs": {"preserve_thinking": preserve}}
        assert post(backend, CHAT, body).status == 200
    assert ["Be polite." in prompt for prompt in backend.prompts] == [True, False]


def test_what_the_template_does_not_read_is_told(backend: Recording) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"mood": "good", "nothing": None, "preserve_thinking": True}}
    answer = post(backend, CHAT, body)
    assert answer.status == 200
    why = "chat_template_kwargs.mood isn't read by the model's chat template"
    assert answer.headers[HEADER] == [f"{why}; ignored"]
    refused = post(backend, CHAT, body, strict=True)
    assert refused.status == 400
    assert why in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"enable_thinking": "no"}, "enable_thinking must be true or false"),
        ({"reasoning_effort": "huge"}, "No such effort: huge"),
        ({"preserve_thinking": "x" * 20_000}, "at most 10,000"),
        ({"preserve_thinking": [[[]]] * 5000}, "at most 10,000"),
        ({"preserve_thinking": [1234] * 5000}, "at most 10,000"),
        ({"preserve_thinking": [[[]]] * 500}, ""),
    ],
)
def test_values_are_checked(backend: Recording, kwargs: dict[str, Any], words: str) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True, **kwargs}}
    answer = post(backend, CHAT, body)
    assert answer.status == (400 if words else 200)
    assert words in answer.content.decode()


def test_a_model_that_always_thinks_says_so(demo: LoadedModel) -> None:
    backend = backend_with(
        demo, always_thinking(demo.template.source.replace("if enable_thinking else", "if true else"))
    )
    assert backend.info.default_enable_thinking
    assert backend.info.thinking is False
    answer = post(backend, CHAT, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}})
    assert answer.status == 400
    assert "always thinks" in answer.json()["error"]["message"]
    assert post(backend, CHAT, {"messages": HELLO, "thinking_budget": 0}).status == 200
    assert backend.prompts[0].endswith("<think>\n")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_are_taken_anywhere(backend: Recording, role: str) -> None:
    told = {"role": role, "content": "Be brief."}
    body = {"messages": [told, told, *HELLO, told, THOUGHT, *HELLO, told]}
    answer = post(backend, CHAT, body)
    assert answer.status == 200
    assert "later ones become turns" in answer.headers[HEADER][0]
    assert post(backend, CHAT, body, strict=True).status == 400
    (prompt,) = backend.prompts
    assert prompt.count("Be brief.") == 4
    assert prompt.count("system\nBe brief.\n") == 3


def test_a_conversation_without_a_user_s_message_is_answered(backend: Recording) -> None:
    for messages in ([{"role": "system", "content": "Be brief."}], [THOUGHT]):
        assert post(backend, CHAT, {"messages": messages}).status == 200


def test_a_backend_has_options_of_its_own(demo: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Beneath those of a request, in its prompt, in its history and when it is counted."""
    source = switching(demo.template.source)
    options = {"preserve_thinking": True, "reasoning_effort": "low", "mood": "good"}
    backend = backend_with(demo, source, template_options=options)
    assert "doesn't read the option mood; it reads add_vision_id, preserve_thinking, reasoning_effort" in caplog.text
    plain = backend_with(demo, source)
    messages = [Message.from_dict(each) for each in (*HELLO, THOUGHT, *HELLO)]

    def number(of: Instant, **how: Any) -> int:
        return of.count_tokens(messages, enable_thinking=True, template_options=how or None)

    assert number(backend) == number(plain, **options)
    assert number(backend, preserve_thinking=False, reasoning_effort="medium") < number(plain)
    own, told = (
        each.history(GenerationRequest(messages[:2], enable_thinking=True, template_options=how)).prompt
        for each, how in ((backend, {}), (plain, options))
    )
    assert own.token_ids.tolist() == told.token_ids.tolist()
    with pytest.raises(ConfigError, match="not a JSON value"):
        backend_with(demo, source, template_options={"preserve_thinking": object()})


def test_the_template_is_asked_outside_the_event_loop(backend: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    asked = ChatTemplate._ask_later

    def recorded(self: ChatTemplate, options: Mapping[str, Any]) -> bool:
        threads.append(threading.current_thread().name)
        return asked(self, options)

    monkeypatch.setattr(ChatTemplate, "_ask_later", recorded)
    messages = [*HELLO, {"role": "system", "content": "Be brief."}]
    body = {"messages": messages, "chat_template_kwargs": {"preserve_thinking": [7]}}
    assert post(backend, CHAT, body).status == 200
    assert [name.startswith("qwen35mm-prompts") for name in threads] == [True]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(("said", "thinks"), [("true", True), ("On", True), ("false", False), ("off", False)])
def test_thinking_may_be_switched_by_a_word(backend: Recording, path: str, said: str, thinks: bool) -> None:
    bodies = ({name: said} for name in ("think", "thinking", "enable_thinking", "reasoning"))
    for asked in (*bodies, {"reasoning": {"enabled": said}}, {"chat_template_kwargs": {"enable_thinking": said}}):
        if path == RESPONSES and "reasoning" in asked:  # a field of its own
            continue
        backend.prompts = []
        answer = post(backend, path, {"messages" if path == CHAT else "input": HELLO, **asked})
        assert (answer.status, answer.headers.get(HEADER)) == (200, None), asked
        assert backend.prompts[0].endswith("</think>\n\n") is not thinks


def test_a_switch_that_cannot_be_read_is_told_by_its_name(backend: Recording) -> None:
    answer = post(backend, CHAT, {"messages": HELLO, "enable_thinking": "perhaps"})
    assert (answer.status, answer.headers[HEADER]) == (200, ["enable_thinking isn't supported here; ignored"])


@pytest.mark.parametrize(("path", "given"), [(CHAT, "messages"), (RESPONSES, "input")])
def test_hints_of_odd_types_are_told(backend: Recording, path: str, given: str) -> None:
    for name, value, why in (
        ("prompt_cache_key", 5, "isn't a text"),
        ("safety_identifier", {"id": 5}, "isn't a text"),
        ("user", [1], "isn't a text"),
        ("metadata", "x", "isn't an object"),
        ("top_logprobs", 3, "needs logprobs"),
    ):
        answer = post(backend, path, {given: HELLO, name: value})
        assert answer.status == 200, answer.content
        assert answer.headers[HEADER][0].startswith(f"{name} {why}")
        assert post(backend, path, {given: HELLO, name: value}, strict=True).status == 400
