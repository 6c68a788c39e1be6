from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pydantic
import pytest

import qwen35mm.engine
from qwen35mm.contract import SamplingParams
from qwen35mm.contract.sampling import read_generation_config, row_numbers
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm_kernels.reference.sampling import PARAMETERS


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
        {"temperature": 10**400},
        {"top_p": 0.0},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"max_tokens": True},
        {"stop": 3},
        {"stop": {"word"}},
        {"frequency_penalty": 11},
        {"min_tokens": 6, "max_tokens": 5},
        {"ignore_eos": 1},
        {"stop_token_ids": 7},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": tuple(range(129))},
        {"logit_bias": [1, 2]},
        {"logit_bias": {1: 101}},
        {"logit_bias": dict.fromkeys(range(1025), 1)},
        {"logprobs": 21},
        {"stop": ("",)},
        {"stop": ("x",) * 17},
        {"json_schema": "{"},
        {"json_schema": 3},
        {"json_schema": {"const": {1, 2}}},
        {"json_schema": "[" * 60_000},
        {"json_schema": f'{{"const": "{"x" * 524_288}"}}'},
        {"grammar": ""},
        {"grammar": 3},
        {"grammar": []},
        {"grammar": ["a", 1]},
        {"grammar": re.compile(b"a")},
        {"grammar": "root ::= a"},
        {"grammar": "start: /a/", "json_schema": "{}"},
        {"grammar": f"start: /{'x' * 524_288}/"},
    ],
)
def test_a_bad_value_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad)) if bad != {"stop": ("x",) * 17} else "stop strings"):
        SamplingParams(**bad)


def test_biases_are_kept_in_one_form() -> None:
    params = SamplingParams(logit_bias={7: 1, 3: -2.5}, stop_token_ids=(9,))
    assert params.logit_bias == ((3, -2.5), (7, 1))
    assert params.token_ids == (9, 3, 7)
    assert hash(params) == hash(SamplingParams(logit_bias=((3, -2.5), (7, 1.0)), stop_token_ids=(9,)))
    assert params.with_overrides(seed=1).logit_bias == params.logit_bias


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


class Weather(pydantic.BaseModel):
    place: str
    degrees: int | None = None


def test_what_can_only_mean_one_thing_is_taken() -> None:
    schema = Weather.model_json_schema()
    given = SamplingParams(json_schema=schema)  # pyright: ignore[reportArgumentType]
    of_class = SamplingParams(json_schema=Weather)  # pyright: ignore[reportArgumentType]
    assert given == of_class == SamplingParams(json_schema=json.dumps(schema, ensure_ascii=False))
    for stop in ("END", ["END"]):
        assert SamplingParams(stop=stop).stop == ("END",)  # pyright: ignore[reportArgumentType]
        assert hash(SamplingParams().with_overrides(stop=stop))


def test_what_the_kernels_read_is_what_the_parameters_say() -> None:
    """A column without its parameter, or with another neutral value, would be a parameter that does nothing."""
    neutral = SamplingParams()
    assert {name: getattr(neutral, name) for name in row_numbers()} == {
        name: column.neutral for name, column in PARAMETERS.items()
    }
    assert {name: number.is_whole for name, number in row_numbers().items()} == {
        name: not column.dtype.is_floating_point for name, column in PARAMETERS.items()
    }


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams) if each.name not in row_numbers()])
def test_every_other_parameter_is_read_by_the_engine(name: str) -> None:
    sources = [path.read_text("utf-8") for path in (Path(qwen35mm.engine.__file__).parent).glob("*.py")]
    assert any(f"params.{name}" in source for source in sources)
