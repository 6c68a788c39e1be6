"""The settings of a chat: checks the page's JSON values and applies them to a request."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen35mm.contract import Backend, ModelInfo, SamplingParams
from qwen35mm.contract.sampling import NUMBERS as PARAMETERS
from qwen35mm.errors import ConfigError
from qwen35mm_preprocess import MediaBudget
from qwen35mm_preprocess.say import Said, decimal, say

MAX_SYSTEM_CHARS = 100_000
# How much of the system prompt is stored with each answer.
_SHOWN_SYSTEM_CHARS = 200


@dataclass(frozen=True)
class Field:
    """A number that can be set; None takes the default of the checkpoint or the machine."""

    low: float
    high: float
    step: float
    label: dict[str, Any]
    hint: dict[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether only whole numbers make sense."""
        return self.step >= 1 and self.step == int(self.step)


SAMPLING = {
    "temperature": Field(0, 2, 0.05, say("Temperature"), say("0 always takes the most likely word.")),
    "top_p": Field(0.01, 1, 0.01, say("Top p"), say("Keeps the most likely words up to this share.")),
    "top_k": Field(0, 200, 1, say("Top k"), say("Keeps this many of the most likely words; 0 keeps all.")),
    "min_p": Field(0, 1, 0.01, say("Min p"), say("Drops words less likely than this share of the most likely one.")),
    "presence_penalty": Field(-2, 2, 0.1, say("Presence penalty"), say("Above 0 makes repeated words less likely.")),
    "repetition_penalty": Field(
        0.5, 2, 0.05, say("Repetition penalty"), say("Above 1 makes all words of the chat less likely.")
    ),
}
LENGTHS = {
    "max_tokens": Field(1, 10**9, 1, say("Longest answer"), say("In tokens, including thinking.")),
    "thinking_budget": Field(0, 10**9, 1, say("Longest thinking"), say("In tokens; then the answer begins.")),
    "seed": Field(0, 2**53 - 1, 1, say("Seed"), say("The same seed repeats an answer.")),
}
MEDIA = {
    "max_frames": Field(1, 100_000, 1, say("Frames per video"), say("At most; fewer where the video is shorter.")),
    "fps": Field(0.01, 60, 0.01, say("Frames per second")),
    "max_image_tokens": Field(3, 10**6, 1, say("Tokens per picture"), say("At most; larger pictures are scaled down.")),
    "max_video_tokens": Field(
        3, 10**7, 1, say("Tokens per video"), say("At most; fewer frames first, then smaller ones.")
    ),
}
assert {*SAMPLING, *LENGTHS} == {name for name, number in PARAMETERS.items() if number.on_page}, (
    "the page offers the parameters of SamplingParams that say on_page"
)
TOOLS = {
    "max_calls": Field(0, 1000, 1, say("Calls per question"), say("So many run without asking, if you allowed that.")),
}
# As many as a search with a look at its results takes.
MAX_CALLS = 20
NUMBERS = {**SAMPLING, **LENGTHS, **MEDIA, **TOOLS}


@dataclass(frozen=True)
class Switch:
    """A switch of chat templates; shown if the model's template has it. Unset, the template decides."""

    label: dict[str, Any]
    hint: dict[str, Any]


SWITCHES = {
    "preserve_thinking": Switch(say("Earlier thinking"), say("The model sees what it thought before earlier answers.")),
    "reasoning_effort": Switch(say("Thinking effort"), say("How much the model is asked to think.")),
    "add_vision_id": Switch(say("Numbered pictures"), say("The model sees a number before each picture and video.")),
}
NAMES = frozenset({*NUMBERS, *SWITCHES, "system", "thinking", "adapter", "tools"})
_MAX_ADAPTER_CHARS = 200
_TOOLS = re.compile(r"[A-Za-z0-9_-]{1,32}(,[A-Za-z0-9_-]{1,32}){0,31}")
_EFFORT_NAMES = {
    "minimal": say("Minimal"),
    "low": say("Low"),
    "medium": say("Medium"),
    "high": say("High"),
    "xhigh": say("Very high"),
    "max": say("Highest"),
}


@dataclass(frozen=True)
class Settings:
    """Checked settings of a person. `values` holds only what differs from the defaults."""

    values: Mapping[str, Any]

    @classmethod
    def read(cls, values: object) -> Settings:
        """Checks what a page sent.

        Raises:
            ConfigError: a name is unknown, or a value is of the wrong type or out of range.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                say("Settings must be an object of names and values; got {type}.", type=type(values).__name__)
            )
        unknown = sorted(str(name) for name in values if name not in NAMES)
        if unknown:
            raise ConfigError(
                say(
                    "There is no setting {name}. Known settings: {names}.",
                    name=_short(unknown[0]),
                    names=", ".join(sorted(NAMES)),
                )
            )
        return cls({name: _check(name, value) for name, value in values.items() if value is not None and value != ""})

    @classmethod
    def kept(cls, values: Mapping[str, Any]) -> Settings:
        """The usable part of stored settings: an archive or another version may bring unknown ones."""
        usable: dict[str, Any] = {}
        for name, value in values.items():
            with contextlib.suppress(ConfigError):
                usable |= cls.read({name: value}).values
        return cls(usable)

    @property
    def system(self) -> str:
        """The system prompt; empty for none."""
        return str(self.values.get("system", "")).strip()

    def params(self, model: ModelInfo) -> SamplingParams:
        """Sampling parameters; the model's default for each that isn't set or that the model doesn't support."""
        names = {*SAMPLING, *LENGTHS} - model.unsupported
        return model.generation.with_overrides(**{name: self.values.get(name) for name in names})

    def enable_thinking(self, model: ModelInfo) -> bool:
        """Whether the model thinks before it answers."""
        if model.thinking is False:
            return model.default_enable_thinking
        thinks = self.values.get("thinking", model.default_enable_thinking)
        return bool(thinks) and self.values.get("thinking_budget") != 0

    @property
    def switches(self) -> dict[str, Any]:
        """The switches that are set."""
        return {name: self.values[name] for name in SWITCHES if name in self.values}

    def template_options(self, model: ModelInfo) -> dict[str, Any]:
        """The switches that are set and that the model's template has."""
        return {name: value for name, value in self.switches.items() if name in model.template_options}

    def adapter(self, model: ModelInfo) -> str | None:
        """The chosen adapter, if the model has it."""
        name = self.values.get("adapter")
        return name if name in model.adapters else None

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the tool servers that the chat may use."""
        names = str(self.values.get("tools", ""))
        return tuple(sorted(set(names.split(",")))) if names else ()

    @property
    def max_calls(self) -> int:
        """The calls of one question that may run without asking."""
        return int(self.values.get("max_calls", MAX_CALLS))

    def budget(self, default: MediaBudget) -> MediaBudget:
        """The budget of media, with the machine's defaults for what isn't set."""
        return replace(default, **{name: self.values[name] for name in MEDIA if name in self.values})


def for_any_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that other chats may take over: tools are switched on in one."""
    return {name: value for name, value in values.items() if name not in {*TOOLS, "tools"}}


