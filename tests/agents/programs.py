"""The agents that are tested: how each is installed, set up and run, and what a model calls in it.

Every session is the same: read notes.txt, replace beta by gamma, run a command, and look at a picture if the program
can show one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen35mm.contract import ToolCall
from tests.agents.scripted import Said

TASK = "Change beta to gamma in notes.txt, then show the file and look at picture.jpg."
COMMAND = "cat notes.txt > ran.txt; cat ran.txt"
DONE = "Everything is done."
MODEL = "Qwen3.5-4B"
_PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n alpha\n-beta\n+gamma\n*** End Patch\n"


@dataclass(frozen=True)
class Program:
    """An agent.

    Attributes:
        package: npm's or PyPI's, with its version.
        command: for a shell in the folder of the session; ADDRESS, TASK, MODEL, BIN (of the installation) and HOME are
            variables.
        replies: what the model replies in a session, from the session's folder.
        files: its settings by their paths in HOME, or in the session's folder if they begin with `./`. `@ADDRESS@` and
            `@MODEL@` are replaced.
        variables: of its environment.
        is_npm: else it is from PyPI.
        shows_pictures: whether the last call before the end gives the model a picture.
        continues: whether each turn begins with all of the one before. A picture that comes as a new user message does
            not: the template then leaves out the thinking of the steps before it.
        thinks: whether it asks for thinking.
        model: the name under which it asks for the model.
    """

    name: str
    package: str
    command: str
    replies: Callable[[Path], list[Said]]
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    is_npm: bool = True
    shows_pictures: bool = True
    continues: bool = True
    thinks: bool = True
    model: str = MODEL

    @property
    def version(self) -> str:
        return self._parts[2]

    @property
    def folder(self) -> str:
        """The name of its installation's folder."""
        return f"agents-{self._parts[0].removeprefix('@').replace('/', '-')}"

    @property
    def _parts(self) -> tuple[str, str, str]:
        return self.package.rpartition("@" if self.is_npm else "==")


def _steps(*steps: tuple[str, Mapping[str, Any]]) -> list[Said]:
    """A reply for each call, with thinking, and the end."""
    called = [Said(thinking=f"Step {at}.", calls=(ToolCall(*step),)) for at, step in enumerate(steps, start=1)]
    return [*called, Said(DONE, thinking="That was all.")]


def _claude(folder: Path) -> list[Said]:
    notes, picture = str(folder / "notes.txt"), str(folder / "picture.jpg")
    return _steps(
        ("Read", {"file_path": notes}),
        ("Edit", {"file_path": notes, "old_string": "beta", "new_string": "gamma"}),
        # Its result names a tool whose definition the model hasn't seen.
        ("ToolSearch", {"query": "select:WebFetch", "max_results": 1}),
        ("Bash", {"command": COMMAND, "description": "Show the file"}),
        ("Read", {"file_path": picture}),
    )


def _codex(folder: Path) -> list[Said]:
    return _steps(
        ("exec_command", {"cmd": "cat notes.txt"}),
        ("exec_command", {"cmd": "sed -i s/beta/gamma/ notes.txt"}),
        ("exec_command", {"cmd": COMMAND}),
        # Of a namespace; it closes an agent that isn't there.
        ("multi_agent_v1__close_agent", {"target": "none"}),
        ("view_image", {"path": str(folder / "picture.jpg")}),
    )


def _codex_patch(folder: Path) -> list[Said]:
    return _steps(
        ("exec_command", {"cmd": "cat notes.txt"}),
        # A custom tool, whose input is text.
        ("apply_patch", {"input": _PATCH}),
        ("exec_command", {"cmd": COMMAND}),
        ("view_image", {"path": str(folder / "picture.jpg")}),
    )


def _opencode(folder: Path) -> list[Said]:
    notes, picture = str(folder / "notes.txt"), str(folder / "picture.jpg")
    return _steps(
        ("read", {"filePath": notes}),
        ("edit", {"filePath": notes, "oldString": "beta", "newString": "gamma"}),
        ("bash", {"command": COMMAND, "description": "Show the file"}),
        ("read", {"filePath": picture}),
    )


def _qwen_code(folder: Path) -> list[Said]:
    notes, picture = str(folder / "notes.txt"), str(folder / "picture.jpg")
    return _steps(
        ("read_file", {"file_path": notes}),
        ("edit", {"file_path": notes, "old_string": "beta", "new_string": "gamma"}),
        ("run_shell_command", {"command": COMMAND, "is_background": False}),
        ("read_file", {"file_path": picture}),
    )


def _pi(folder: Path) -> list[Said]:
    return _steps(
        ("read", {"path": "notes.txt"}),
        ("edit", {"path": "notes.txt", "edits": [{"oldText": "beta", "newText": "gamma"}]}),
        ("bash", {"command": COMMAND}),
        ("read", {"path": "picture.jpg"}),
    )


def _cline(folder: Path) -> list[Said]:
    notes, picture = str(folder / "notes.txt"), str(folder / "picture.jpg")
    return _steps(
        ("read_files", {"files": [{"path": notes}]}),
        ("editor", {"path": notes, "old_text": "beta", "new_text": "gamma"}),
        ("run_commands", {"commands": [COMMAND]}),
        ("read_files", {"files": [{"path": picture}]}),
    )


def _continue(folder: Path) -> list[Said]:
    notes = str(folder / "notes.txt")
    return _steps(
        ("Read", {"filepath": notes}),
        ("MultiEdit", {"file_path": notes, "edits": [{"old_string": "beta", "new_string": "gamma"}]}),
        ("Bash", {"command": COMMAND}),
    )


