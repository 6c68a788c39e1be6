"""A checkpoint's own chat template, run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from qwen35mm.errors import CheckpointError, PromptError
from qwen35mm.outside_json import read_json
from qwen35mm.prompt.limits import TooMuchError
from qwen35mm.prompt.sandbox import MAX_SOURCE_CHARS, compile_template, plain
from qwen35mm.tokenizer import read_tokenizer_config

_MAX_REASON_CHARS = 1000
_PROBE = [{"role": "user", "content": "Hello"}]


class ChatTemplate:
    """Turns messages, as plain dicts, into the text that the model was trained on.

    Attributes:
        source: the Jinja text.
        default_enable_thinking: whether the template enables thinking by default.

    Args:
        source: the Jinja text.
        variables: further variables of the template, such as `eos_token`.

    Raises:
        CheckpointError: the template can't render a message.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self.default_enable_thinking = self._read_default()

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ChatTemplate:
        """Reads the first of chat_template.jinja, chat_template.json and tokenizer_config.json that exists.

        Raises:
            CheckpointError: the folder has no usable template.
        """
        folder = Path(folder)
        config = read_tokenizer_config(folder)
        try:
            if (path := folder / "chat_template.jinja").is_file():
                with path.open(encoding="utf-8") as file:
                    source = file.read(MAX_SOURCE_CHARS + 1)
            elif (path := folder / "chat_template.json").is_file():
                source = read_json(path).get("chat_template")
            else:
                source = config.get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path.name} can't be read ({type(error).__name__}).") from error
        if isinstance(source, list):  # several named ones
            named = [each for each in source if isinstance(each, dict)]
            source = next((each.get("template") for each in named if each.get("name") == "default"), None)
        if not isinstance(source, str):
            raise CheckpointError(
                f"{folder.name or folder}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json). A base model without one can't chat."
            )
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool,
        add_generation_prompt: bool,
    ) -> str:
        """The text of the prompt, with one placeholder per image or video.

        Raises:
            PromptError: the template refuses the messages (has its reason) or fails on them.
        """
        try:
            return self._run(messages, tools, add_generation_prompt, enable_thinking=enable_thinking)
        except TooMuchError as error:
            raise PromptError(f"The model's chat template {error}. Use another one, or send less.") from error
        except Exception as error:  # a template can raise anything
            if type(error) is TemplateError:  # its own raise_exception(...)
                reason = str(error)[:_MAX_REASON_CHARS]
                raise PromptError(f"The model's chat template refuses these messages: {reason}") from error
            raise PromptError(f"The model's chat template fails on these messages ({type(error).__name__}).") from error

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **options: Any,
    ) -> str:
        return compile_template(self.source).render(
            messages=plain(messages),
            tools=plain(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
            **options,
        )

    def _read_default(self) -> bool:
        try:
            default, on, off = (
                self._run(_PROBE, None, True, **options)
                for options in ({}, {"enable_thinking": True}, {"enable_thinking": False})
            )
        except TemplateSyntaxError as error:
            raise CheckpointError(f"The chat template has a syntax error in line {error.lineno}.") from error
        except TooMuchError as error:
            raise CheckpointError(f"The chat template {error}, and can't be used.") from error
        except Exception as error:  # a template can raise anything
            raise CheckpointError(f"The chat template can't render 'Hello' ({type(error).__name__}).") from error
        if on == off:  # no switch: thinking is on if the template always opens it
            return default.rstrip().endswith("<think>")
        return default == on


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of tokenizer_config.json, which transformers passes to every template."""
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **config}
    tokens = {}
    for name, token in named.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
