from __future__ import annotations

import pytest

from qwen35mm.errors import ConfigError
from qwen35mm.sampling import SamplingParams
from qwen35mm.ui.settings import Settings, read_settings

DEFAULTS = SamplingParams(temperature=0.7, top_k=20, presence_penalty=1.5)


def test_untouched_settings_are_the_defaults() -> None:
    assert read_settings(DEFAULTS, False, 0.7, "", "") == Settings(DEFAULTS, False)


def test_what_is_set_replaces_a_default_and_nothing_else() -> None:
    settings = read_settings(DEFAULTS, True, 0, " 1,024 ", "0")
    expected = SamplingParams(temperature=0.0, top_k=20, presence_penalty=1.5, max_tokens=1024, seed=0)
    assert settings == Settings(expected, True)


def test_an_emptied_box_takes_the_limit_away() -> None:
    defaults = SamplingParams(max_tokens=100, seed=3)
    assert read_settings(defaults, False, 1.0, "", "").params == SamplingParams()


@pytest.mark.parametrize(
    ("temperature", "max_tokens", "seed", "word"),
    [
        (None, "", "", "temperature"),
        (-1, "", "", "temperature"),
        (1, "0", "", "longest answer"),
        (1, "many", "", "longest answer"),
        (1, "-5", "", "longest answer"),
        (1, "1.5", "", "longest answer"),
        (1, "", "٣", "seed"),
        (1, "", "9" * 5000, "seed"),
    ],
)
def test_a_wrong_value_is_named(temperature: float | None, max_tokens: str, seed: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read_settings(DEFAULTS, False, temperature, max_tokens, seed)
