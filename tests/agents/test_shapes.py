"""Sessions in the shapes of clients' requests: fields, blocks and items as the real programs were seen to send them
(`make test-agents`, November 2026), with texts and schemas of our own. Each session has three turns, is answered, and
continues its prompt from turn to turn."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any

import pytest
from fastapi import FastAPI

from qwen35mm.contract import ToolCall
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from tests.agents.scripted import Said, ScriptedBackend, is_continued, script_of
from tests.server.instant import ask

MODEL = "Qwen3.5-4B"
SYSTEM = "You help in a folder of notes. " * 60
QUESTION = "Which words are in notes.txt?"
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAUElEQVR42u3PQREAAAQAMATRP4pYUni42xospzs+q3hOQEBAQEBAQEBAQEBAQE"
    "BAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBA4N4CQ3UBhF8gRisAAAAASUVORK5CYII="
)
REPLIES = (
    Said("I read it.", thinking="First the file.", calls=(ToolCall("read", {"path": "notes.txt", "limit": 3}),)),
    Said(thinking="Now count.", calls=(ToolCall("run", {"command": "wc -w notes.txt"}),)),
    Said("Two words.", thinking="That is all."),
)
RESULTS = ("alpha\nbeta\n", "2 notes.txt\n")
READ = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "limit": {"type": ["integer", "null"], "default": None}},
    "required": ["path"],
    "additionalProperties": False,
}
_EAGER = {"eager_input_streaming": True}
RUN = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class Client(ABC):
    """One client's session: its next request from the answers so far."""

    path: str
    headers: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The next request."""

    @abstractmethod
    def take(self, content: bytes) -> str:
        """Notes an answer as the client keeps it; returns its text."""

    @abstractmethod
    def give(self, result: str) -> None:
        """Notes the result of the last answer's call."""


class AnthropicClient(Client):
    path = "/v1/messages"
    headers = (("anthropic-version", "2023-06-01"),)

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages

    def take(self, content: bytes) -> str:
        blocks: list[dict[str, Any]] = []
        inputs: dict[int, str] = {}
        for event in _events(content):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    kind = delta["type"].removesuffix("_delta")
                    block[kind] += delta[kind]
        for index, text in inputs.items():
            blocks[index]["input"] = json.loads(text)
        self._messages.append({"role": "assistant", "content": blocks})
        return "".join(block["text"] for block in blocks if block["type"] == "text")


class ClaudeCode(AnthropicClient):
    headers = (
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "context-management-2025-06-27,effort-2025-11-24"),
    )

    def __init__(self) -> None:
        reminder = {"type": "text", "text": "<system-reminder>\nNothing is committed.\n</system-reminder>"}
        question = {"type": "text", "text": QUESTION}
        late = {
            "role": "system",
            "content": [{"type": "text", "text": "# Environment\nA folder without a repository."}],
        }
        super().__init__([{"role": "user", "content": [reminder, question]}, late])

    def body(self) -> dict[str, Any]:
        messages = json.loads(json.dumps(self._messages))
        # The mark for the cache moves on with each turn.
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return {
            "model": MODEL,
            "messages": messages,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.463; cc_entrypoint=sdk-cli;"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
            ],
            "tools": [
                {"name": "read", "description": "Reads a file", "input_schema": READ},
                {"name": "later", "description": "", "input_schema": {"type": "object"}, "defer_loading": True},
                {"name": "run", "description": "Runs a command", "input_schema": RUN, "eager_input_streaming": True},
            ],
            "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
            "max_tokens": 128_000,
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "stream": True,
        }

    def give(self, result: str) -> None:
        call = self._messages[-1]["content"][-1]
        given = {"tool_use_id": call["id"], "type": "tool_result", "content": result, "is_error": False}
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
        seen = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": result}, picture],
        }
        is_first = len(self._messages) == 3
        self._messages.append({"role": "user", "content": [given if is_first else seen]})


