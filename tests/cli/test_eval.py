"""`qwen35mm eval`, as a person or a script runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.config import MEDIA_TOKENS
from tests.checkpoints import ggufs
from tests.cli.conftest import Run
from tests.small_adapters import write_adapter
from tests.tiny import DENSE, MOE, TinyCheckpoints, TinySpec


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"))


def with_tokenizer(folder: Path) -> Path:
    """A tiny checkpoint that can read: the tokens of a small tokenizer are among its own."""
    for path in ggufs.SOURCE.iterdir():
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    source = json.loads((ggufs.SOURCE / "config.json").read_text())
    ids = {name: source[name] for name in MEDIA_TOKENS}
    (folder / "config.json").write_text(json.dumps(config | ids))
    return folder


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_json_has_every_format(qwen35mm: Run, tiny: TinyCheckpoints, spec: TinySpec) -> None:
    folder = with_tokenizer(tiny.folder(spec))
    options = ("--weights", "bf16,int8,int4", "--reference", "float32", "--tokens", "300", "--json")
    done = qwen35mm("eval", "--model", folder, *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["model"], found["reference"], found["text"]) == (str(folder), "float32", "the project's")
    reference, *others = found["formats"]
    assert [each["weights"] for each in found["formats"]] == ["float32", "bf16", "int8", "int4"]
    assert (reference["kl_mean"], reference["kl_max"], reference["top1_percent"]) == (0, 0, 100)
    divergence = "num_tokens kl_mean kl_p99 kl_max top1_percent perplexity depths"
    sizes = "weights num_bytes kv_dtype kv_keep kv_token_bytes"
    assert set(reference) == {*divergence.split(), *sizes.split(), "accuracy", "skills", "lora"}
    assert {each["num_tokens"] for each in found["formats"]} == {299}
    means = [each["kl_mean"] for each in others]
    assert 0 < means[0] < means[1] < means[2]
    for each in others:
        assert 0 < each["kl_mean"] < each["kl_p99"] <= each["kl_max"]
        assert each["num_bytes"] < reference["num_bytes"]
        assert each["perplexity"] == pytest.approx(reference["perplexity"], rel=0.3)
        assert (each["accuracy"], each["skills"]) == (None, {})


def test_a_text_of_ones_own(qwen35mm: Run, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("A red circle at the top left and a blue star on the right.", "utf-8")
    done = qwen35mm("eval", "--weights", "bf16", "--text", path, "--questions", "0")
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "bf16" in line and "│" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][3:7] == ["0.00000", "0.00000", "0.00000", "100.00"]
    assert "Right answers" not in done.stdout


def test_the_bundled_models_skills(qwen35mm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.evaluation.skill_test.NAMES", ("color", "motion"))
    done = qwen35mm("eval", "--weights", "int8", "--kv-keep", "media=0.3,text=1", "--questions", "2")
    assert done.returncode == 0, done.stderr
    assert "2 questions a skill, 4 in all" in " ".join(done.stdout.split())
    rows = [line.strip("│ \n").split("│")[0].strip() for line in done.stdout.splitlines() if "│" in line]
    known = ["bf16", "int8", "bf16", "color", "motion", "all"]
    assert [row for row in rows if row in known] == known


def test_keys_and_values_of_the_bundled_model(qwen35mm: Run) -> None:
    """In float32: bfloat16's own noise, other on every kind of processor, moves as many places as 8 bits do."""
    done = qwen35mm(
        "eval", "--kv-dtype", "int8", "--kv-dtype", "k=int8,v=int4", "--reference", "float32", "--questions", "0",
        "--context", "1100", "--tokens", "300", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, int8, apart = json.loads(done.stdout)["formats"]
    assert [each["kv_dtype"] for each in (plain, int8, apart)] == ["auto", "int8", "k=int8,v=int4"]
    assert plain["kv_token_bytes"] > int8["kv_token_bytes"] > apart["kv_token_bytes"]
    assert 0 < int8["kl_mean"] <= 0.001
    assert int8["top1_percent"] >= 98  # of a foreign text, where no token is much likelier than the next
    spans = [(depth["start"], depth["stop"], depth["num_tokens"]) for depth in apart["depths"]]
    assert spans == [(0, 275, 274), (275, 550, 275), (550, 825, 275), (825, 1100, 275)]
    weighted = sum(depth["kl_mean"] * depth["num_tokens"] for depth in apart["depths"]) / 1099
    assert weighted == pytest.approx(apart["kl_mean"])


def test_an_adapter_beside_the_model_alone(qwen35mm: Run, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    options = ("--questions", 0, "--tokens", 100, "--reference", "float32")
    done = qwen35mm("eval", "--lora", adapter, "--lora", f"none={adapter}=0", *options, "--json")
    assert done.returncode == 0, done.stderr
    plain, whole, none = json.loads(done.stdout)["formats"]
    assert [each["lora"] for each in (plain, whole, none)] == [None, "adapter", "none"]
    assert whole["kl_mean"] > 0.01 > none["kl_mean"] == 0
    shown = qwen35mm("eval", "--lora", adapter, *options)
    assert "float32 + adapter" in shown.stdout


def test_the_projects_text_is_what_most_models_read() -> None:
    text = asset_path("evaluation.txt").read_text("utf-8")
    assert 30_000 < len(text) < 40_000


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--weights", "int3"), 1, "bf16, float32, int8, int4, fp8, auto, with commas between; got 'int3'"),
        (("--weights", ","), 1, "got none"),
        (("--kv-dtype", "int3"), 1, "got 'int3'"),
        (("--kv-keep", "1.5"), 1, "got '1.5'"),
        (("--reference", "int8"), 1, "The reference must be bf16 or float32"),
        (("--text", "nowhere.txt"), 2, "can't be read"),
        (("--text", str(demo_model_path() / "model.safetensors")), 2, "is no text in UTF-8"),
        (("--text", __file__, "--tokens", "1"), 2, "--tokens"),
        (("--context", "9999999", "--questions", "0"), 1, "got a context of 9,999,999 tokens"),
        (("--questions", "-1"), 2, "--questions"),
        (("--model", "nowhere/at/all"), 1, "There is no folder"),
        (("--device", "banana", "--questions", "0"), 1, "banana"),
    ],
)
def test_mistakes_are_told_in_a_line(qwen35mm: Run, args: tuple[str, ...], code: int, message: str) -> None:
    done = qwen35mm("eval", *args)
    assert done.returncode == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
