"""Everything that is asked of a card that is lent for ten minutes, by one command.

    python -m benchmarks.card_session --out build/card              in order, until the time is over
    python -m benchmarks.card_session --out build/card --only rows  the steps whose names contain this
    python -m benchmarks.card_session --compile                     without a card: compiles what the steps launch
    python -m benchmarks.card_session --out build/card --dry        on the processor, with tiny models: does it run?

Each step is a process with a limit of its own. What it prints goes to `OUT/<number>-<name>.txt` as it is printed, and a
line about how it ended to `OUT/session.jsonl`: a step that hangs or fails costs its own time and nothing else.

`--compile` fills Triton's cache, `TRITON_CACHE_DIR`, for `--capability`. Take it along, with the Triton that made it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.frame import Rows, parse, parser, report, synchronize
from benchmarks.launch_counts import META, BareEngine, as_on_a_card, halves, random_patches
from benchmarks.make_random import make_config, random_tensor
from qwen35mm_kernels import select_backend
from qwen35mm_preprocess import GridTHW

ROWS = (64, 128, 256, 512, 1024, 2048)
HISTORIES = (0, 30_000)
# Pictures of 256, 512 and 1,024 pixels, and eight frames of a small video.
GRIDS = ((1, 16, 16), (1, 32, 32), (1, 64, 64), (8, 16, 28))
# What vLLM holds to make a row's bits independent of the rows beside it on Hopper.
FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1", "TORCH_BLAS_PREFER_CUBLASLT": "1"}
# Operations that a decode step is measured without, in turn.
OPERATIONS = (
    "norm_linear",
    "add_rms_norm",
    "gdn_decode_step",
    "qk_norm_rope_write",
    "paged_attention_decode",
    "swiglu",
    "sample",
)


@dataclass(frozen=True)
class Step:
    """A process of the session.

    Attributes:
        command: words behind `python`.
        limit_s: it is ended then.
        environment: variables besides this process's.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


def steps(out: Path, *, dry: bool = False) -> list[Step]:
    """All steps in their order. Dry, only those whose work is in this file."""
    tiny = ["--dry"] if dry else []

    def own(part: str, *options: str) -> list[str]:
        return ["-m", "benchmarks.card_session", "--part", part, *options, *tiny]

    def bench(name: str, *options: str) -> list[str]:
        return ["-m", f"benchmarks.{name}", *options]

    model = str(out / "0.8B")
    on_model = "--model", model, "--device", "cuda"
    found = [
        Step("prefill-0.8B", own("prefill", "--size", "0.8B"), 40),
        Step("prefill-9B", own("prefill", "--size", "9B"), 50),
        Step("rows", own("rows", "--size", "9B"), 25),
        Step("rows-float32-parts", own("rows", "--size", "9B", "--exact"), 25),
        Step("rows-fixed", own("rows", "--size", "9B", "--exact"), 25, FIXED),
        Step("rows-no-splits", own("rows", "--size", "9B", "--exact", "--no-splits"), 25, FIXED),
        # The budget says when the last shape begins.
        *(
            Step(f"tune-{kernel}", bench("tune_kernels", "--only", kernel, "--models", "9B", "--budget", "0.5"), 45)
            for kernel in ("gdn_scan", "gdn_decode_step", "integer_tiles", "attention_decode")
        ),
        Step(
            "tests",
            ["-m", "pytest", "-m", "gpu", "-n", "8", "tests/gpu", "tests/kernels"],
            120,
            {"TRITON_INTERPRET": "0"},
        ),
        *(Step(f"tower-{size}", own("tower", "--size", size), 15) for size in ("0.8B", "9B")),
        Step("parts-0.8B", own("parts", "--size", "0.8B"), 30),
        Step("launches-0.8B", own("launches", "--size", "0.8B"), 20),
        Step("decode-9B", own("decode", "--size", "9B"), 25),
        # Two graphs more and their copies, on one card.
        Step("decode-9B-halves", own("decode", "--size", "9B", "--halves"), 25),
        *(
            Step(f"decode-9B-{format}", own("decode", "--size", "9B", "--integers", format), 25)
            for format in ("int8", "int4", "fp8")
        ),
        Step("experts", bench("kernels", "--only", "experts", "--models", "35B-A3B", "--lengths", "512,4096"), 35),
        Step("gdn", bench("kernels", "--only", "gated_delta", "--models", "9B", "--lengths", "512,4096"), 40),
        Step("make", bench("make_random", "--size", "0.8B", "--out", model), 30),
        Step("kv-types", bench("kv_types", *on_model, "--context", "8192"), 30),
        Step("first-token", bench("first_token", *on_model), 30),
        Step("captions", bench("captioning", *on_model, "--items", "500", "--slots", "16", "--no-peer"), 40),
    ]
    return [step for step in found if "--part" in step.command] if dry else found


