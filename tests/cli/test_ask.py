"""`qwen35mm ask`, as a person or a script runs it, with transformers as the oracle."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.contract.sampling import row_numbers
from qwen35mm.settings import ModelOptions
from tests import forked
from tests.cli.conftest import Run
from tests.oracle import greedy_reply, load_demo_oracle

SAMPLES = json.loads((asset_path("samples") / "samples.json").read_text("utf-8"))


def first_turn(kind: str) -> dict[str, str]:
    """The first sample of a kind: its file, its first question and the right answer."""
    sample = next(sample for sample in SAMPLES if sample["kind"] == kind)
    return {"file": sample["file"], **sample["turns"][0]}


PICTURE, CLIP = first_turn("image"), first_turn("video")


def sample_path(sample: dict[str, str]) -> str:
    return str(asset_path("samples") / sample["file"])


def test_json_is_one_object_that_transformers_agrees_with(qwen35mm: Run) -> None:
    done = qwen35mm("ask", "--image", sample_path(PICTURE), "--json", "--dtype", "float32", PICTURE["question"])
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    numbers = "num_prompt_tokens num_generated_tokens ttft_s decode_tokens_per_s seed"
    names = f"text reasoning finish_reason token_ids prompt_token_ids {numbers} media cache tool_calls"
    names += " stopped_by logprobs num_drafted_tokens num_accepted_tokens"
    assert list(result) == names.split()
    assert result["text"] == PICTURE["answer"]
    assert (result["reasoning"], result["finish_reason"], result["seed"]) == (None, "stop", None)
    assert result["num_prompt_tokens"] == len(result["prompt_token_ids"])
    assert result["num_generated_tokens"] == len(result["token_ids"])
    assert result["ttft_s"] > 0
    assert result["decode_tokens_per_s"] > 0
    (medium,) = result["media"]
    assert set(medium) == {"kind", "digest", "grid_thw", "num_tokens", "frame_timestamps"}
    cache = result["cache"]
    counts = "num_cached_tokens cached_from num_prefilled_tokens miss num_encoded_units num_cached_units"
    assert set(cache) == {*counts.split(), "num_evicted_tokens", "prefill_s", "decode_s", "cache_bytes"}
    assert (cache["num_cached_tokens"], cache["num_prefilled_tokens"]) == (0, result["num_prompt_tokens"])
    assert (cache["num_encoded_units"], cache["num_cached_units"]) == (1, 0)
    assert cache["cache_bytes"] > 0
    processor = Qwen2VLImageProcessorPil.from_pretrained(demo_model_path())
    inputs = processor(PILImage.open(sample_path(PICTURE)).convert("RGB"), return_tensors="pt")
    assert result["token_ids"] == greedy_reply(load_demo_oracle(), result["prompt_token_ids"], dict(inputs), 100)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integers_give_the_demos_answer(qwen35mm: Run, weights: str) -> None:
    done = qwen35mm("ask", "--image", sample_path(PICTURE), "--json", "--weights", weights, PICTURE["question"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == PICTURE["answer"]


def test_the_answer_streams_to_stdout_and_the_rest_to_stderr(qwen35mm: Run) -> None:
    done = qwen35mm("ask", "--video", sample_path(CLIP), CLIP["question"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == CLIP["answer"] + "\n"
    assert "bundled demo model" in done.stderr
    assert "cache" not in done.stderr


def test_verbose_tells_what_the_cache_did() -> None:
    done = forked.run("qwen35mm", "--verbose", "ask", "hello")
    assert "prompt tokens were in the cache" in done.stderr
    assert "cache" not in done.stdout


def test_a_question_that_is_asked_once_leaves_nothing_on_the_disk(qwen35mm: Run, tmp_path: Path) -> None:
    """States and embeddings are large, and of use to a conversation that goes on."""
    question = ("--video", sample_path(CLIP), "--json", "--cache-dir", str(tmp_path), CLIP["question"])
    done = json.loads(qwen35mm("ask", *question).stdout)
    # An entry of the cache is named ADDRESS.KIND; notes of weights have no suffix.
    assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]
    assert done["cache"]["num_encoded_units"] > 0


def test_a_question_from_stdin_with_sampling_is_repeatable(qwen35mm: Run) -> None:
    question = ("--temperature", "1.5", "--seed", "7", "--max-tokens", "12", "--json", "-")
    runs = [qwen35mm("ask", *question, stdin="hello") for _ in "ab"]
    first, second = (json.loads(done.stdout) for done in runs)
    assert first["token_ids"] == second["token_ids"]
    assert first["seed"] == 7
    assert first["num_generated_tokens"] <= 12


def test_an_answer_satisfies_a_schema(qwen35mm: Run, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"shape": {"enum": ["circle", "square"]}}, "required": ["shape"]}
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(schema | {"additionalProperties": False}))
    done = qwen35mm("ask", "--image", sample_path(PICTURE), "--schema", str(path), PICTURE["question"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) in ({"shape": "circle"}, {"shape": "square"})


@pytest.mark.parametrize(
    ("schema", "message"),
    [(None, "shape.json can't be read"), ("{", "as JSON"), ('{"uniqueItems": true}', "Unimplemented keys")],
)
def test_a_schema_that_cannot_be_used_is_told_before_a_model_is_loaded(
    qwen35mm: Run, tmp_path: Path, schema: str | None, message: str
) -> None:
    path = tmp_path / "shape.json"
    if schema is not None:
        path.write_text(schema)
    done = qwen35mm("ask", "--model", "nowhere/at/all", "--schema", str(path), "hi")
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--image", "nowhere.png", "hi"), 2, "there is no file"),
        (("--model", "nowhere/at/all", "hi"), 1, "There is no folder"),
        (("--dtype", "int3", "hi"), 1, "dtype must be"),
        (("--weights", "int3", "hi"), 1, "weights must be auto, bf16, int8, int4 or fp8"),
        (("--temperature", "-1", "hi"), 1, "temperature must be"),
        (("--kv-memory", "1k", "hi"), 1, "KV"),
        (("--cache-size", "1GiB", "--no-disk-cache", "hi"), 2, "there is none"),
        (("--cache-dir", __file__, "hi"), 1, Path(__file__).name),
        (("--context-length", "10", "hello there, who are you?"), 1, "context holds 10"),
    ],
)
def test_mistakes_are_told_in_a_line(qwen35mm: Run, args: tuple[str, ...], code: int, message: str) -> None:
    done = qwen35mm("ask", *args)
    assert done.returncode == code
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_broken_picture_is_told_in_a_line(qwen35mm: Run, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(sample_path(PICTURE)).read_bytes()[:200])
    done = qwen35mm("ask", "--image", str(broken), "what is this?")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path) not in done.stderr


def test_help_names_every_option(qwen35mm: Run) -> None:
    help = qwen35mm("ask", "--help").stdout
    own = "image video system max-tokens temperature seed think no-think thinking-budget schema json"
    names = [*own.split(), *(name.replace("_", "-") for name in row_numbers())]
    names += [*(each.name.replace("_", "-") for each in fields(ModelOptions))]
    assert [name for name in names if f"--{name}" not in help] == []
