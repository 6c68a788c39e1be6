"""Each benchmark from its options to its JSON line, on the bundled model in this process."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import first_token, limits, multi_turn
from benchmarks.captioning import check_work, write_pictures
from benchmarks.multi_turn import ScriptedChat
from benchmarks.peers import LlamaCpp
from qwen35mm.assets import demo_model_path
from tests.benchmarks.conftest import RunHere
from tests.captioning.conftest import media_in_process

__all__ = ["media_in_process"]
TRANSFORMERS = ["--peer", "transformers"]
# What build 0c1e570 of llama-bench prints for one test, shortened, with 4 ms a prompt's token and 50 ms a decoded one.
FAKE_LLAMA_BENCH = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("ggml: words of its own", file=sys.stderr)
if "broken" in options["--model"]:
    sys.exit("error: failed to load model")
times_ns = int(options["--n-prompt"]) * 4_000_000 + int(options["--n-gen"]) * 50_000_000
print(json.dumps([{"build_commit": "0c1e570", "avg_ns": times_ns, "n_depth": int(options.get("--n-depth", 0))}]))
"""


@pytest.fixture
def llama_bench(tmp_path: Path) -> Path:
    """A program that stands in for llama-bench."""
    (tmp_path / "fake.py").write_text(FAKE_LLAMA_BENCH)
    path = tmp_path / "llama-bench"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / "fake.py"))} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "q4_0.gguf", "qwen35")
    for name, size in {"token_embd.weight": 64, "blk.0.ffn_up.weight": 32, "output_norm.weight": 4}.items():
        writer.add_tensor(name, np.zeros(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "q4_0.gguf"


def test_prefill_decode(on_demo: RunHere, llama_bench: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_RUNS_S", 0.0)
    monkeypatch.setattr(limits, "_PEAK_ROUNDS", 1000)
    llama = ["--peer", "llama.cpp", "--llama-bench", str(llama_bench), "--gguf", str(tiny_gguf)]
    options = ["--lengths", "8,20", "--decode-tokens", "2", "--repeats", "1", "--slots", "2", "--pieces", "8"]
    data = on_demo("prefill_decode", *TRANSFORMERS, *llama, *options)
    machine, prompts, pieces, slots = data["tables"].values()
    engines = [("qwen35mm", "float32"), ("transformers", "float32"), ("llama.cpp", "q4_0")]
    assert [(row["engine"], row["weights"], row["prompt"]) for row in prompts] == [
        (*engine, length) for length in (8, 20) for engine in engines
    ]
    for row in prompts:
        at = next(each for each in machine if each["prompt"] == row["prompt"])
        prefill, decode = row["prefill, tok/s"], row["decode, tok/s"]
        limit = next(rate["high"] for name, rate in at.items() if name.startswith(f"{row['limit']}, G"))
        assert 0 < prefill["low"] <= prefill["median"] <= prefill["high"]
        assert prefill["count"] == decode["count"] == 1
        assert row["of limit, %"] == pytest.approx(100 * prefill["median"] * at["GFLOP a token"] / limit)
        needed = decode["median"] * row["read a token, MB"] / 1e3
        assert row["of reads, %"] == pytest.approx(100 * needed / at["reads, GB/s"]["high"])
    floats = max(("bfloat16", "float32"), key=lambda name: machine[1][f"{name}, GFLOP/s"]["high"])
    limits_of = [row["limit"] for row in prompts[3:]]
    assert limits_of[:2] == [floats, floats]
    assert limits_of[2].endswith(" integers") or not limits.integer_peaks(1)
    llama_row = prompts[2]
    assert (llama_row["prefill, tok/s"]["median"], llama_row["decode, tok/s"]["median"]) == (250, 20)
    assert llama_row["load, s"] is None
    whole, cut = pieces
    assert (whole["tokens a piece"], cut["tokens a piece"]) == (20, 8)
    whole_s, cut_s = (row["prefill, s"]["median"] for row in pieces)
    assert (whole["times uncut"], cut["times uncut"]) == (1, pytest.approx(cut_s / whole_s))
    assert cut["ms a cut"] == pytest.approx(1e3 * (cut_s - whole_s) / 2)
    assert [row["sequences"] for row in slots] == [1, 2]
    one, two = (row["all together, tok/s"]["median"] for row in slots)
    assert slots[1]["times one's"] == pytest.approx(two / one)


def test_llama_bench_is_asked_for_prefill_and_decode_apart(llama_bench: Path) -> None:
    arguments = Namespace(program=llama_bench, decode_tokens=8)
    sample = LlamaCpp(arguments, Path("model.gguf")).measure(512)
    assert (sample["prefill_s"], sample["decode_s"]) == (512 * 4e-3, 8 * 50e-3)
    with pytest.raises(SystemExit, match=r"ended with status 1:\n(.|\n)*failed to load model"):
        LlamaCpp(arguments, Path("broken.gguf")).measure(512)


def test_first_token(on_demo: RunHere) -> None:
    data = on_demo("first_token", *TRANSFORMERS, "--side", "128", "--repeats", "2")
    (rows,) = data["tables"].values()
    found = [(row["engine"], row["picture"]) for row in rows]
    assert found == [("qwen35mm", "cold"), ("qwen35mm", "warm"), ("transformers", "cold")]
    assert all(16 < row["prompt tokens"] < 60 and row["first token, ms"]["count"] == 2 for row in rows)
    assert data["agreement"] == "2 of 2 first tokens are the same."


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("transformers cold", {"num_prompt_tokens": 7}, "7 prompt tokens, the others have 8"),
        ("qwen35mm cold", {"num_encoded": 0}, "qwen35mm cold: 0 pictures were encoded"),
        ("qwen35mm warm", {"num_encoded": 1}, "qwen35mm warm: 1 pictures were encoded"),
    ],
)
def test_first_token_refuses_unequal_work(name: str, change: dict[str, int], message: str) -> None:
    sample = {"num_prompt_tokens": 8} | ({} if name[0] == "t" else {"num_encoded": int(name.endswith("cold"))})
    first_token.check_work(name, sample, 8)
    with pytest.raises(SystemExit, match=message):
        first_token.check_work(name, sample | change, 8)


def scripted(turns: int, history_tokens: int) -> ScriptedChat:
    sizes = {"turns": turns, "history_tokens": history_tokens, "image_side": 64}
    return ScriptedChat(Namespace(model=demo_model_path(), device="cpu", **sizes))


def test_multi_turn(on_demo: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn leaves in the cache is what its history commit covers, and the next turn computes the rest."""
    monkeypatch.setattr(multi_turn, "WARM_UP_TOKENS", 20)
    options = ["--turns", "2", "--history-tokens", "300", "--image-side", "64", "--min-segment", "32"]
    data = on_demo("multi_turn", *TRANSFORMERS, *options)
    (rows,) = data["tables"].values()
    assert data["extending"].startswith("0 of 1 prompts")
    made = scripted(2, 300)
    for row in rows:
        turn, cached = row["turn"], 0
        assert row["tokens agree"]
        assert row["prompt tokens"] == len(made.prompt(turn).token_ids)
        if turn > 1:
            history = made.builder(32).history(made.history(turn - 1), [made.media.plan], enable_thinking=False)
            cached = history.tail_start
            assert cached > 0
        for name in ("warm", "restart"):
            assert (row[f"{name}: cached"], row[f"{name}: prefilled"]) == (cached, row["prompt tokens"] - cached)


def test_the_script_is_fixed_and_grows_to_its_size() -> None:
    made, again = scripted(6, 1200), scripted(6, 1200)
    assert made.turns == again.turns
    lengths = [len(made.prompt(turn).token_ids) for turn in range(1, 7)]
    assert all(a < b for a, b in pairwise(lengths))
    assert 1_000 < lengths[-1] < 1_400
    assert [len(message.media) for message in made.messages(3)] == [1, 0, 0, 0, 0]


@pytest.mark.usefixtures("media_in_process")
def test_captioning(on_demo: RunHere) -> None:
    options = ["--slots", "2", "--items", "3", "--max-tokens", "3", "--size", "64x48", "--repeats", "1"]
    data = on_demo("captioning", *options)
    (title, rows), (_, (stages,)) = data["tables"].items()
    assert title.endswith("+ 3 tokens each")
    assert [row["engine"] for row in rows] == ["transformers", "qwen35mm, 2 slots"]
    assert min(stages[f"{name}, s"] for name in ("media", "tower", "prompt", "answer")) > 0
    assert data["limits"].startswith("qwen35mm, 2 slots: ")
    assert "the limit" in data["limits"]
    for row in rows:
        assert row["tokens/s"]["median"] == pytest.approx(3 * row["captions/s"]["median"])
        assert row["times transformers"] == row["captions/s"]["median"] / rows[0]["captions/s"]["median"]
    assert 0 < rows[1]["slots waited, %"]["median"] < 100
    assert data["differing"] == "Captions that differ from the first engine's: [0]"


def test_captioning_refuses_unequal_work(tmp_path: Path) -> None:
    samples = {"a": [{"read": 8, "written": 4}]}
    check_work({**samples, "b": samples["a"]})
    with pytest.raises(SystemExit, match="b written other numbers of tokens"):
        check_work({**samples, "b": [{"read": 8, "written": 3}]})
    for seed in range(2):
        write_pictures(tmp_path / str(seed), 5, seed, (64, 48))
    assert len({path.read_bytes() for path in tmp_path.rglob("*.jpg")}) == 10


def test_kv_types(on_demo: RunHere) -> None:
    options = ["--types", "int8", "int4", "--context", "40", "--tokens", "2", "--kl-tokens", "64"]
    (rows,) = on_demo("kv_types", *options)["tables"].values()
    assert [row["type"] for row in rows] == ["auto", "int8", "int4"]
    own, int8, int4 = rows
    assert own["bytes a token"] > int8["bytes a token"] > int4["bytes a token"]
    assert (own["KL"], own["of own type"]) == (None, 1)
    assert 0 < int8["KL"] < int4["KL"]


@pytest.mark.slow
def test_adapters(on_demo: RunHere) -> None:
    (rows,) = on_demo("adapters", "--rank", "2", "--repeats", "1")["tables"].values()
    assert [(row["what"], row["adapters"]) for row in rows] == [
        *(("step of 4 rows", case) for case in ("0 adapters", "1 adapter", "4 adapters")),
        *(("step of 1 row", case) for case in ("0 adapters", "1 adapter")),
        *(("prefill", case) for case in ("0 adapters", "1 adapter")),
    ]
    assert all(row["ms"]["count"] == 8 and row["times"] > 0 for row in rows)


def test_startup(run_here: RunHere) -> None:
    (rows,) = run_here("startup", "--surfaces", "ask,caption,serve", "--repeats", "1")["tables"].values()
    assert {row["command"] for row in rows} == {"ask", "caption", "serve"}
    assert all(row["s"]["median"] > 0 for row in rows)


@pytest.mark.slow
def test_page(run_here: RunHere) -> None:
    from tests.web.browser import find_chromium

    if find_chromium() is None:
        pytest.skip("needs a Chromium")
    data = run_here("page", "--messages", "30", "--seconds", "0.5", "--repeats", "1")
    (rows,) = data["tables"].values()
    assert list(rows[0]) == ["", "2 messages", "30 messages"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("captioning", "--slots two", "invalid numbers value"),
        ("first_token", "--side 1000", "multiple of 32"),
        ("multi_turn", "--turns 1", "at least 2"),
        ("prefill_decode", "--peer another", "invalid choice"),
        ("prefill_decode", "--peer llama.cpp --gguf x", "go together"),
        ("prefill_decode", "--gguf x --llama-bench y", "go together"),
        ("prefill_decode", f"--peer llama.cpp --llama-bench {__file__} --gguf x", "x is no file"),
        (
            "prefill_decode",
            f"--peer llama.cpp --llama-bench {__file__} --gguf {__file__} --gguf {__file__}",
            "different",
        ),
        ("prefill_decode", "--weights int8,int3", "got 'int3'"),
        ("serving", "--peer llama.cpp --gguf x", "go together"),
        ("serving", f"--peer llama.cpp --gguf x --llama-server {__file__}", "x is no file"),
    ],
)
def test_options_are_checked(
    name: str, options: str, message: str, on_demo: RunHere, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        on_demo(name, *options.split(" "))
    assert message in capsys.readouterr().err
