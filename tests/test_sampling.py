from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.sampling import SamplingParams, read_generation_config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingParams(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1},
            SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1),
        ),
        ({"do_sample": True, "top_k": 0}, SamplingParams(top_k=0)),
        ({"do_sample": True, "top_k": None, "top_p": None}, SamplingParams(top_k=50)),
        ({"do_sample": True, "top_k": 20.0}, SamplingParams(top_k=20)),
    ],
)
def test_defaults_come_from_the_generation_config(values: dict[str, Any], expected: SamplingParams) -> None:
    assert SamplingParams.from_generation_config(values) == expected


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_k": float("nan")}, {"top_p": [1]}, {"min_p": {}}])
def test_a_damaged_generation_config_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        SamplingParams.from_generation_config({"do_sample": True, **values})


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -1.0},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"thinking_budget": -1},
        {"stop": "word"},
        {"stop": ("",)},
        {"stop": ("x",) * 17},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": {"type": "string"}},
        {"json_schema": "[" * 60_000},
        {"json_schema": f'{{"const": "{"x" * 65_536}"}}'},
    ],
)
def test_a_bad_value_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad)) if bad != {"stop": ("x",) * 17} else "stop strings"):
        SamplingParams(**bad)


def test_a_schema_and_stop_strings_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="leave out stop"):
        SamplingParams(json_schema='{"type": "string"}', stop=("x",))


def test_overrides_skip_what_is_not_given() -> None:
    params = SamplingParams(temperature=0.7, seed=3)
    assert params.with_overrides(temperature=0.0, seed=None, max_tokens=5) == SamplingParams(
        temperature=0.0, seed=3, max_tokens=5
    )


def test_generation_config_file(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": 20}))
    assert read_generation_config(tmp_path) == {"top_k": 20}
    for broken in ("[1]", "{", "\xff"):
        path.write_text(broken)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            read_generation_config(tmp_path)
