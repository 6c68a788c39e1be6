"""The tuner without a card: what it tries, how it chooses, what it refuses, and what it writes."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

import qwen35mm_kernels
from benchmarks import tune_kernels, tuning
from benchmarks.frame import Spread
from benchmarks.kernel_cases import SHAPES, Case, Cases, Shapes
from benchmarks.tune_kernels import Checked, Configs, Refused, asked_by, by_shape, choose, compile_all, main, tune
from benchmarks.tuning import OPERATIONS, SPACES, Workload, compiler_processes, sizes_of, workloads_of
from qwen35mm_kernels import gpu, reference
from qwen35mm_kernels.gpu import launch
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config, Table, read_table, write_table
from tests.benchmarks.conftest import RunHere

GPU = Path(qwen35mm_kernels.__file__).parent / "gpu"
# Few heads and tokens, but heads and states of the real sizes, since these decide the blocks.
SMALL = Shapes("small", 320, 2, 1, 2, vision_heads=2, k_heads=1, experts=(2, 2, 64), vocab=9000)
SMALL_SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "gated_delta_prefill": ((70,),),
    "gdn_decode_step": ((2,),),
    "paged_attention_decode": ((2, 320),),
    "paged_attention_prefill": ((70, 128),),
    "moe_experts": ((3,), (5,), (97,)),
    "integer_experts": ((3, 4), (97, 8)),
    "fp8_experts": ((3,), (97,)),
    "fp8_linear": ((2,), (5,)),
    "integer_linear": ((1, 4), (5, 4)),
    "norm_linear": ((1,), (3,), (3, True)),
    "sample": ((4,),),
}
# The others take 3 to 25 s each, interpreted.
QUICK = {"rms_norm", "gated_rms_norm", "apply_partial_rope", "mrope_cos_sin"}
A, B, C, DEFAULT = (Config({"BLOCK": size}) for size in (16, 32, 64, 128))
KEY = ("kernel", "D64")


def test_every_kernel_that_asks_for_a_configuration_has_a_space_and_a_workload() -> None:
    """The names that sources pass to `config_for`, or to `norm._config`, which passes them on."""
    found = set()
    for path in GPU.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="config_for" | "_config"), args=[ast.Constant(value=name), *_]):
                    found.add(name)
    assert set(SPACES) == found
    assert {kernel for operation in OPERATIONS.values() for kernel in operation.kernels} == found


@torch.inference_mode()
def test_candidates_are_few_and_fit_the_real_shapes() -> None:
    assert sizes_of("Hk16_Hv32_K128_16") == {"Hk": 16, "Hv": 32, "K": 128}
    asked: Table = {}
    for kernel in SPACES:
        for workload in workloads_of(kernel, list(SHAPES.values())):
            of_one = asked_by(workload, {}, "meta")
            assert {name for name, _ in of_one} <= set(OPERATIONS[workload.operation].kernels)
            asked |= of_one
    assert {kernel for kernel, _ in asked} == set(SPACES)
    for (kernel, shape), default in asked.items():
        candidates = SPACES[kernel].candidates(shape, default)
        assert 1 <= len(candidates) <= 12, (kernel, shape)
        assert len({repr(config) for config in [default, *candidates]}) == len(candidates) + 1
        assert all(config.blocks.keys() == default.blocks.keys() for config in candidates)


def small_cases(kernel: str) -> Iterator[Case]:
    made = Cases(SMALL, "cpu")
    for name, operation in OPERATIONS.items():
        if kernel in operation.kernels:
            yield from (getattr(made, name)(*size) for size in SMALL_SIZES.get(name, ((5,),)))


@pytest.mark.parametrize(
    "kernel", [name if name in QUICK else pytest.param(name, marks=pytest.mark.emulated) for name in SPACES]
)
@torch.inference_mode()
def test_every_cut_gives_the_right_result(kernel: str) -> None:
    """Interpreted: warps and stages make no difference here, blocks do."""
    torch.manual_seed(0)
    cuts = set()
    for case in small_cases(kernel):
        checked = Checked(case, {})
        with trial({}, lambda *arguments, **constants: None) as asked:
            case.run(gpu)
        for (name, shape), default in asked.items():
            for config in SPACES[kernel].candidates(shape, default) if name == kernel else ():
                cut = (shape, *config.blocks.values())
                if cut not in cuts:
                    cuts.add(cut)
                    checked.check({(kernel, shape): config})
    assert len(cuts) > 1


def compiling(monkeypatch: pytest.MonkeyPatch, cache: Path, capability: int) -> ProcessPoolExecutor:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    return compiler_processes(capability, 2)


@pytest.mark.emulated
def test_what_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, good, bad = ("rms_norm", "D1024"), Config({"BLOCK_ROWS": 4}, 8, 1), Config({"BLOCK_ROWS": 3}, 8, 1)
    with compiling(monkeypatch, tmp_path, 90) as pool:
        compiled, ((config, reason),) = compile_all(
            pool, key, [good, bad], [Workload("rms_norm", SHAPES["0.8B"], (4,))], {}
        )
    assert (compiled, config) == ([good], bad)
    assert "doesn't compile" in str(reason)
    # The measuring process finds it in the cache.
    assert len(list(tmp_path.rglob("_rms_norm_kernel.cubin"))) == 1


@pytest.mark.emulated
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_candidate_compiles(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failures = []
    with compiling(monkeypatch, tmp_path, capability) as pool, torch.inference_mode():
        for kernel, space in SPACES.items():
            if not tune_kernels.has_kernel(kernel, capability):
                continue
            # The mixture has every kernel.
            shapes = by_shape(kernel, [SHAPES["35B-A3B"]], {}, "meta")
            assert shapes
            for shape, (default, workloads) in shapes.items():
                candidates = [default, *space.candidates(shape, default)]
                failures += compile_all(pool, (kernel, shape), candidates, workloads[-1:], {})[1]
    assert failures == []


@pytest.mark.parametrize(
    ("candidates", "expected", "ratio"),
    [
        ([], None, 1),
        ([(A, [1.0, 2.0])], None, 1),
        ([(A, [0.99, 1.97])], None, 1),  # better by 1.3%
        ([(A, [0.98, 1.96])], A, 0.98),
        ([(A, [0.97, 1.94]), (B, [0.96, 1.92])], B, 0.96),
        ([(A, [0.9, 1.8]), (B, [0.9, 1.8])], A, 0.9),
        ([(A, [0.5, 2.12])], None, 1),  # slower by 6% at one size
        ([(A, [1.04, 1.0])], A, (1.04 * 0.5) ** 0.5),  # a loss of 4% at one size for half of the time at the other
    ],
)
def test_choice(candidates: list[tuple[Config, list[float]]], expected: Config | None, ratio: float) -> None:
    assert choose([1.0, 2.0], candidates) == (expected, pytest.approx(ratio))


def measure(times_ms: dict[int, float | Refused | Sequence[float]]) -> Callable[[Configs], float]:
    """A card on which a block size takes so long; several times are those of one measurement after the other."""
    turns = {block: iter(times) for block, times in times_ms.items() if isinstance(times, Sequence)}

    def run(configs: Configs) -> float:
        assert configs["other", "D64"] == B, "other kernels keep their configurations"
        block = configs[KEY].blocks["BLOCK"]
        time = next(turns[block]) if block in turns else times_ms[block]
        if isinstance(time, Refused):
            raise time
        assert isinstance(time, float)
        return time

    return run


CONTEXT: Table = {("other", "D64"): B}


def test_the_fastest_that_works_is_chosen() -> None:
    sizes = [
        measure({16: 0.1, 32: Refused("wrong"), 64: 0.8, 128: 1.0}),
        measure({16: Refused("too large"), 32: 0.1, 64: 0.8, 128: 1.0}),
    ]
    chosen, ratio, refused = tune(KEY, DEFAULT, [A, B, C], CONTEXT, sizes)
    assert (chosen, ratio) == (C, pytest.approx(0.8))
    assert [(config, str(reason)) for config, reason in refused] == [(A, "too large"), (B, "wrong")]


def test_what_wins_once_must_win_again() -> None:
    assert tune(KEY, DEFAULT, [A], CONTEXT, [measure({16: [0.5, 1.0], 128: 1.0})])[:2] == (None, 1.0)
    again = tune(KEY, DEFAULT, [A], CONTEXT, [measure({16: [0.5, 0.9], 128: 1.0})])
    assert again[:2] == (A, pytest.approx(0.9))


def test_a_loss_at_one_size_ends_the_measurements_of_a_candidate() -> None:
    sizes = [measure({16: 1.1, 128: 1.0}), measure({128: 1.0})]
    chosen, _, refused = tune(KEY, DEFAULT, [A], CONTEXT, sizes)
    assert chosen is None
    assert [str(reason) for _, reason in refused] == ["slower by 10% at one size"]


def test_a_default_that_does_not_work_is_no_choice() -> None:
    with pytest.raises(Refused, match="broken"):
        tune(KEY, DEFAULT, [A], CONTEXT, [measure({16: 0.5, 128: Refused("broken")})])


class WrongCard:
    """Adds and normalises with errors, in the result and in what is changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = self.state_error = 0.0
        monkeypatch.setattr(gpu, "add_rms_norm", self.add_rms_norm)
        self.case = Cases(Shapes("small", 64, 2, 1, 2), "cpu").add_rms_norm(4)

    def add_rms_norm(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out = reference.add_rms_norm(x, *arguments)
        x *= 1 + self.state_error
        return out * (1 + self.error)


def test_wrong_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = WrongCard(monkeypatch)
    checked = Checked(card.case, {})
    for _ in range(3):
        checked.check({})  # from the same state each time
    card.error = 1e-3
    checked.check({})
    for error in (1.0, torch.nan):
        card.error = error
        with pytest.raises(Refused, match="WRONG: add_rms_norm, small T=4 is off by a relative"):
            checked.check({})
    with pytest.raises(Refused):
        Checked(card.case, {})
    card.error, card.state_error = 0.0, 0.5
    with pytest.raises(Refused, match=r"is off by a relative 5\.0e-01"):
        checked.check({})


def test_token_ids_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "sample", reference.sample)
    checked = Checked(Cases(Shapes("small", 64, 2, 1, 2, vocab=50), "cpu").sample(2), {})
    monkeypatch.setattr(gpu, "sample", lambda *arguments: reference.sample(*arguments) + 1)
    with pytest.raises(Refused, match="WRONG"):
        checked.check({})