def _mini_swe(folder: Path) -> list[Said]:
    return _steps(
        ("bash", {"command": "cat notes.txt"}),
        ("bash", {"command": "sed -i s/beta/gamma/ notes.txt"}),
        ("bash", {"command": COMMAND}),
        ("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {DONE}"}),
    )


def _aider(folder: Path) -> list[Said]:
    return [Said(f"notes.txt\n```\n<<<<<<< SEARCH\nbeta\n=======\ngamma\n>>>>>>> REPLACE\n```\n\n{DONE}")]


_OPENCODE = {
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "@ADDRESS@/v1", "apiKey": "none"},
            "models": {
                "@MODEL@": {
                    "limit": {"context": 262_144, "output": 8_192},
                    "reasoning": True,
                    "attachment": True,
                    "modalities": {"input": ["text", "image"], "output": ["text"]},
                    "options": {"reasoningEffort": "medium"},
                }
            },
        }
    },
    "model": "local/@MODEL@",
}
_QWEN_CODE = {
    "model": {
        "name": "@MODEL@",
        "generationConfig": {
            "modalities": {"image": True},
            "contextWindowSize": 262_144,
            # The demo model doesn't think otherwise.
            "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        },
    },
    "security": {"auth": {"selectedType": "openai", "apiKey": "none", "baseUrl": "@ADDRESS@/v1"}},
}
_PI = {
    "providers": {
        "local": {
            "baseUrl": "@ADDRESS@/v1",
            "api": "openai-completions",
            "apiKey": "none",
            "models": [
                {
                    "id": "@MODEL@",
                    "reasoning": True,
                    "input": ["text", "image"],
                    "contextWindow": 262_144,
                    "maxTokens": 8_192,
                }
            ],
        }
    }
}
_CODEX = """model = "@MODEL@"
model_provider = "local"
model_context_window = 262144
model_reasoning_effort = "medium"

[model_providers.local]
name = "qwen35mm"
base_url = "@ADDRESS@/v1"
wire_api = "responses"
"""
_CONTINUE = """name: local
version: 1.0.0
schema: v1
models:
  - name: Qwen3.5
    provider: openai
    model: @MODEL@
    apiBase: @ADDRESS@/v1
    apiKey: none
    roles: [chat, edit, apply]
    capabilities: [tool_use, image_input]
    defaultCompletionOptions:
      contextLength: 262144
      maxTokens: 8192
"""

PROGRAMS = (
    Program(
        "claude-code",
        "@anthropic-ai/claude-code@2.1.332",
        '$BIN/claude -p "$TASK" --dangerously-skip-permissions',
        _claude,
        variables={
            "ANTHROPIC_BASE_URL": "@ADDRESS@",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "@MODEL@",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "@MODEL@",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "262144",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # It refuses to skip questions as root elsewhere.
            "IS_SANDBOX": "1",
        },
    ),
    Program(
        "codex",
        "@openai/codex@0.171.0",
        '$BIN/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$TASK"',
        _codex,
        {".codex/config.toml": _CODEX},
    ),
    Program(
        # It has another tool for edits under the names of OpenAI's own models.
        "codex-patch",
        "@openai/codex@0.171.0",
        '$BIN/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$TASK"',
        _codex_patch,
        {".codex/config.toml": _CODEX},
        model="gpt-5.5",
    ),
    Program(
        "opencode",
        "opencode-ai@1.18.33",
        '$BIN/opencode run --auto "$TASK"',
        _opencode,
        {"./opencode.json": json.dumps(_OPENCODE)},
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        continues=False,
    ),
    Program(
        "qwen-code",
        "@qwen-code/qwen-code@0.24.4",
        '$BIN/qwen --yolo "$TASK"',
        _qwen_code,
        {".qwen/settings.json": json.dumps(_QWEN_CODE)},
        continues=False,
    ),
    Program(
        "pi",
        "@earendil-works/pi-coding-agent@1.6.0",
        '$BIN/pi --offline -p --model local/$MODEL --thinking medium "$TASK"',
        _pi,
        {".pi/agent/models.json": json.dumps(_PI)},
        continues=False,
    ),
    Program(
        "cline",
        "cline@3.0.65",
        "$BIN/cline auth openai-compatible --apikey none --modelid $MODEL --baseurl $ADDRESS/v1"
        ' && $BIN/cline --thinking medium "$TASK"',
        _cline,
        continues=False,
    ),
    Program(
        "continue",
        "@continuedev/cli@1.5.47",
        '$BIN/cn -p --config config.yaml --auto "$TASK"',
        _continue,
        {"./config.yaml": _CONTINUE},
        shows_pictures=False,
        thinks=False,
    ),
    Program(
        "aider",
        "aider-chat==0.86.2",
        "$BIN/aider --model openai/$MODEL --edit-format diff --yes-always --no-check-update --no-analytics"
        f' --no-show-model-warnings --auto-test --test-cmd "{COMMAND}" --message "$TASK" notes.txt',
        _aider,
        variables={"OPENAI_API_BASE": "@ADDRESS@/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        is_npm=False,
        shows_pictures=False,
        thinks=False,
    ),
    Program(
        "mini-swe-agent",
        "mini-swe-agent==2.4.6",
        '$BIN/mini -y --exit-immediately -m openai/$MODEL -t "$TASK"',
        _mini_swe,
        variables={
            "OPENAI_API_BASE": "@ADDRESS@/v1",
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        is_npm=False,
        shows_pictures=False,
        thinks=False,
    ),
)
