from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from qwen35mm.assets import demo_model_path
from qwen35mm.config import ModelConfig
from qwen35mm.contract import Message
from qwen35mm.prompt import ChatTemplate, PromptBuilder
from qwen35mm.tokenizer import Tokenizer
from tests.prompt.templates import lenient, switching


@pytest.fixture(scope="session")
def oracle():
    """transformers' tokenizer of the demo checkpoint."""
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig.from_pretrained(demo_model_path())


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate.from_pretrained(demo_model_path())


@pytest.fixture(scope="session")
def thinking_template(template) -> ChatTemplate:
    """The demo's template, but it thinks unless told not to."""
    switch = "if enable_thinking else"
    assert template.source.count(switch) == 1
    return ChatTemplate(template.source.replace(switch, "if enable_thinking is not defined or enable_thinking else"))


@pytest.fixture(scope="session")
def switching_template(template) -> ChatTemplate:
    """The demo's template with the switches of newer ones."""
    return ChatTemplate(switching(template.source))


@pytest.fixture(scope="session")
def lenient_template(template) -> ChatTemplate:
    """The demo's template, but it writes system messages at their places and needs no user's message."""
    return ChatTemplate(lenient(template.source))


@pytest.fixture(scope="session")
def build(tokenizer, template, config):
    """A prompt, or a history, of messages as objects or in OpenAI's form."""

    def build(
        messages, media=(), *, template=template, min_segment=128, history=False, enable_thinking=False, **options
    ):
        messages = [m if isinstance(m, Message) else Message.from_dict(m) for m in messages]
        prompts = PromptBuilder(tokenizer, template, config, min_segment=min_segment)
        make = prompts.history if history else prompts.prompt
        return make(messages, media, enable_thinking=enable_thinking, **options)

    return build


@pytest.fixture(scope="session")
def theirs(oracle, template):
    def theirs(messages, *, template=template, enable_thinking=False, **options):
        if "continue_final_message" not in options:
            options = {"add_generation_prompt": True, **options}
        return oracle.apply_chat_template(
            messages,
            chat_template=template.source,
            enable_thinking=enable_thinking,
            return_dict=False,
            **options,
        )

    return theirs