def made_with(settings: Settings, model: ModelInfo) -> dict[str, Any]:
    """The settings that are stored with an answer: defaults too, since they differ between models.

    Returns:
        the settings by name, and the format of the `weights`. Media settings are stored with the question instead.
        The system prompt is cut to its beginning. What has no value is left out.
    """
    params = settings.params(model)
    values: dict[str, Any] = {name: getattr(params, name) for name in (*SAMPLING, *LENGTHS)}
    values["thinking"] = settings.enable_thinking(model)
    values |= settings.template_options(model)
    values["system"] = settings.system[:_SHOWN_SYSTEM_CHARS] or None
    values["weights"], values["adapter"] = model.weights, settings.adapter(model)
    values["tools"] = ",".join(settings.tools) or None
    return {name: value for name, value in values.items() if value is not None}


def describe_settings(backend: Backend) -> dict[str, Any]:
    """Ranges, labels and defaults of the settings for a model, as JSON values for the page."""
    defaults = backend.info.generation
    budget, video = backend.media.budget, backend.media.video_processing
    shown = {
        **{name: getattr(defaults, name) for name in (*SAMPLING, *LENGTHS)},
        "max_frames": budget.max_frames or video.max_frames,
        "fps": budget.fps or video.fps,
        "max_image_tokens": budget.max_image_tokens,
        "max_video_tokens": budget.max_video_tokens,
        "thinking": backend.info.default_enable_thinking,
        "max_calls": MAX_CALLS,
    }
    groups = {"sampling": SAMPLING, "length": LENGTHS, "media": MEDIA, "tools": TOOLS}
    fields = {
        name: {
            "group": group,
            "low": field.low,
            "high": min(field.high, backend.context_length)
            if name in ("max_tokens", "thinking_budget")
            else field.high,
            "step": field.step,
            "label": field.label,
            "hint": field.hint,
        }
        for group, members in groups.items()
        for name, field in members.items()
        if name not in backend.info.unsupported
    }
    switches = {
        name: {"label": switch.label, "hint": switch.hint, "values": _choices(values)}
        for name, switch in SWITCHES.items()
        if (values := backend.info.template_options.get(name))
    }
    thinking = backend.info.thinking is not False
    adapters = list(backend.info.adapters)
    return {"fields": fields, "switches": switches, "thinking": thinking, "adapters": adapters, "defaults": shown}


def _choices(values: Sequence[bool | str]) -> list[dict[str, Any]]:
    names: Mapping[Any, dict[str, Any]] = {False: say("Off"), True: say("On"), **_EFFORT_NAMES}
    return [{"value": value, "label": names[value]} for value in values]


def _check(name: str, value: Any) -> Any:
    if name == "system":
        if not isinstance(value, str) or len(value) > MAX_SYSTEM_CHARS:
            raise ConfigError(
                say("The system prompt must be a text of at most {most} characters.", most=MAX_SYSTEM_CHARS)
            )
        return value
    if name == "adapter":
        if not isinstance(value, str) or len(value) > _MAX_ADAPTER_CHARS:
            raise ConfigError(say("There is no adapter {name}.", name=_short(value)))
        return value
    if name == "tools":
        if not isinstance(value, str) or not _TOOLS.fullmatch(value):
            raise ConfigError(say("The tools must be up to 32 names of servers with commas between them."))
        return value
    if name in SWITCHES:
        effort = name == "reasoning_effort"
        if not (
            value in _EFFORT_NAMES if effort and isinstance(value, str) else isinstance(value, bool) and not effort
        ):
            raise ConfigError(say("“{label}” can't be {value}.", label=SWITCHES[name].label, value=_short(value)))
        return value
    if name == "thinking":
        if not isinstance(value, bool):
            raise ConfigError(say("“Think first” must be true or false."))
        return value
    field = NUMBERS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not field.low <= value <= field.high or (field.whole and value != int(value)):
        kind = say("a whole number") if field.whole else say("a number")
        label = field.label
        raise ConfigError(
            say(
                "“{label}” must be {kind} from {low} to {high}, or empty; got {value}.",
                label=label,
                kind=kind,
                low=_limit(field.low),
                high=_limit(field.high),
                value=_short(value),
            )
        )
    return int(value) if field.whole else float(value)


def _limit(number: float) -> Said:
    return int(number) if number == int(number) else decimal(number)


def _short(value: object) -> str:
    """A value for a message, cut to 40 characters."""
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:40] + "…"
