"""The few settings of a chat, each starting at the checkpoint's own default."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gradio as gr
from gradio.components import Component

from qwen35mm.errors import ConfigError
from qwen35mm.sampling import SamplingParams
from qwen35mm.ui.protocol import ChatBackend


@dataclass(frozen=True)
class Settings:
    """What the settings say, ready for the backend."""

    params: SamplingParams
    enable_thinking: bool


def add_settings(backend: ChatBackend) -> list[Component]:
    """Draws the settings; the components are inputs in the order that `read_settings` takes."""
    defaults = backend.loaded.generation
    with gr.Accordion("Settings", open=False, elem_id="settings"), gr.Row(equal_height=True):
        thinking = gr.Checkbox(
            backend.loaded.template.default_enable_thinking,
            label="Think first",
            info="Slower, and better at hard questions.",
        )
        temperature = gr.Slider(
            0.0,
            2.0,
            defaults.temperature,
            step=0.05,
            label="Temperature",
            info="0: always the likeliest word.",
        )
        # Text boxes, because Gradio turns an empty number box into 0 when it is first shown.
        max_tokens = gr.Textbox(
            _shown(defaults.max_tokens),
            label="Longest answer",
            info=f"In tokens, up to the context of {backend.context_length:,}.",
            placeholder="no limit",
            max_lines=1,
        )
        seed = gr.Textbox(
            _shown(defaults.seed), label="Seed", info="Repeats an answer.", placeholder="random", max_lines=1
        )
    return [thinking, temperature, max_tokens, seed]


def read_settings(
    defaults: SamplingParams, thinking: bool, temperature: float | None, max_tokens: str, seed: str
) -> Settings:
    """The components' values in place of the checkpoint's defaults.

    Raises:
        ConfigError: a value is no number, or out of range.
    """
    if temperature is None:
        raise ConfigError("The temperature is empty: give a number from 0 to 2.")
    params = replace(
        defaults,
        temperature=float(temperature),
        max_tokens=_whole_number("longest answer", max_tokens, low=1),
        seed=_whole_number("seed", seed, low=0),
    )
    return Settings(params, bool(thinking))


def _whole_number(name: str, text: str, *, low: int) -> int | None:
    text = text.strip().replace(",", "")
    if not text:
        return None
    # Longer numbers than any use has would take long to read.
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < low:
        raise ConfigError(
            f"The {name} in the settings must be a whole number of at least {low}, or empty; got {text!r}."
        )
    return int(text)


def _shown(value: int | None) -> str:
    return "" if value is None else str(value)