def run_steps(chosen: Sequence[Step], out: Path, total_s: float) -> list[dict[str, Any]]:
    """Runs steps one after another; none begins after `total_s`, and none runs on behind it.

    Returns:
        The lines of `session.jsonl`: each step's name, its result ("done", "failed with N", "over its limit", "no time
        left") and its seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    started_s, lines = time.monotonic(), []
    with (out / "session.jsonl").open("a", encoding="utf-8", buffering=1) as session:
        for number, step in enumerate(chosen):
            left_s = total_s - (time.monotonic() - started_s)
            line: dict[str, Any] = {"step": step.name, "result": "no time left", "seconds": 0.0}
            if left_s > 0:
                line |= _run(step, out / f"{number:02}-{step.name}.txt", min(step.limit_s, left_s))
            lines.append(line)
            session.write(json.dumps(line) + "\n")
            print(f"{line['seconds']:6.1f} s  {step.name}: {line['result']}", flush=True)
    return lines


def _run(step: Step, path: Path, limit_s: float) -> dict[str, Any]:
    """Runs a step into a file. At its limit, it and its children are killed."""
    started_s = time.monotonic()
    # Without a buffer: what was printed before the limit is in the file.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    with path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            result = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            result = "over its limit"
    return {"result": result, "seconds": round(time.monotonic() - started_s, 1), "limit_s": limit_s}


def config_of(size: str, *, tiny: bool) -> dict[str, Any]:
    """A size's config; tiny, with its layers' kinds and hardly a number in them."""
    data = make_config(size, "bfloat16")
    if tiny:
        text = data["text_config"]
        text |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 2000, "num_hidden_layers": 4}
        text |= {"layer_types": text["layer_types"][:4], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        data["vision_config"] |= {"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}
    return data


@torch.inference_mode()
def filled(engine: BareEngine) -> BareEngine:
    """The engine with random weights, made where they lie."""
    generator = torch.Generator(engine.device).manual_seed(0)
    with engine.device:
        for name, weight in (*engine.model.named_parameters(), *engine.model.named_buffers()):
            if "inv_freq" in name:
                continue
            if weight.is_floating_point():
                target: Any = SimpleNamespace(name=name, shape=weight.shape)
                # Random numbers are made in no type of one byte.
                made = random_tensor(target, torch.bfloat16 if weight.itemsize == 1 else weight.dtype, generator)
                weight.copy_(made)
            else:
                weight.random_(generator=generator)
    for rows in (rows for pair in engine.pools.kv.layers.values() for rows in pair):
        rows.zero_()
    return engine


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median milliseconds of a run, after one that isn't counted."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        started_s = time.perf_counter()
        run()
        synchronize(device)
        found.append(1e3 * (time.perf_counter() - started_s))
    return statistics.median(found[1:])


def prefill(engine: BareEngine, rows: Sequence[int], histories: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A piece of a prompt, by its rows and the tokens before it: launched one by one, and as a graph on a card."""
    for history in histories:
        for num_rows in rows:
            row: dict[str, Any] = {"rows": num_rows, "behind": history}
            for name, captured in (("ms", False), ("ms as a graph", True)):
                with engine.piece(num_rows, history, captured=captured) as run:
                    row[name] = median_ms(run, engine.device)
            yield row | {
                "tok/s": 1e3 * num_rows / row["ms as a graph"],
                "same bits": engine.graph_agrees(num_rows, history),
            }