KERNELS = ["rms_norm", "mrope_cos_sin"]
NORM, ANGLES = ("rms_norm", "D256"), ("mrope_cos_sin", "R64")
FAST = Config({"BLOCK_ROWS": 4}, num_warps=8, num_stages=1)


class Pool:
    """Compiles nothing, at once; but not one configuration."""

    def submit(self, function: Any, workloads: Any, configs: Table) -> Future[str | None]:
        done: Future[str | None] = Future()
        done.set_result("CompilationError" if configs.get(NORM) == Config({"BLOCK_ROWS": 2}, 4, 1) else None)
        return done


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Iterator[dict[str, Any]]]:
    """Tunes interpreted kernels on a few rows. FAST takes half the time, all other configurations the same."""
    few = {name: operation._replace(sizes=((3,), (5,))) for name, operation in OPERATIONS.items()}
    monkeypatch.setattr(tuning, "OPERATIONS", few)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tune_kernels, "compiler_processes", lambda capability, count: contextlib.nullcontext(Pool()))

    def time_ms(run: object, *, graph: bool, repeats: int) -> Spread:
        active = launch._trial.get()
        assert active is not None
        assert graph
        return Spread.of([0.5 if active.configs.get(NORM) == FAST else 1.0])

    monkeypatch.setattr(tune_kernels, "time_ms", time_ms)

    def run(kernels: list[str] = KERNELS, budget_s: float = 60) -> Iterator[dict[str, Any]]:
        models = [Shapes("small", 256, 2, 1, 4, k_heads=2)]
        with torch.inference_mode():
            found = tune_kernels.tune_all(
                kernels, models, tmp_path / "card.json", {"card": "Some Card"}, 1, budget_s, "cpu"
            )
            yield from found

    return run