class AiSdk(AnthropicClient):
    """The AI SDK's provider for Anthropic's servers, streaming with thinking and tools."""

    def __init__(self) -> None:
        super().__init__([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}])

    def body(self) -> dict[str, Any]:
        draft = "http://json-schema.org/draft-07/schema#"
        return {
            "model": MODEL,
            "max_tokens": 5_120,
            "thinking": {"type": "enabled", "budget_tokens": 1_024},
            "system": [{"type": "text", "text": SYSTEM}],
            "messages": self._messages,
            "tools": [
                {"name": name, "description": "A tool", "input_schema": {"$schema": draft, **schema}, **_EAGER}
                for name, schema in (("read", READ), ("run", RUN))
            ],
            "tool_choice": {"type": "auto"},
            "stream": True,
        }

    def give(self, result: str) -> None:
        call = self._messages[-1]["content"][-1]
        value = [{"type": "text", "text": result}]
        self._messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": value}]}
        )


class Codex(Client):
    path = "/v1/responses"

    def __init__(self) -> None:
        said = (
            ("developer", SYSTEM),
            ("developer", "Skills: none."),
            ("user", "<cwd>/notes</cwd>"),
            ("user", QUESTION),
        )
        self._input: list[dict[str, Any]] = [
            {
                "type": "message",
                "id": f"msg_{at}",
                "role": role,
                "content": [{"type": "input_text", "text": text}],
            }
            for at, (role, text) in enumerate(said)
        ]

    def body(self) -> dict[str, Any]:
        inner = {"type": "function", "name": "spawn", "description": "", "strict": False, "parameters": RUN}
        return {
            "model": MODEL,
            "stream": True,
            "input": self._input,
            "tools": [
                {"type": "function", "name": "read", "description": "Reads", "strict": False, "parameters": READ},
                {"type": "function", "name": "run", "description": "Runs", "strict": False, "parameters": RUN},
                {"type": "namespace", "name": "agents", "description": "Other agents", "tools": [inner]},
                {"type": "web_search", "external_web_access": True},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2",
            "client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": '{"turn_id":"1"}'},
        }

    def take(self, content: bytes) -> str:
        items = [event["item"] for event in _events(content) if event["type"] == "response.output_item.done"]
        for item in items:
            kept = {
                name: item[name] for name in ("type", "id", "status", "role", "content") if item.get(name) is not None
            }
            kept |= {name: item[name] for name in ("name", "arguments", "call_id") if name in item}
            if item["type"] == "reasoning":
                kept |= {"summary": item["summary"], "content": None, "encrypted_content": None}
                kept.pop("status", None)
            self._input.append(kept)
        return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])

    def give(self, result: str) -> None:
        output: Any = f"Wall time: 0.0000 seconds\nOutput:\n{result}"
        if any(item["type"] == "function_call_output" for item in self._input):
            output = [{"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}]
        call_id = self._input[-1]["call_id"]
        self._input.append({"type": "function_call_output", "id": "fco_1", "call_id": call_id, "output": output})


class ChatClient(Client):
    """What clients of chat completions share."""

    path = "/v1/chat/completions"
    streams = True

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.question()},
        ]

    def question(self) -> Any:
        return QUESTION

    def fields(self) -> dict[str, Any]:
        """What it sends besides the conversation."""
        return {"stream": True, "stream_options": {"include_usage": True}}

    def tool(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": "A tool", "parameters": parameters}}

    def body(self) -> dict[str, Any]:
        tools = [self.tool("read", READ), self.tool("run", RUN)]
        return {"model": MODEL, "messages": self.messages, "tools": tools, **self.fields()}

    def take(self, content: bytes) -> str:
        text = reasoning = ""
        calls: dict[int, dict[str, Any]] = {}
        for chunk in _events(content) if self.streams else [json.loads(content)]:
            for choice in chunk["choices"]:
                delta = choice["delta" if self.streams else "message"]
                text += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                for at, call in enumerate(delta.get("tool_calls") or ()):
                    known = calls.setdefault(call.get("index", at), {"id": "", "name": "", "arguments": ""})
                    known["id"] += call.get("id") or ""
                    known["name"] += call["function"].get("name") or ""
                    known["arguments"] += call["function"].get("arguments") or ""
        self.messages.append(self.kept(text, reasoning, list(calls.values())))
        return text

    def kept(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer as a message; calls have id, name and arguments."""
        return {
            "role": "assistant",
            "content": text,
            **({"reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": [self.call(call) for call in calls]} if calls else {}),
        }

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        # JavaScript writes the arguments anew, without spaces.
        arguments = json.dumps(json.loads(call["arguments"]), separators=(",", ":"))
        return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}

    def give(self, result: str) -> None:
        call_id = self.messages[-1]["tool_calls"][-1]["id"]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": self.result(result)})

    def result(self, result: str) -> Any:
        return result


class Opencode(ChatClient):
    """The AI SDK's provider for compatible servers, as opencode and Cline use it."""

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"max_tokens": 8_192, "reasoning_effort": "medium", "tool_choice": "auto"}


class QwenCode(ChatClient):
    def question(self) -> Any:
        reminder = {"type": "text", "text": "<system-reminder>\nSkills: none.\n</system-reminder>"}
        return [reminder, {"type": "text", "text": QUESTION}]

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"max_tokens": 32_000, "enable_thinking": True}

    def kept(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return super().kept(text, reasoning, calls) | {"content": text or None}

    def result(self, result: str) -> Any:
        return [{"type": "text", "text": result}]


class LiteLlm(ChatClient):
    """LiteLLM's library, which gives back all that it read."""

    streams = False

    def fields(self) -> dict[str, Any]:
        return {"stream": False, "reasoning_effort": "low"}

    def kept(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        found = super().kept(text, reasoning, calls) | {"content": text or None, "function_call": None}
        return found | {"provider_specific_fields": {"reasoning": reasoning, "refusal": None}}

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = {"arguments": call["arguments"], "name": call["name"]}
        return {"function": function, "id": call["id"], "type": "function"}

    def give(self, result: str) -> None:
        super().give(result)
        self.messages[-1]["name"] = self.messages[-2]["tool_calls"][-1]["function"]["name"]


class Smolagents(ChatClient):
    """smolagents' ToolCallingAgent: no tool messages, and stop strings beside its tools."""

    streams = False

    def question(self) -> Any:
        return [{"type": "text", "text": f"New task:\n{QUESTION}"}]

    def fields(self) -> dict[str, Any]:
        return {"stop": ["Observation:", "Calling tools:"], "tool_choice": "required", "reasoning_effort": "low"}

    def kept(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        called = f"Calling tools:\n{[self.call(call) for call in calls]}" if calls else ""
        return {"role": "assistant", "content": [{"type": "text", "text": text + called}]}

    def give(self, result: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": f"Observation:\n{result}"}]})


CLIENTS = (ClaudeCode, AiSdk, Codex, Opencode, QwenCode, LiteLlm, Smolagents)


@pytest.mark.parametrize("client_class", CLIENTS)
def test_a_session_of_three_turns_is_answered_and_hits_the_cache(client_class: type[Client], demo: LoadedModel):
    backend = ScriptedBackend(demo, script_of(REPLIES))
    app = create_app(backend, names=(MODEL,))
    client = client_class()

    texts = asyncio.run(_session(app, client))

    assert texts == ["I read it.", "", "Two words."]
    assert [len(asked.request.tools) > 0 for asked in backend.asked] == [True, True, True]
    assert all("</think>" in asked.reply for asked in backend.asked)
    first, *others = backend.asked
    assert first.num_cached_tokens == 0
    # Its own message, and at most the 128 tokens before it that no cut divides.
    assert max(asked.num_read_tokens for asked in others) < 330
    assert all(is_continued(before.prompt, after.prompt) for before, after in pairwise(backend.asked))


async def _session(app: FastAPI, client: Client) -> list[str]:
    texts = []
    for result in (*RESULTS, None):
        headers = (("content-type", "application/json"), *client.headers)
        answer = await ask(app, client.path, json.dumps(client.body()).encode(), headers=headers)
        assert answer.status == 200, answer.content
        texts.append(client.take(answer.content))
        if result is not None:
            client.give(result)
    return texts


def _events(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