@torch.inference_mode()
def row_bits(engine: BareEngine, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each shape of the layers' matrices: at which numbers of rows a row has other bits than at the most."""
    from qwen35mm.model.weight_formats import Weight

    shapes = {
        (weight.out_features, weight.in_features): None
        for layer in engine.model.layers
        for weight in layer.modules()
        if isinstance(weight, Weight)
    }
    for num_out, num_in in shapes:
        x = torch.randn(max(rows), num_in, device=engine.device).to(engine.model.dtype)
        weight = (torch.randn(num_out, num_in, device=engine.device) * num_in**-0.5).to(engine.model.dtype)
        expected = F.linear(x, weight)[:1]
        others = [num_rows for num_rows in rows if not torch.equal(F.linear(x[:num_rows], weight)[:1], expected)]
        row: dict[str, Any] = {"out x in": f"{num_out} x {num_in}", "other bits at": str(others or "none")}
        for num_rows in (min(rows), max(rows)):
            row[f"ms at {num_rows}"] = median_ms(functools.partial(F.linear, x[:num_rows], weight), engine.device)
        yield row


@torch.inference_mode()
def tower(engine: BareEngine, grids: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Pictures and a video's unit, launched one by one and by a graph; what a capture takes, and whether bits stay."""
    from qwen35mm.engine.tower import RUNS_BEFORE, Tower
    from qwen35mm.engine.vision import VisionUnit, encode

    device, towers = engine.device, Tower(engine.model)
    for grid in grids:
        patches = random_patches(grid)
        unit, medium = VisionUnit(0, 0, grid[0], GridTHW(*grid), b""), SimpleNamespace(patches=patches)

        def launched(unit: VisionUnit = unit, medium: Any = medium) -> torch.Tensor:
            *_, (_, features) = encode(engine.model, unit, medium)
            assert features is not None
            return features

        row: dict[str, Any] = {"grid": str(grid), "launched, ms": median_ms(launched, device)}
        found = [towers.graph_of(patches, unit.grid_thw) for _ in range(RUNS_BEFORE - 1)]
        started_s = time.perf_counter()
        graph = towers.graph_of(patches, unit.grid_thw)
        synchronize(device)
        assert found == [None] * (RUNS_BEFORE - 1)
        if graph is not None:
            row["capture, ms"] = 1e3 * (time.perf_counter() - started_s)
            row["graph, ms"] = median_ms(functools.partial(graph.run, patches), device)
            row["same bits"] = torch.equal(graph.run(patches), launched())
        yield row


def decode(engine: BareEngine, batches: Sequence[int], num_steps: int = 16) -> Iterator[dict[str, Any]]:
    """Decode steps behind 64 tokens as the engine runs them: captured on a card, and launched one ahead."""
    for size in batches:
        ms = _step_ms(engine, size, num_steps)
        yield {"replies": size, "ms a step": ms, "tok/s": 1e3 * size / ms}


def parts(engine: BareEngine, num_steps: int = 16) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step of one reply without each operation in turn: its results are those of its first call."""
    whole = _step_ms(engine, 1, num_steps)
    yield {"without": "nothing", "ms a step": whole, "share, %": 100.0}
    for name in OPERATIONS:
        with _left_out(engine, name):
            ms = _step_ms(engine, 1, num_steps)
        yield {"without": name, "ms a step": ms, "share, %": 100 * (whole - ms) / whole}


def launches(engine: BareEngine, batches: Sequence[int], num_steps: int = 16) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step without what makes its launches fewer or shorter."""
    from qwen35mm_kernels.gpu import early

    ops = select_backend(engine.device)
    norm_linear = ops.norm_linear

    def only_with_norms(x: torch.Tensor, *others: Any, **options: Any) -> Any:
        _, norm_weight, _, matrix = others
        return (x, F.linear(x, matrix)) if norm_weight is None else norm_linear(x, *others, **options)

    changes: dict[str, Any] = {
        "nothing": contextlib.nullcontext(),
        "early starts": mock.patch.object(early, "FIRST_CAPABILITY", 1000),
        "products of few rows": mock.patch.object(ops, "norm_linear", only_with_norms),
    }
    for without, change in changes.items():
        with change:
            for size in batches:
                yield {"without": without, "replies": size, "ms a step": _step_ms(engine, size, num_steps)}


@torch.inference_mode()
def _step_ms(engine: BareEngine, size: int, num_steps: int) -> float:
    from qwen35mm.engine.step_graph import StepGraph

    max_blocks = engine.pools.kv.blocks_for(engine.num_tokens)
    graph = StepGraph(engine.model, engine.pools, engine.sampler, size, max_blocks)
    caches = [engine.pools.new_sequence() for _ in range(size)]
    for cache in caches:
        cache.prepare(64)
        cache.advance(64)
    found = []
    for step in range(num_steps):
        started_s = time.perf_counter()
        inputs = graph.inputs(step % 2)
        for row, cache in enumerate(caches):
            cache.prepare(1)
            inputs.set(row, cache, token_id=0 if step == 0 else None, step=step + 1)
        graph.run(step % 2)
        for cache in caches:
            cache.advance(1)
        if step:
            graph.token_ids(1 - step % 2)
        found.append(1e3 * (time.perf_counter() - started_s))
    graph.token_ids((num_steps - 1) % 2)
    for cache in caches:
        cache.free()
    return statistics.median(found[2:])


@contextlib.contextmanager
def _left_out(engine: BareEngine, name: str) -> Iterator[None]:
    """Inside, an operation computes once for each shape of its tensors, and then gives that result again."""
    ops = select_backend(engine.device)
    operation, known = getattr(ops, name), {}

    def first_result(*args: Any, **kwargs: Any) -> Any:
        key = tuple(arg.shape if isinstance(arg, torch.Tensor) else None for arg in args)
        if key not in known:
            known[key] = operation(*args, **kwargs)
        return known[key]

    with mock.patch.object(ops, name, first_result):
        yield


def compile_all(sizes: Sequence[str], capability: int) -> Iterator[dict[str, Any]]:
    """Compiles what the engine launches for prompts, steps and pictures of some sizes."""
    from triton.runtime import driver

    from benchmarks.tuning import TargetDriver, warm_up
    from qwen35mm_kernels.gpu import launch

    driver.set_active(TargetDriver(capability))  # pyright: ignore[reportArgumentType]
    launch._INTERPRETED_CAPABILITY = capability
    for size in sizes:
        started_s = time.perf_counter()
        with as_on_a_card(), launch.trial({}, warm_up):
            engine = BareEngine(make_config(size, "bfloat16"), device=META)
            for length in (64, 2048):
                with engine.piece(length) as run:
                    run()
            for num_rows in (1, 2, 8):
                engine.step(num_rows).compute()
            with torch.inference_mode():
                engine.embed((1, 64, 64))
        yield {"model": size, "seconds": time.perf_counter() - started_s}


def _measure(arguments: argparse.Namespace) -> Rows:
    """A step's own work."""
    device = torch.device("cpu" if arguments.dry else "cuda")
    rows, histories, num_tokens = (ROWS, HISTORIES, 65_536) if not arguments.dry else ((8, 64), (0, 64), 1024)
    if arguments.exact:
        allowed = (False, False) if arguments.no_splits else False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
    data = config_of(arguments.size, tiny=arguments.dry)
    places = halves(device, data["text_config"]["num_hidden_layers"]) if arguments.halves else device
    engine = filled(BareEngine(data, device=places, integers=arguments.integers, num_tokens=num_tokens))
    measured = {
        "prefill": functools.partial(prefill, engine, rows, histories),
        "rows": functools.partial(row_bits, engine, rows),
        "decode": functools.partial(decode, engine, (1, 8)),
        "tower": functools.partial(tower, engine, GRIDS),
        "parts": functools.partial(parts, engine),
        "launches": functools.partial(launches, engine, (1, 4, 8)),
    }[arguments.part]()
    found = []
    for row in measured:
        # At once: the step may be ended at any time.
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def main() -> None:
    options = parser(__doc__, model=False, repeats=None)
    options.add_argument("--out", type=Path, default=Path("build/card"), help="a folder")
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--only", default="", help="steps whose names contain this")
    options.add_argument("--dry", action="store_true", help="tiny models on the processor")
    options.add_argument("--compile", action="store_true", help="compile, and measure nothing")
    options.add_argument("--capability", type=int, default=90, help="what to compile for")
    options.add_argument("--sizes", type=lambda text: text.split(","), default=["0.8B", "9B"], help="what to compile")
    options.add_argument(
        "--part", choices=["prefill", "rows", "decode", "parts", "tower", "launches"], help="one step's work, here"
    )
    options.add_argument("--size", default="0.8B")
    options.add_argument("--integers", choices=["int8", "int4", "fp8"])
    options.add_argument("--halves", action="store_true", help="a part of a decode step for each half of the layers")
    options.add_argument("--exact", action="store_true", help="add parts of a split product in float32")
    options.add_argument("--no-splits", action="store_true", help="with --exact: split no product")
    arguments = parse(options)
    if arguments.compile:
        # Kernels become what they are as they are imported.
        os.environ["TRITON_INTERPRET"] = "0"
        return report("card_session", arguments, {"Compiled": list(compile_all(arguments.sizes, arguments.capability))})
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA card. Without one, --dry shows whether it runs, and --compile prepares it.")
    if arguments.part:
        return report("card_session", arguments, {arguments.part: _measure(arguments)})
    chosen = [step for step in steps(arguments.out, dry=arguments.dry) if arguments.only in step.name]
    if not chosen:
        options.error(f"--only takes a part of one of {', '.join(step.name for step in steps(arguments.out))}.")
    lines = run_steps(chosen, arguments.out, 60 * arguments.minutes)
    return report("card_session", arguments, {"Steps": lines})


if __name__ == "__main__":
    main()