def test_each_shape_is_written_before_the_next_begins(
    tuned: Callable[..., Iterator[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "card.json", tuned()
    norm = next(rows)
    assert (norm["kernel"], norm["shape"], norm["of its time"]) == (*NORM, 0.5)
    assert (norm["chosen instead"], norm["refused"]) == ("BLOCK_ROWS=4 warps=8 stages=1", 1)
    assert read_table(path) == {NORM: FAST}
    assert json.loads(path.read_text())["card"] == "Some Card"
    (angles,) = rows
    assert (angles["kernel"], angles["shape"], angles["chosen instead"]) == (*ANGLES, None)
    assert read_table(path) == {NORM: FAST}
    assert "BLOCK_ROWS=2 warps=4 stages=1: doesn't compile: CompilationError" in capsys.readouterr().err


def test_another_run_replaces_what_it_tunes(
    tuned: Callable[..., Iterator[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, slow, other = tmp_path / "card.json", Config({"BLOCK_T": 2}, 2, 1), Config({"BLOCK_V": 16}, 4, 2)
    kept: Table = {("gdn_scan", "Hv4_K128_V128_16"): other, ("mrope_cos_sin", "R32"): slow}
    stale: Table = {("gone", "D64"): other, ("rms_norm", "D64"): Config({"ROWS": 1})}
    write_table(path, {**kept, **stale, ANGLES: slow, NORM: Config({"BLOCK_ROWS": 1}, 4, 1)}, {})
    list(tuned(["rms_norm"]))
    assert read_table(path) == {**kept, ANGLES: slow, NORM: FAST}
    assert "gone D64: dropped" in capsys.readouterr().err
    list(tuned(["mrope_cos_sin"]))
    assert read_table(path) == {**kept, NORM: FAST}


def test_when_the_time_is_over_the_table_stays(
    tuned: Callable[..., Iterator[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(tuned(budget_s=-1)) == []
    assert not (tmp_path / "card.json").exists()
    assert "Out of time: rms_norm D256" in capsys.readouterr().err


def test_a_dry_run_needs_no_card(run_here: RunHere) -> None:
    (rows,) = run_here("tune_kernels", "--dry-run", "--only", "norm")["tables"].values()
    hidden = {f"D{shapes.hidden}" for shapes in SHAPES.values()}
    assert {row["shape"] for row in rows if row["kernel"] == "rms_norm"} == hidden
    assert {row["kernel"] for row in rows} == {"norm_linear", "qk_norm_rope_write", "rms_norm", "gated_rms_norm"}
    assert all(row["candidates"] > 0 and row["workloads"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "Tuning needs an NVIDIA card"), (["--models", "7B"], "2"), (["--only", "nothing"], "2")],
)
def test_what_cannot_run_is_told(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune_kernels.py", *arguments])
    with pytest.raises(SystemExit, match=message):
        main()
