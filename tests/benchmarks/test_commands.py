"""Benchmarks of engines from their options to their last line, with their workers in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.benchmarks.conftest import Report

OPTIONS = {
    "batching": ["--requests", "1", "--long-tokens", "40", "--prompt-tokens", "8", "--decode-tokens", "6"],
    "multi_turn": ["--turns", "2", "--history-tokens", "120", "--image-side", "64", "--min-segment", "64"],
}


LLAMA_CPP = ["--peer", "llama.cpp", "--llama-bench", __file__]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_table_comes_first_and_one_json_line_last(name: str, run_here: Callable[..., Report]) -> None:
    prefills = ["--prefill-repeats", "1"] if name == "multi_turn" else []
    report = run_here(name, *OPTIONS[name], "--repeats", "1", *prefills)
    assert report.data["turns" if name == "multi_turn" else "results"]
    assert len(report.rows) >= 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("batching", ["--decode-tokens", "5"], "at least 6"),
        ("batching", ["--requests", "1,4", "--slots", "4"], "needs a slot too"),
        ("captioning", ["--slots", "two"], "invalid numbers value"),
        ("first_token", ["--random", "9B"], "give --model or --random"),
        ("first_token", ["--side", "1000"], "multiple of 32"),
        ("first_token", ["--repeats", "0"], "at least 1"),
        ("multi_turn", ["--peer-url", "http://x"], "go together"),
        ("multi_turn", ["--turns", "1"], "at least 2"),
        ("prefill_decode", ["--peer", "another"], "invalid choice"),
        ("serving", ["--peer", "llama.cpp", "--gguf", "x"], "go together"),
        ("serving", ["--peer", "llama.cpp", "--gguf", "x", "--llama-server", __file__], "x is no file"),
        ("prefill_decode", ["--peer", "llama.cpp", "--gguf", "x"], "go together"),
        ("prefill_decode", ["--gguf", "x", "--llama-bench", "y"], "go together"),
        ("prefill_decode", [*LLAMA_CPP, "--gguf", "x"], "x is no file"),
        ("prefill_decode", [*LLAMA_CPP, "--gguf", __file__, "--gguf", __file__], "needs a name of its own"),
        ("prefill_decode", ["--picture", "100"], "multiple of 32"),
        ("prefill_decode", ["--weights", "int8,int3"], "got 'int3'"),
    ],
)
def test_options_are_checked(
    name: str,
    options: list[str],
    message: str,
    run_here: Callable[..., Report],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(name, *options)
    assert message in capsys.readouterr().err
