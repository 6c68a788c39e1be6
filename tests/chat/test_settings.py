from __future__ import annotations

import math
from typing import Any

import pytest

from qwen35mm.chat.settings import MAX_SYSTEM_CHARS, NUMBERS, Settings, describe_settings, made_with
from qwen35mm.contract import ModelInfo, SamplingParams
from qwen35mm.errors import ConfigError
from qwen35mm_preprocess import MediaBudget
from qwen35mm_preprocess.say import english
from tests.chat.fake_backend import FakeBackend


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_within_its_range_only(name: str) -> None:
    field = NUMBERS[name]
    for value in (field.low, field.high):
        assert Settings.read({name: value}).values == {name: value}
    wrong: list[Any] = [field.low - 1, field.high + 1, "1", True, [1], {}, math.nan, math.inf, -math.inf, 10**400]
    if field.whole:
        wrong.append(field.low + 0.5)
    for value in wrong:
        with pytest.raises(ConfigError, match=f"“{english(field.label)}” must be") as caught:
            Settings.read({name: value})
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "object of names"),
        ({"color": 1}, "no setting 'color'"),
        ({"x" * 10**6: 1}, "no setting 'xxx"),
        ({"thinking": 1}, "true or false"),
        ({"system": 1}, "system prompt must be a text"),
        ({"system": "x" * (MAX_SYSTEM_CHARS + 1)}, "at most 100,000 characters"),
        ({"max_tokens": 0}, "must be a whole number from 1 to 1,000,000,000, or empty; got 0"),
        ({"top_p": "x" * 10**6}, r"must be a number from 0\.01 to 1, or empty; got 'xxx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_t_be_a_setting_is_refused_in_few_words(values: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Settings.read(values)
    assert len(str(caught.value)) < 400


def test_stored_settings_are_taken_as_far_as_they_can_be_used() -> None:
    stored = {"temperature": 0.5, "color": "red", "top_k": -3, "system": ["x"], "thinking": True, "seed": None}
    assert Settings.kept(stored).values == {"temperature": 0.5, "thinking": True}


def test_what_is_not_set_is_the_checkpoint_s() -> None:
    settings = Settings.read(
        {"temperature": 0, "top_k": None, "max_tokens": 7.0, "max_frames": 4, "system": " Be short.\n"}
    )
    defaults = SamplingParams(temperature=0.7, top_k=20)
    assert settings.params(ModelInfo("m", defaults, False)) == SamplingParams(temperature=0.0, top_k=20, max_tokens=7)
    assert settings.budget(MediaBudget(max_image_tokens=9)) == MediaBudget(max_image_tokens=9, max_frames=4)
    assert settings.system == "Be short."
    models = [ModelInfo("m", defaults, default) for default in (False, True)]
    assert [settings.enable_thinking(model) for model in models] == [False, True]
    assert Settings.read({"thinking": False}).enable_thinking(models[1]) is False
    assert Settings.read({"system": ""}).values == {}


def test_what_a_model_cannot_be_asked_for_is_left_out() -> None:
    """A chat goes on with another model, whose settings are fewer."""
    defaults = SamplingParams(temperature=0.7)
    model = ModelInfo("m", defaults, False, thinking=False, unsupported=frozenset({"seed", "top_k"}))
    settings = Settings.read({"seed": 5, "top_k": 3, "min_p": 0.5, "thinking": True})
    assert settings.params(model) == SamplingParams(temperature=0.7, min_p=0.5)
    assert settings.enable_thinking(model) is False
    backend = FakeBackend()
    backend.info = model
    assert set(describe_settings(backend)["fields"]) == set(NUMBERS) - {"seed", "top_k"}


def test_an_adapter_is_offered_and_asked_while_the_model_has_it() -> None:
    settings = Settings.read({"adapter": "poet"})
    models = [ModelInfo("m", SamplingParams(), False, adapters=names) for names in ((), ("clerk", "poet"))]
    assert [settings.adapter(model) for model in models] == [None, "poet"]
    assert [made_with(settings, model).get("adapter") for model in models] == [None, "poet"]
    backend = FakeBackend()
    backend.info = models[1]
    assert describe_settings(backend)["adapters"] == ["clerk", "poet"]
    assert Settings.read({"adapter": ""}).values == {}
    with pytest.raises(ConfigError, match="There is no adapter"):
        Settings.read({"adapter": 3})


def test_switches_of_the_chat_template_are_offered_and_sent() -> None:
    """As far as the model's template has them; another model's stay in the chat."""
    values = {"preserve_thinking": True, "reasoning_effort": "low", "add_vision_id": False}
    settings = Settings.read(values)
    options = {"preserve_thinking": (False, True), "reasoning_effort": ("low", "xhigh"), "tool_format": ()}
    model = ModelInfo("m", SamplingParams(), True, template_options=options)
    sent = {"preserve_thinking": True, "reasoning_effort": "low"}
    assert settings.template_options(model) == sent
    assert settings.template_options(ModelInfo("m", SamplingParams(), True)) == {}
    assert sent.items() <= made_with(settings, model).items()
    backend = FakeBackend()
    assert describe_settings(backend)["switches"] == {}
    backend.info = model
    switches = describe_settings(backend)["switches"]
    assert [[each["value"] for each in switch["values"]] for switch in switches.values()] == [
        [False, True],
        ["low", "xhigh"],
    ]


@pytest.mark.parametrize("values", [{"preserve_thinking": 1}, {"reasoning_effort": True}, {"reasoning_effort": "huge"}])
def test_values_that_no_switch_has_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="can't be"):
        Settings.read(values)


def test_the_page_is_told_ranges_and_defaults() -> None:
    backend = FakeBackend()
    told = describe_settings(backend)
    assert set(told["fields"]) == set(NUMBERS)
    assert told["fields"]["max_tokens"]["high"] == backend.context_length
    assert set(told["defaults"]) == {*NUMBERS, "thinking"}
    assert told["defaults"]["temperature"] == 0.7
    assert told["defaults"]["max_image_tokens"] == 1280
    assert told["defaults"]["max_frames"] >= 1
    shown = {name: value for name, value in told["defaults"].items() if value is not None}
    assert Settings.read(shown).values == shown
